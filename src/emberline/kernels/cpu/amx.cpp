// Weights lie as [panel][k / 32][2] tiles: a tile is 16 pairs of k by 16 columns, and a panel's step over 32 of k is two of
// them, 2 KiB read front to back. Inputs lie as [row / 16][k / 32] tiles of 16 rows by 32 of k. Zeros pad both along k.
//
// A step adds 32 products to a sum in an order the instruction fixes, and the steps follow one another in k's order. So an
// output's bits depend on its own row and column only, as everywhere in the house: a sum set aside comes back the same.
#include "amx.h"

#if EMBER_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

namespace ember::amx {
namespace {

constexpr int kSide = 16, kDepth = 32;   // rows (or columns) and k of a tile
constexpr int kTile = kSide * kDepth;    // its numbers, 1 KiB
constexpr int kBlock = 2 * kSide;        // rows whose sums, over one panel, fill four tiles
constexpr int kPiece = 10;               // steps of k whose weights and inputs of a block stay in L1 together
constexpr int kGroupRows = 16 * kBlock;  // rows whose piece stays in L2
constexpr int kGroupPanels = 8;          // panels that read it from there, their sums beside it
constexpr int kAhead = 8 * 1024;         // bytes of weights fetched ahead by the first rows that use them
constexpr long kSerialFloats = 16 * 1024;
static_assert(kPanel == kBlock, "a panel is two tiles wide");

inline long steps_of(long k) { return (k + kDepth - 1) / kDepth; }

// Where a column of the weight begins in the packed matrix, and how far from there its i-th number is.
inline long column_start(long panel, long column, long steps) {
    return (panel * steps * 2 + column / kSide) * kTile + column % kSide * 2;
}
inline long along_k(long i) { return i / kDepth * 2 * kTile + i % kDepth / 2 * 2 * kSide + i % 2; }

// The tiles of this thread, for as long as this lives: whoever had them before, torch included, left nothing to rely on.
// 0 to 3 are sums (upper left, upper right, lower left, lower right), 4 and 5 inputs (upper, lower), 6 and 7 weights.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // So many rows in the upper and the lower half of a block. Rows that are not there are neither read nor multiplied.
    void shape(int upper, int lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        Config config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = kSide;
        for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(upper);
        for (int tile : {2, 3, 5}) config.rows[tile] = uint8_t(std::max(1, lower));
        asm volatile("" : : "r"(&config) : "memory");  // some compilers believe the next line reads its first bytes only
        _tile_loadconfig(&config);
    }

private:
    struct alignas(64) Config {  // the processor's own layout
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(Config) == 64);
    int upper_ = 0, lower_ = 0;
};

// `steps` steps of one block: `a` is its upper row of tiles, the lower is `lower` numbers on; `b` is the panel's.
template <bool Tall>
void multiply(const bf16* a, long lower, const bf16* b, long steps, float* sums, bool fresh, bool fetch) {
    constexpr long stride = kPanel * sizeof(float), width = kDepth * sizeof(bf16);
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (Tall) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + kSide, stride);
        if constexpr (Tall) {
            _tile_loadd(2, sums + kSide * kPanel, stride);
            _tile_loadd(3, sums + kSide * kPanel + kSide, stride);
        }
    }
    for (long s = 0; s < steps; s++, a += kTile, b += 2 * kTile) {
        if (fetch)
            for (int line = 0; line < 32; line++) __builtin_prefetch(reinterpret_cast<const char*>(b) + kAhead + 64 * line);
        _tile_loadd(6, b, width);
        _tile_loadd(4, a, width);
        _tile_loadd(7, b + kTile, width);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Tall) {
            _tile_loadd(5, a + lower, width);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + kSide, stride);
    if constexpr (Tall) {
        _tile_stored(2, sums + kSide * kPanel, stride);
        _tile_stored(3, sums + kSide * kPanel + kSide, stride);
    }
}

