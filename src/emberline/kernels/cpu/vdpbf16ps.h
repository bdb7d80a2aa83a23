// The register tile of vdpbf16ps (AVX512-BF16). In each lane the instruction adds the product of two odd elements to a sum, then that
// of two even elements, each time rounding to nearest. Denormal numbers count as zero.
#pragma once
#include <algorithm>

#include "bf16_dot.h"

namespace ember::bf16_dot {

constexpr int kDepth = 2;           // elements of k in a step
constexpr int kRowGroup = 1;        // rows whose inputs are interleaved
constexpr int kTileGroups = kRows;  // groups of rows of the largest tile
constexpr int kPrefetchBytes = 4096;

typedef uint32_t Pairs __attribute__((vector_size(4 * kLanes)));  // two bf16 in each lane

}  // namespace ember::bf16_dot

#if defined(EMBER_BF16_MODEL)
#include EMBER_BF16_MODEL
#else
namespace ember::bf16_dot {
inline Vec add_products(Vec sum, Pairs columns, Pairs inputs) { return _mm512_dpbf16_ps(sum, (__m512bh)columns, (__m512bh)inputs); }
}  // namespace ember::bf16_dot
#endif

namespace ember::bf16_dot {

inline Pairs load_pairs(const bf16* p) {
    Pairs pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}

inline Pairs splat_pair(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return Pairs{} + pair;
}

template <int R>
inline __attribute__((always_inline)) void multiply_chain(const bf16* rows, long stride, const bf16* weights, int steps, float* sums,
                                                          bool fresh) {
    Vec sum[R][kVecs];
#pragma GCC unroll 24
    for (int i = 0; i < R * kVecs; i++) sum[i / kVecs][i % kVecs] = splat<Vec>(0.0f);
    for (int s = 0; s < steps; s++, rows += kDepth, weights += kPanel * kDepth) {
        if constexpr (R == 1)
            for (int line = 0; line < 2; line++) __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes + 64 * line);
        Pairs columns[kVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; v++) columns[v] = load_pairs(weights + v * kLanes * kDepth);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Pairs inputs = splat_pair(rows + r * stride);
#pragma GCC unroll 2
            for (int v = 0; v < kVecs; v++) sum[r][v] = add_products(sum[r][v], columns[v], inputs);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * kVecs; i++) {
        float* to = sums + i / kVecs * kPanel + i % kVecs * kLanes;
        store(to, fresh ? sum[i / kVecs][i % kVecs] : add(load(to), sum[i / kVecs][i % kVecs]));
    }
}

template <int R>
void multiply_tile(const Tile& tile) {
    for (int at = 0; at < tile.k; at += kChainProducts) {
        int steps = std::min(kChainProducts, tile.k - at) / kDepth;
        multiply_chain<R>(tile.rows + at, tile.stride, tile.weights + long(at) * kPanel, steps, tile.sums, tile.fresh && at == 0);
    }
}

}  // namespace ember::bf16_dot
