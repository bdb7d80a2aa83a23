// x86 with AVX2. Pairs of products are added in 16 bits, which they must not exceed.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 0;
constexpr int kDirectRows = 4;  // up to so many rows, tiles unpack codes in registers; more share an unpacked copy
constexpr int kDirectTile = 4;  // rows of such a tile
constexpr int kTileRows = 6;    // rows of a tile that reads the copy
constexpr int kIntVectors = 4;  // vectors of sums of integers, and of floats, in registers at once
constexpr int kFloatVectors = 8;

using Codes = __m256i;
using Ints = __m256i;
using HalfBlock = const int8_t*;  // 16 inputs

inline HalfBlock load_half(const int8_t* p) { return p; }
inline Codes load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_codes(uint8_t* p, Codes c) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c); }
inline Codes low_nibbles(Codes c) { return _mm256_and_si256(c, _mm256_set1_epi8(15)); }
inline Codes high_nibbles(Codes c) { return _mm256_and_si256(_mm256_srli_epi16(c, 4), _mm256_set1_epi8(15)); }
inline Codes load_table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Codes look_up(Codes table, Codes index) { return _mm256_shuffle_epi8(table, index); }

// Returns the codes with bits [At, At + Count) of `high` at bit 4.
template <int At, int Count>
inline Codes join_bits(Codes codes, Codes high) {
    Codes shifted = At < 4 ? _mm256_slli_epi16(high, At < 4 ? 4 - At : 0) : _mm256_srli_epi16(high, At < 4 ? 0 : At - 4);
    return _mm256_or_si256(codes, _mm256_and_si256(shifted, _mm256_set1_epi8(char(((1 << Count) - 1) << 4))));
}

inline Ints splat_ints(int x) { return _mm256_set1_epi32(x); }

template <CodeRange Range, int Step>
inline Ints dot(Ints sum, Codes codes, HalfBlock inputs) {
    int32_t four;
    std::memcpy(&four, inputs + 4 * Step, 4);
    __m256i a = _mm256_set1_epi32(four);
    // The first factor is unsigned: signed codes give their signs to the inputs.
    __m256i pairs = Range == kSmall ? _mm256_maddubs_epi16(codes, a)
                                    : _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

constexpr int kSumStart = 0;  // see neon_int8.h
inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_bf16(const uint16_t* p) { return load_wide(reinterpret_cast<const bf16*>(p)); }
inline Vec load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_i8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Returns the largest size of 32 inputs; NaN if one is NaN. The bits of sizes are ordered as the sizes.
inline float largest_size(const float* x) {
    __m256i large = _mm256_setzero_si256(), mask = _mm256_set1_epi32(0x7fffffff);
    for (int i = 0; i < 32; i += 8) large = _mm256_max_epi32(large, _mm256_and_si256(_mm256_castps_si256(load(x + i)), mask));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(large), _mm256_extracti128_si256(large, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

// Rounds 16 inputs times `factor`, at most 127 each, and returns the sum of the codes.
inline int round_half(const float* x, float factor, int8_t* to) {
    Vec shift = splat<Vec>(12582912.0f);  // 1.5 * 2^23: the low bits of sums are integers
    auto rounded = [&](int at) {
        __m256i bits = _mm256_castps_si256(add(mul(load(x + at), splat<Vec>(factor)), shift));
        return _mm256_sub_epi32(bits, _mm256_castps_si256(shift));
    };
    __m256i first = rounded(0), second = rounded(8);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    __m256i both = _mm256_add_epi32(first, second);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

}  // namespace ember
