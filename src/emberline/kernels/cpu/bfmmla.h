// The register tile of bfmmla (Arm). The instruction multiplies two rows by two columns: to each of four sums it adds the sum of the
// first two products, then that of the other two. It rounds inexact results to odd (the last bit becomes 1). Denormal numbers count as
// zero.
#pragma once
#include <algorithm>

#include "bf16_dot.h"

namespace ember::bf16_dot {

constexpr int kDepth = 4;       // elements of k in a step
constexpr int kRowGroup = 2;    // rows whose inputs are interleaved
constexpr int kTileGroups = 4;  // groups of rows of the largest tile
constexpr int kPrefetchBytes = 1024;

typedef uint16_t Block __attribute__((vector_size(16)));  // four bf16 of each of two rows (or columns)
typedef float Sums __attribute__((vector_size(16)));      // of two columns for each of two rows

}  // namespace ember::bf16_dot

#if defined(EMBER_BF16_MODEL)
#include EMBER_BF16_MODEL
#else
namespace ember::bf16_dot {
inline Sums add_products(Sums sum, Block rows, Block columns) {
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_u16((uint16x8_t)rows), vreinterpretq_bf16_u16((uint16x8_t)columns));
}
}  // namespace ember::bf16_dot
#endif

namespace ember::bf16_dot {

template <class V, class T>
inline V load_vector(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The sums of the first and the second row, of two pairs of columns.
#if defined(__aarch64__)
inline Sums first_row(Sums a, Sums b) { return (Sums)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
inline Sums second_row(Sums a, Sums b) { return (Sums)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }
#else
inline Sums first_row(Sums a, Sums b) { return Sums{a[0], a[1], b[0], b[1]}; }
inline Sums second_row(Sums a, Sums b) { return Sums{a[2], a[3], b[2], b[3]}; }
#endif

inline void add_sums(Sums sums, float* to, bool fresh) {
    if (!fresh) sums = load_vector<Sums>(to) + sums;
    std::memcpy(to, &sums, sizeof sums);
}

// Multiplies `Groups` pairs of rows by `Pairs` pairs of columns.
template <int Groups, int Pairs>
inline __attribute__((always_inline)) void multiply_chain(const bf16* rows, long stride, const bf16* weights, int steps, float* sums,
                                                          bool fresh) {
    Sums sum[Groups][Pairs];
#pragma GCC unroll 32
    for (int i = 0; i < Groups * Pairs; i++) sum[i / Pairs][i % Pairs] = Sums{};
    for (int s = 0; s < steps; s++, rows += kRowGroup * kDepth, weights += kPanel * kDepth) {
        if constexpr (Groups == 1)
            for (int line = 0; line < 2; line++) __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes + 64 * line);
        Block inputs[Groups];
#pragma GCC unroll 4
        for (int g = 0; g < Groups; g++) inputs[g] = load_vector<Block>(rows + g * stride);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) {
            Block columns = load_vector<Block>(weights + p * 2 * kDepth);
#pragma GCC unroll 4
            for (int g = 0; g < Groups; g++) sum[g][p] = add_products(sum[g][p], inputs[g], columns);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < Pairs; p += 2)
#pragma GCC unroll 4
        for (int g = 0; g < Groups; g++) {
            float* to = sums + 2 * g * kPanel + 2 * p;
            add_sums(first_row(sum[g][p], sum[g][p + 1]), to, fresh);
            add_sums(second_row(sum[g][p], sum[g][p + 1]), to + kPanel, fresh);
        }
}

// Computes chain by chain over all columns, so that weights are read from memory once.
template <int Groups>
void multiply_tile(const Tile& tile) {
    constexpr int kPairs = Groups <= 2 ? kPanel / 2 : kPanel / 4;  // at most 16 vectors of sums
    for (int at = 0; at < tile.k; at += kChainProducts)
        for (int pair = 0; pair < kPanel / 2; pair += kPairs)
            multiply_chain<Groups, kPairs>(tile.rows + at * kRowGroup, tile.stride, tile.weights + long(at) * kPanel + pair * 2 * kDepth,
                                           std::min(kChainProducts, tile.k - at) / kDepth, tile.sums + 2 * pair, tile.fresh && at == 0);
}

}  // namespace ember::bf16_dot
