// x86 with AVX-512BW, and VNNI's dot product if there is one.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 128;  // the first factor of a dot product is unsigned
constexpr int kDirectRows = 4;  // up to so many rows, tiles unpack codes in registers; more share an unpacked copy
constexpr int kDirectTile = 4;  // rows of such a tile
constexpr int kTileRows = 8;    // rows of a tile that reads the copy
constexpr int kIntVectors = 8;  // vectors of sums of integers, and of floats, in registers at once
constexpr int kFloatVectors = 16;

using Codes = __m512i;
using Ints = __m512i;
using HalfBlock = const int8_t*;  // 16 inputs

inline HalfBlock load_half(const int8_t* p) { return p; }
inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_codes(uint8_t* p, Codes c) { _mm512_storeu_si512(p, c); }
inline Codes low_nibbles(Codes c) { return _mm512_and_si512(c, _mm512_set1_epi8(15)); }
inline Codes high_nibbles(Codes c) { return _mm512_and_si512(_mm512_srli_epi16(c, 4), _mm512_set1_epi8(15)); }
inline Codes load_table(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Codes look_up(Codes table, Codes index) { return _mm512_shuffle_epi8(table, index); }

// Returns the codes with bits [At, At + Count) of `high` at bit 4.
template <int At, int Count>
inline Codes join_bits(Codes codes, Codes high) {
    Codes shifted = At < 4 ? _mm512_slli_epi16(high, At < 4 ? 4 - At : 0) : _mm512_srli_epi16(high, At < 4 ? 0 : At - 4);
    return _mm512_or_si512(codes, _mm512_and_si512(shifted, _mm512_set1_epi8(char(((1 << Count) - 1) << 4))));
}

inline Codes subtract(Codes c, int offset) { return _mm512_sub_epi8(c, _mm512_set1_epi8(char(offset))); }

inline Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Ints splat_ints(int x) { return _mm512_set1_epi32(x); }

template <CodeRange Range, int Step>
inline Ints dot(Ints sum, Codes codes, HalfBlock inputs) {
    int32_t four;
    std::memcpy(&four, inputs + 4 * Step, 4);
    __m512i a = _mm512_set1_epi32(four);
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, codes, a);
#else
    if constexpr (Range == kSmall)  // pairs of products fit into 16 bits
        return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, a), _mm512_set1_epi16(1)));
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), _mm512_srai_epi16(a, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}

constexpr int kSumStart = 0;  // see neon_int8.h
inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_bf16(const uint16_t* p) { return load_wide(reinterpret_cast<const bf16*>(p)); }
inline Vec load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_i8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Returns the largest size of 32 inputs; NaN if one is NaN. The bits of sizes are ordered as the sizes.
inline float largest_size(const float* x) {
    __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i large = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(load(x)), mask),
                                     _mm512_and_si512(_mm512_castps_si512(load(x + 16)), mask));
    int bits = _mm512_reduce_max_epi32(large);
    float size;
    std::memcpy(&size, &bits, 4);
    return size;
}

// Rounds 16 inputs times `factor`, at most 127 each, and returns the sum of the codes.
inline int round_half(const float* x, float factor, int8_t* to) {
    Vec shift = splat<Vec>(12582912.0f);  // 1.5 * 2^23: the low bits of sums are integers
    __m512i bits = _mm512_castps_si512(add(mul(load(x), splat<Vec>(factor)), shift));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bits));
    return _mm512_reduce_add_epi32(_mm512_sub_epi32(bits, _mm512_castps_si512(shift)));
}

}  // namespace ember
