// Weights are stored as [panel][k / 32][2] tiles. A tile is 16 pairs of k by 16 columns, and a panel's step over 32 of k is two
// tiles, 2 KiB that are read sequentially. Inputs are stored as [row / 16][k / 32] tiles of 16 rows by 32 of k. Both are padded
// with zeros along k.
//
// A step adds 32 products to a sum in an order that the instruction fixes, and steps follow each other in the order of k. So, as
// in micro.h, an output's bits depend on its own row and column only: sums can be stored between steps without loss.
#include "amx.h"

#if EMBER_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

namespace ember::amx {
namespace {

constexpr int kTile = kSide * kDepth;    // elements of a tile, 1 KiB
constexpr int kPiece = 10;               // steps of k for which the weights and inputs of a block fit into L1 together
constexpr int kGroupRows = 16 * kBlock;  // rows whose inputs stay in L2; half as many if the weights stay there too
constexpr long kSmallWeights = 2 << 20;  // elements of a weight that stays in L2
constexpr int kGroupPanels = 8;          // panels that are multiplied by these rows; their sums stay in L2 too
constexpr long kSerialFloats = 16 * 1024;

inline long count_steps(long k) { return (k + kDepth - 1) / kDepth; }

// Offset of a column of the weight in the packed matrix, and the offset of its i-th element from there.
inline long column_start(long panel, long column, long steps) {
    return (panel * steps * 2 + column / kSide) * kTile + column % kSide * 2;
}
inline long offset_along_k(long i) { return i / kDepth * 2 * kTile + i % kDepth / 2 * 2 * kSide + i % 2; }

// Normalises one row of inputs if a norm is given, rounds it, and stores it into its row of each tile.
void round_row(const Linear& op, const float* x, bf16* to) {
    float scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
    int at = 0;
    for (; at + kDepth <= op.k; at += kDepth, to += kTile) {
        float row[kDepth];
        for (int i = 0; i < kDepth; i += kLanes) {
            Vec some = load(x + at + i);
            store(row + i, op.norm ? mul(mul(some, splat<Vec>(scale)), load(op.norm + at + i)) : some);
        }
        round_to_bf16(row, to);
    }
    if (at == op.k) return;
    float row[kDepth] = {};
    for (int i = 0; i < op.k - at; i++) row[i] = op.norm ? x[at + i] * scale * op.norm[at + i] : x[at + i];
    round_to_bf16(row, to);
}

const bf16* prepare(const Linear& op) {
    long steps = count_steps(op.k), row_tiles = (op.m + kSide - 1) / kSide;
    bf16* to = reinterpret_cast<bf16*>(scratch(kInputs, row_tiles * steps * kTile / 2));
    auto prepare_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++) round_row(op, op.x + r * op.k, to + r / kSide * steps * kTile + r % kSide * kDepth);
    };
    if (long(op.m) * op.k <= kSerialFloats) prepare_rows(0, op.m);
    else parallel(op.m, prepare_rows);
    return to;
}

// Multiplies `rows` rows from `first` by the panels [from, to). Few rows use each panel whole; many rows split k into pieces, so
// that the weights and inputs that they share stay in the caches.
void run_group(const Linear& op, const bf16* inputs, const bf16* weights, int first, int rows, long from, long to,
               TileRegisters& tiles) {
    long steps = count_steps(op.k), lower = steps * kTile;
    long padded = (rows + kBlock - 1) / kBlock * kBlock, pieces = rows <= kBlock ? 1 : (steps + kPiece - 1) / kPiece;
    float* sums = scratch(kSums, (pieces == 1 ? kBlock : (to - from) * padded) * kPanel);
    for (long piece = 0; piece < pieces; piece++) {
        long start = steps * piece / pieces, count = steps * (piece + 1) / pieces - start;
        for (long panel = from; panel < to; panel++)
            for (int row = 0; row < rows; row += kBlock) {
                int height = std::min(kBlock, rows - row);
                Operand a{inputs + (first + row) / kSide * lower + start * kTile, lower, kTile, kDepth};
                Operand b{weights + (panel * steps + start) * 2 * kTile, kTile, 2 * kTile, kDepth};
                float* c = pieces == 1 ? sums : sums + ((panel - from) * padded + row) * kPanel;
                multiply(tiles, height, a, b, count, c, kPanel, piece == 0, row == 0);
                if (piece + 1 == pieces) write_outputs_vectorized(op, panel, first + row, height, c);
            }
    }
}

bool request_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace

bool available() {
    static const bool granted = request_tiles();  // to the process, including threads started later
    return granted;
}

void pack(const bf16* from, bf16* to, long n, long k, bool gated) {
    long steps = count_steps(k);
    parallel((n + kPanel - 1) / kPanel, [=](long begin, long end) {
        for (long p = begin; p < end; p++)
            for (int column = 0; column < kPanel; column++) {
                long row = source_row(p, column, n, gated);
                bf16* at = to + column_start(p, column, steps);
                for (long i = 0; i < steps * kDepth; i++) at[offset_along_k(i)] = row < 0 || i >= k ? bf16{} : from[row * k + i];
            }
    });
}

void run(const Linear& op, const bf16* weights) {
    const bf16* inputs = prepare(op);
    int group_rows = long(op.n) * op.k <= kSmallWeights ? kGroupRows / 2 : kGroupRows;
    long panels = (op.n + kPanel - 1) / kPanel, groups = (op.m + group_rows - 1) / group_rows;
    parallel(groups * panels, [&](long begin, long end) {
        TileRegisters tiles;
        while (begin < end) {
            long from = begin % panels;
            int first = int(begin / panels) * group_rows;
            long to = std::min({panels, from + kGroupPanels, from + end - begin});
            run_group(op, inputs, weights, first, std::min(group_rows, op.m - first), from, to, tiles);
            begin += to - from;
        }
    });
}

void embed(const long* ids, long count, const bf16* table, long k, float* out) {
    long steps = count_steps(k);
    parallel((count + kSide - 1) / kSide, [=](long begin, long end) {
        for (long t = begin * kSide; t < std::min(end * kSide, count); t++) {
            const bf16* row = table + column_start(ids[t] / kPanel, ids[t] % kPanel, steps);
            for (long i = 0; i < k; i++) out[t * k + i] = widen(row[offset_along_k(i)]);
        }
    });
}

}  // namespace ember::amx
#endif
