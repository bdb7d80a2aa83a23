// x86 with AVX2. Pairs of products are added in 16 bits, which they must not exceed.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 0;

using Codes = __m256i;
using Ints = __m256i;
using InputBlock = const int8_t*;

inline InputBlock load_inputs(const int8_t* p) { return p; }
inline Codes load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_codes(uint8_t* p, Codes c) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c); }
inline Codes low_nibbles(Codes c) { return _mm256_and_si256(c, _mm256_set1_epi8(15)); }
inline Codes high_nibbles(Codes c) { return _mm256_and_si256(_mm256_srli_epi16(c, 4), _mm256_set1_epi8(15)); }
inline Codes load_table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Codes look_up(Codes table, Codes index) { return _mm256_shuffle_epi8(table, index); }

// Returns bits [At, At + Count) of each byte, shifted to start at bit 4.
template <int At, int Count>
inline Codes bits_to_4(Codes c) {
    Codes shifted = At < 4 ? _mm256_slli_epi16(c, At < 4 ? 4 - At : 0) : _mm256_srli_epi16(c, At < 4 ? 0 : At - 4);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(char(((1 << Count) - 1) << 4)));
}
inline Codes join(Codes a, Codes b) { return _mm256_or_si256(a, b); }

inline Ints splat_ints(int x) { return _mm256_set1_epi32(x); }

template <CodeRange Range, int Step>
inline Ints dot(Ints sum, Codes codes, InputBlock inputs) {
    int32_t four;
    std::memcpy(&four, inputs + 4 * Step, 4);
    __m256i a = _mm256_set1_epi32(four);
    // The first factor is unsigned: signed codes give their signs to the inputs.
    __m256i pairs = Range == kSmall ? _mm256_maddubs_epi16(codes, a)
                                    : _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_bf16(const uint16_t* p) { return load_wide(reinterpret_cast<const bf16*>(p)); }
inline Vec load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_i8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

}  // namespace ember