// One row of inputs, normalised where a norm is given, rounded into its place in each tile of its row of tiles.
void round_row(const Linear& op, const float* x, bf16* to) {
    float scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
    for (int at = 0; at < op.k; at += kDepth, to += kTile) {
        int count = std::min(kDepth, op.k - at);
        float row[kDepth] = {};
        for (int i = 0; i < count; i++) row[i] = op.norm ? x[at + i] * scale * op.norm[at + i] : x[at + i];
        for (int i = 0; i < kDepth; i++) to[i] = round_bf16(row[i]);
    }
}

const bf16* prepare(const Linear& op) {
    long steps = steps_of(op.k), tall = (op.m + kSide - 1) / kSide;
    bf16* to = reinterpret_cast<bf16*>(scratch(kInputs, tall * steps * kTile / 2));
    auto some = [&](long begin, long end) {
        for (long r = begin; r < end; r++) round_row(op, op.x + r * op.k, to + r / kSide * steps * kTile + r % kSide * kDepth);
    };
    if (long(op.m) * op.k <= kSerialFloats) some(0, op.m);
    else parallel(op.m, some);
    return to;
}

// Up to kGroupRows rows from `first`, times the panels [from, to). A few rows take each panel whole; many take k in pieces, so
// that what they share stays near.
void run_group(const Linear& op, const bf16* inputs, const bf16* weights, int first, long from, long to, Tiles& tiles) {
    long steps = steps_of(op.k), lower = steps * kTile;
    int rows = std::min(kGroupRows, op.m - first);
    long padded = (rows + kBlock - 1) / kBlock * kBlock, pieces = rows <= kBlock ? 1 : (steps + kPiece - 1) / kPiece;
    float* sums = scratch(kSums, (to - from) * padded * kPanel);
    for (long piece = 0; piece < pieces; piece++) {
        long start = steps * piece / pieces, count = steps * (piece + 1) / pieces - start;
        for (long panel = from; panel < to; panel++)
            for (int row = 0; row < rows; row += kBlock) {
                int height = std::min(kBlock, rows - row);
                const bf16* a = inputs + (first + row) / kSide * lower + start * kTile;
                const bf16* b = weights + (panel * steps + start) * 2 * kTile;
                float* c = sums + ((panel - from) * padded + row) * kPanel;
                tiles.shape(std::min(height, kSide), std::max(0, height - kSide));
                if (height > kSide) multiply<true>(a, lower, b, count, c, piece == 0, row == 0);
                else multiply<false>(a, lower, b, count, c, piece == 0, row == 0);
                if (piece + 1 == pieces) finish(op, panel, first + row, height, c);
            }
    }
}

bool ask_for_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace

bool available() {
    static const bool granted = ask_for_tiles();  // to the process, threads to come included
    return granted;
}

void pack(const bf16* from, bf16* to, long n, long k, bool gated) {
    long steps = steps_of(k);
    parallel((n + kPanel - 1) / kPanel, [=](long begin, long end) {
        for (long p = begin; p < end; p++)
            for (int column = 0; column < kPanel; column++) {
                long row = source_row(p, column, n, gated);
                bf16* at = to + column_start(p, column, steps);
                for (long i = 0; i < steps * kDepth; i++) at[along_k(i)] = row < 0 || i >= k ? bf16{} : from[row * k + i];
            }
    });
}

void run(const Linear& op, const bf16* weights) {
    const bf16* inputs = prepare(op);
    long panels = (op.n + kPanel - 1) / kPanel, groups = (op.m + kGroupRows - 1) / kGroupRows;
    parallel(groups * panels, [&](long begin, long end) {
        Tiles tiles;
        while (begin < end) {
            long group = begin / panels, from = begin % panels;
            long to = std::min({panels, from + kGroupPanels, from + end - begin});
            run_group(op, inputs, weights, int(group) * kGroupRows, from, to, tiles);
            begin += to - from;
        }
    });
}

void embed(const long* ids, long count, const bf16* table, long k, float* out) {
    long steps = steps_of(k);
    parallel((count + kSide - 1) / kSide, [=](long begin, long end) {
        for (long t = begin * kSide; t < std::min(end * kSide, count); t++) {
            const bf16* row = table + column_start(ids[t] / kPanel, ids[t] % kPanel, steps);
            for (long i = 0; i < k; i++) out[t * k + i] = widen(row[along_k(i)]);
        }
    });
}

}  // namespace ember::amx
#endif
