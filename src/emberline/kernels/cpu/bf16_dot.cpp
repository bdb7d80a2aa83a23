// Weights are stored as [panel][k / kDepth][columns of the panel][kDepth], padded with zeros along k. One step multiplies kDepth
// consecutive inputs of a row by as many weights of each column.
//
// A sum adds its steps in the order of k, each in an order that the instruction fixes. So, as in micro.h, an output's bits depend on
// its own row and column only.
#include "bf16_dot.h"

#if EMBER_BF16_DOT
#include <algorithm>
#include <utility>

#include "micro.h"
#include "pool.h"

namespace ember::bf16_dot {
namespace {

constexpr int kPadding = 32;               // k of packed weights and of rounded inputs is a multiple of this
constexpr long kInputBytes = 256 * 1024;   // rounded inputs that stay in L2 while all panels are multiplied
constexpr long kSerialFloats = 16 * 1024;  // up to this size, waking a thread costs more than rounding the inputs

struct Rounded {
    const bf16* rows;
    long stride;
};

#if defined(__aarch64__)
constexpr int kDepth = 4;
constexpr int kTileRows = 8;

inline bfloat16x8_t load_bf16(const bf16* p) { return vreinterpretq_bf16_u16(vld1q_u16(&p->bits)); }

// The same four inputs of two rows.
inline bfloat16x8_t load_rows(const bf16* first, const bf16* second) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&first->bits), vld1_u16(&second->bits)));
}

// Multiplies R rows by `Pairs` pairs of columns. An instruction multiplies two rows by two columns; the last row of an odd number is
// its own neighbour.
template <int R, int Pairs>
inline void multiply_columns(Rounded in, const bf16* b, long steps, float* sums) {
    constexpr int kRowPairs = (R + 1) / 2;
    float32x4_t sum[kRowPairs][Pairs];
#pragma GCC unroll 16
    for (int i = 0; i < kRowPairs * Pairs; i++) sum[i / Pairs][i % Pairs] = vdupq_n_f32(0.0f);
    for (long s = 0; s < steps; s++, b += kPanel * kDepth) {
        bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 4
        for (int r = 0; r < kRowPairs; r++) {
            const bf16* first = in.rows + 2 * r * in.stride + s * kDepth;
            rows[r] = load_rows(first, 2 * r + 1 < R ? first + in.stride : first);
        }
#pragma GCC unroll 8
        for (int p = 0; p < Pairs; p++) {
            bfloat16x8_t columns = load_bf16(b + p * 2 * kDepth);
#pragma GCC unroll 4
            for (int r = 0; r < kRowPairs; r++) sum[r][p] = vbfmmlaq_f32(sum[r][p], rows[r], columns);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < Pairs; p += 2)
#pragma GCC unroll 4
        for (int r = 0; r < kRowPairs; r++) {
            float64x2_t left = vreinterpretq_f64_f32(sum[r][p]), right = vreinterpretq_f64_f32(sum[r][p + 1]);
            store(sums + 2 * r * kPanel + 2 * p, vreinterpretq_f32_f64(vzip1q_f64(left, right)));
            if (2 * r + 1 < R) store(sums + (2 * r + 1) * kPanel + 2 * p, vreinterpretq_f32_f64(vzip2q_f64(left, right)));
        }
}

template <int R>
void multiply_tile(Rounded in, const bf16* panel, long steps, float* sums) {
    constexpr int kPairs = R <= 4 ? kPanel / 2 : kPanel / 4;  // at most 16 vectors of sums
    for (int pair = 0; pair < kPanel / 2; pair += kPairs)
        multiply_columns<R, kPairs>(in, panel + pair * 2 * kDepth, steps, sums + 2 * pair);
}
#else
constexpr int kDepth = 2;
constexpr int kTileRows = kRows;

template <int R>
void multiply_tile(Rounded in, const bf16* panel, long steps, float* sums) {
    auto load_bits = [](const bf16* p) { return __m512bh(_mm512_loadu_si512(p)); };
    Vec sum[R][kVecs];
#pragma GCC unroll 24
    for (int i = 0; i < R * kVecs; i++) sum[i / kVecs][i % kVecs] = splat<Vec>(0.0f);
    for (long s = 0; s < steps; s++, panel += kPanel * kDepth) {
        __m512bh columns[kVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; v++) columns[v] = load_bits(panel + v * kLanes * kDepth);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            int32_t two;
            std::memcpy(&two, in.rows + r * in.stride + s * kDepth, sizeof two);
#pragma GCC unroll 2
            for (int v = 0; v < kVecs; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], columns[v], __m512bh(_mm512_set1_epi32(two)));
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * kVecs; i++) store(sums + i / kVecs * kPanel + i % kVecs * kLanes, sum[i / kVecs][i % kVecs]);
}
#endif

inline long padded(long k) { return (k + kPadding - 1) / kPadding * kPadding; }

// Offset of an element of a column in its packed panel.
inline long element_offset(long column, long i) { return (i / kDepth * kPanel + column) * kDepth + i % kDepth; }

Rounded round_inputs(const Linear& op) {
    long stride = padded(op.k) + kPadding;  // not a multiple of 4 KiB, as in linear.cpp
    auto* to = reinterpret_cast<bf16*>(scratch(kInputs, op.m * stride / 2));
    auto round_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++) {
            const float* x = op.x + r * op.k;
            bf16* row = to + r * stride;
            float scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
            for (int i = 0; i < op.k; i++) row[i] = round_bf16(op.norm ? x[i] * scale * op.norm[i] : x[i]);
            std::fill(row + op.k, row + padded(op.k), bf16{});
        }
    };
    if (long(op.m) * op.k <= kSerialFloats) round_rows(0, op.m);
    else parallel(op.m, round_rows);
    return {to, stride};
}

template <int... R>
void run_tile(int rows, Rounded in, const bf16* panel, long steps, float* sums, std::integer_sequence<int, R...>) {
    using Tile = void (*)(Rounded, const bf16*, long, float*);
    constexpr Tile all[] = {multiply_tile<R + 1>...};
    all[rows - 1](in, panel, steps, sums);
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
    long panels = (op.n + kPanel - 1) / kPanel, steps = padded(op.k) / kDepth;
    RowBlocks groups(op.m, int(std::max<long>(kTileRows, kInputBytes / (2 * in.stride))));
    parallel(groups.count * panels, [&](long begin, long end) {
        for (long task = begin; task < end; task++) {
            int group = int(task / panels), first = groups.start(group), rows = groups.size(group);
            long panel = task % panels;
            float* sums = scratch(kSums, long(rows) * kPanel);
            RowBlocks tiles(rows, kTileRows);
            for (int tile = 0; tile < tiles.count; tile++) {
                int row = tiles.start(tile);
                run_tile(tiles.size(tile), {in.rows + (first + row) * in.stride, in.stride}, weights + panel * padded(op.k) * kPanel,
                         steps, sums + row * kPanel, std::make_integer_sequence<int, kTileRows>{});
            }
            write_outputs(op, panel, first, rows, sums);
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
