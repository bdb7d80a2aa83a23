#include "micro.h"

#include <algorithm>
#include <utility>

namespace ember {
namespace {

constexpr int kPrefetchBytes = 1024;  // prefetch distance. With one row, a core reads 15.6 GB/s from memory with it, 15.0 without

template <class B, int V>
inline __attribute__((always_inline)) void load_weights(const B* b, Vec (&out)[V]) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) load_pair(b + v * kLanes, out[v], out[v + 1]);
}

// Adds the products of `Steps` steps of k, from `lane` of their quad on. Loads all weights first, then multiplies row by row.
template <int R, int V, int Steps, class B>
inline __attribute__((always_inline)) void multiply(Vec (&sum)[R][V], const float* a, long lda, const B* b, long ldb, int lane) {
    constexpr int kGroup = 4;  // rows whose inputs are in registers at once
    Vec weight[Steps][V];
#pragma GCC unroll 4
    for (int step = 0; step < Steps; step++) load_weights(b + step * ldb, weight[step]);
#pragma GCC unroll 2
    for (int at = 0; at + 8 <= Steps * V; at += 8) keep_together(&weight[0][0] + at);
#pragma GCC unroll 16
    for (int first = 0; first < R; first += kGroup) {
        Quad quad[kGroup];
#pragma GCC unroll 4
        for (int r = 0; r < kGroup; r++)
            if (first + r < R) quad[r] = load_quad(a + (first + r) * lda);
#pragma GCC unroll 4
        for (int step = 0; step < Steps; step++)
#pragma GCC unroll 16
            for (int r = 0; r < kGroup * V; r++)
                if (int row = first + r / V, v = r % V; row < R)
                    sum[row][v] = fma_lane(sum[row][v], weight[step][v], quad[r / V], lane + step);
    }
}

// Multiplies R rows by V vectors over at most one span.
template <int R, int V, class B>
inline void multiply_span(const float* a, long lda, const B* b, long ldb, int k, float* c, long ldc, Start start) {
    constexpr int kSteps = std::clamp(held_weights(R * V) / V, 1, 4);
    Vec sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[r][v] = start == kChain ? load(c + r * ldc + v * kLanes) : splat<Vec>(0.0f);
    int i = 0;
    for (; i + 4 <= k; i += 4, a += 4, b += 4 * ldb) {
        if constexpr (R == 1)
            for (int line = 0; line < 2; line++) __builtin_prefetch(reinterpret_cast<const char*>(b) + kPrefetchBytes + 64 * line);
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; lane += kSteps) multiply<R, V, kSteps>(sum, a, lda, b + lane * ldb, ldb, lane);
    }
    for (; i < k; i++, a++, b += ldb) {
        Vec weight[V];
        load_weights(b, weight);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = fma_scalar(sum[r][v], weight[v], a[r * lda]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            float* to = c + r * ldc + v * kLanes;
            store(to, start == kSpans ? add(load(to), sum[r][v]) : sum[r][v]);
        }
}

// Computes span by span over all columns, so that weights are read from memory once.
template <int R, int V, class B>
void multiply_tile(const Product<B>& p) {
    for (int at = 0; at < p.k; at += kSpan) {
        int k = p.k - at < kSpan ? p.k - at : kSpan;
        for (int column = 0; column < kPanel; column += V * kLanes)
            multiply_span<R, V>(p.a + at, p.lda, p.b + at * p.ldb + column, p.ldb, k, p.c + column, p.ldc, at ? kSpans : p.start);
    }
}

template <class B, int... R>
void run_tile(int rows, const Product<B>& p, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const Product<B>&);
    constexpr Tile all[] = {multiply_tile<R + 1, (R < kShortRows ? kVecs : kTallVecs), B>...};
    all[rows - 1](p);
}

}  // namespace

void run_tile(int rows, const Product<float>& p) { run_tile(rows, p, std::make_integer_sequence<int, kRows>{}); }
void run_tile(int rows, const Product<bf16>& p) { run_tile(rows, p, std::make_integer_sequence<int, kRows>{}); }
void run_tile(int rows, const Product<f16>& p) { run_tile(rows, p, std::make_integer_sequence<int, kRows>{}); }

}  // namespace ember
