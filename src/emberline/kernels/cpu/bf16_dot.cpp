// Weights are stored as [panel][k / kDepth][columns of the panel][kDepth], inputs as [groups of rows][k / kDepth][kRowGroup][kDepth],
// both padded with zeros along k. A step of a tile multiplies kDepth consecutive inputs of its rows by as many weights of each column.
#include "bf16_dot.h"

#if defined(EMBER_BFMMLA)
#include "bfmmla.h"
#elif defined(EMBER_VDPBF16PS)
#include "vdpbf16ps.h"
#endif

#if defined(EMBER_BFMMLA) || defined(EMBER_VDPBF16PS)
#include <utility>

#include "micro.h"
#include "pool.h"

namespace ember::bf16_dot {
namespace {

constexpr int kPadding = 32;               // k of packed weights and of rounded inputs is a multiple of this
constexpr long kSerialFloats = 16 * 1024;  // up to this size, waking a thread costs more than rounding the inputs

// Many rows are multiplied in pieces: a piece of a panel stays in L1 while all tiles of a band use it; the band's inputs for the piece,
// and the sums of all its panels, stay in L2. Each weight is read from memory once in a band.
constexpr int kPieceBytes = 16 * 1024;
constexpr int kPiece = kPieceBytes / 2 / kPanel;  // of k
constexpr int kBandRows = 256;
constexpr int kBandPanels = 256 / kPanel;
static_assert(kPiece % kChainProducts == 0, "cuts elsewhere would change the bits of results");
static_assert(kPadding % kDepth == 0 && kBandRows % kRowGroup == 0);

struct Rounded {
    const bf16* rows;
    long stride;  // elements from one group of rows to the next
    int groups;
};

inline long padded(long k) { return (k + kPadding - 1) / kPadding * kPadding; }

// Offset of an element of a column in its packed panel.
inline long element_offset(long column, long i) { return (i / kDepth * kPanel + column) * kDepth + i % kDepth; }

// Normalises one row of inputs if a norm is given, rounds it, and stores it into its places in a group.
void round_row(const Linear& op, const float* x, bf16* to) {
    float scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
    for (int at = 0; at < op.k; at += kPadding, to += kPadding * kRowGroup) {
        int count = std::min(kPadding, op.k - at);
        float some[kPadding] = {};
        for (int i = 0; i < count; i++) some[i] = op.norm ? x[at + i] * scale * op.norm[at + i] : x[at + i];
        bf16 rounded[kPadding];
        for (int i = 0; i < kPadding; i++) rounded[i] = round_bf16(some[i]);
        for (int i = 0; i < kPadding; i += kDepth) std::copy_n(rounded + i, kDepth, to + i * kRowGroup);
    }
}

Rounded round_inputs(const Linear& op) {
    int groups = (op.m + kRowGroup - 1) / kRowGroup;
    long stride = (padded(op.k) + kPadding) * kRowGroup;  // not a multiple of 4 KiB, as in linear.cpp
    auto* to = reinterpret_cast<bf16*>(scratch(kInputs, groups * stride / 2));
    if (op.m % kRowGroup) std::fill_n(to + (groups - 1) * stride, stride, bf16{});  // a row without inputs
    auto round_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++) round_row(op, op.x + r * op.k, to + r / kRowGroup * stride + r % kRowGroup * kDepth);
    };
    if (long(op.m) * op.k <= kSerialFloats) round_rows(0, op.m);
    else parallel(op.m, round_rows);
    return {to, stride, groups};
}

template <int... Groups>
void run_tile(int groups, const Tile& tile, std::integer_sequence<int, Groups...>) {
    using Function = void (*)(const Tile&);
    constexpr Function all[] = {multiply_tile<Groups + 1>...};
    all[groups - 1](tile);
}

// Multiplies the groups of rows [first, first + groups) by the panels [from, to).
void run_band(const Linear& op, const Rounded& in, const bf16* weights, int first, int groups, long from, long to) {
    RowBlocks tiles(groups, kTileGroups);
    long depth = padded(op.k), rows = long(groups) * kRowGroup;
    long piece = tiles.count == 1 ? depth : kPiece;  // a single tile reads each panel from its start to its end
    float* sums = scratch(kSums, (to - from) * rows * kPanel);
    for (long at = 0; at < depth; at += piece)
        for (long panel = from; panel < to; panel++)
            for (int i = 0; i < tiles.count; i++) {
                const bf16* inputs = in.rows + (first + tiles.start(i)) * in.stride + at * kRowGroup;
                float* c = sums + ((panel - from) * rows + tiles.start(i) * kRowGroup) * kPanel;
                Tile tile{inputs, in.stride, weights + (panel * depth + at) * kPanel, int(std::min(piece, depth - at)), c, at == 0};
                run_tile(tiles.size(i), tile, std::make_integer_sequence<int, kTileGroups>{});
            }
    int row = first * kRowGroup, height = int(std::min<long>(rows, op.m - row));
    for (long panel = from; panel < to; panel++) write_outputs_vectorized(op, panel, row, height, sums + (panel - from) * rows * kPanel);
}

}  // namespace

void pack(const bf16* from, bf16* to, long n, long k, bool gated) {
    parallel((n + kPanel - 1) / kPanel, [=](long begin, long end) {
        for (long p = begin; p < end; p++)
            for (int column = 0; column < kPanel; column++) {
                long row = source_row(p, column, n, gated);
                bf16* panel = to + p * padded(k) * kPanel;
                for (long i = 0; i < padded(k); i++)
                    panel[element_offset(column, i)] = row < 0 || i >= k ? bf16{} : from[row * k + i];
            }
    });
}

void run(const Linear& op, const bf16* weights) {
    Rounded in = round_inputs(op);
    long panels = (op.n + kPanel - 1) / kPanel;
    RowBlocks bands(in.groups, kBandRows / kRowGroup);
    parallel(bands.count * panels, [&](long begin, long end) {
        while (begin < end) {
            int band = int(begin / panels);
            long from = begin % panels, to = std::min({panels, from + kBandPanels, from + end - begin});
            run_band(op, in, weights, bands.start(band), bands.size(band), from, to);
            begin += to - from;
        }
    });
}

void embed(const long* ids, long count, const bf16* table, long k, float* out) {
    parallel((count + 15) / 16, [=](long begin, long end) {
        for (long t = begin * 16; t < std::min(end * 16, count); t++) {
            const bf16* panel = table + ids[t] / kPanel * padded(k) * kPanel;
            for (long i = 0; i < k; i++) out[t * k + i] = widen(panel[element_offset(ids[t] % kPanel, i)]);
        }
    });
}

}  // namespace ember::bf16_dot
#endif
