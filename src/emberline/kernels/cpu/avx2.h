// x86 with AVX2 and FMA. Multiplying by one lane is a broadcast from memory, which the load ports do at no extra cost.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace ember {

constexpr const char* kIsa = "avx2";
constexpr int kLanes = 8;
constexpr int kVecs = 2;       // vectors across a panel
constexpr int kRows = 6;       // rows of the largest tile: 12 sums of 16 registers
constexpr int kShortRows = 6;  // every tile spans the panel
constexpr int kTallVecs = 2;
constexpr int kSpan = 64;      // products summed in one chain
constexpr int held_weights(int) { return kVecs; }  // widened weights in registers at once; see neon.h

using Vec = __m256;
using Quad = const float*;

template <>
inline Vec splat(float x) {
    return _mm256_set1_ps(x);
}
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec scale_by_exponent(Vec a, Vec n) {  // adds the low bits of n to a's exponent
    __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
}
inline float total(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Quad load_quad(const float* p) { return p; }
inline Vec fma_lane(Vec sum, Vec b, Quad a, int lane) { return _mm256_fmadd_ps(b, _mm256_broadcast_ss(a + lane), sum); }
inline Vec fma_scalar(Vec sum, Vec b, float a) { return _mm256_fmadd_ps(b, _mm256_set1_ps(a), sum); }

inline Vec load_wide(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline Vec load_wide(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline void load_pair(const float* p, Vec& low, Vec& high) {
    low = load(p);
    high = load(p + kLanes);
}

template <class B>
inline void load_pair(const B* p, Vec& low, Vec& high) {
    low = load_wide(p);
    high = load_wide(p + kLanes);
}

template <class B>
inline void widen8(const B* from, float* to) {
    store(to, load_wide(from));
}

inline void keep_together(Vec*) {}

}  // namespace ember
