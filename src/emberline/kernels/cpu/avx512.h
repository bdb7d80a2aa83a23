// x86 with AVX-512F, and AVX-512BW for widening bf16.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace ember {

constexpr const char* kIsa = "avx512";
constexpr int kLanes = 16;
constexpr int kVecs = 2;        // vectors across a panel
constexpr int kRows = 12;       // rows of the largest tile: 24 sums of 32 registers
constexpr int kShortRows = 12;  // every tile spans the panel
constexpr int kTallVecs = 2;
constexpr int kSpan = 32;       // products summed in one chain; with 64 the error is over twice that of torch
constexpr int held_weights(int) { return kVecs; }  // widened weights in registers at once; see neon.h

using Vec = __m512;
using Quad = const float*;

template <>
inline Vec splat(float x) {
    return _mm512_set1_ps(x);
}
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec scale_by_exponent(Vec a, Vec n) {  // adds the low bits of n to a's exponent
    __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), shifted));
}
inline float total(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Quad load_quad(const float* p) { return p; }
inline Vec fma_lane(Vec sum, Vec b, Quad a, int lane) { return _mm512_fmadd_ps(b, _mm512_set1_ps(a[lane]), sum); }
inline Vec fma_scalar(Vec sum, Vec b, float a) { return _mm512_fmadd_ps(b, _mm512_set1_ps(a), sum); }

inline Vec load_wide(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline Vec load_wide(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void load_pair(const float* p, Vec& low, Vec& high) {
    low = load(p);
    high = load(p + kLanes);
}

template <class B>
inline void load_pair(const B* p, Vec& low, Vec& high) {
    low = load_wide(p);
    high = load_wide(p + kLanes);
}

inline void widen8(const bf16* from, float* to) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}

inline void widen8(const f16* from, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline void keep_together(Vec*) {}

}  // namespace ember
