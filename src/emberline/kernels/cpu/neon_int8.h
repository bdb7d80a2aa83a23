// aarch64 with the dot product instruction; without it, widening products.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 0;
constexpr int kDirectRows = 16;  // up to so many rows, tiles unpack codes in registers; more share an unpacked copy
constexpr int kDirectTile = 8;  // rows of such a tile
constexpr int kTileRows = 8;    // rows of a tile that reads the copy
constexpr int kIntVectors = 8;  // vectors of sums of integers, and of floats, in registers at once
constexpr int kFloatVectors = 16;

using Codes = uint8x16_t;
using Ints = int32x4_t;

using HalfBlock = int8x16_t;  // 16 inputs

inline HalfBlock load_half(const int8_t* p) { return vld1q_s8(p); }
inline Codes load_codes(const uint8_t* p) { return vld1q_u8(p); }
inline void store_codes(uint8_t* p, Codes c) { vst1q_u8(p, c); }
inline Codes low_nibbles(Codes c) { return vandq_u8(c, vdupq_n_u8(15)); }
inline Codes high_nibbles(Codes c) { return vshrq_n_u8(c, 4); }
inline Codes load_table(const uint8_t* p) { return vld1q_u8(p); }
inline Codes look_up(Codes table, Codes index) { return vqtbl1q_u8(table, index); }

// Returns the codes with bits [At, At + Count) of `high` at bit 4.
template <int At, int Count>
inline Codes join_bits(Codes codes, Codes high) {
    if constexpr (At < 4) high = vshlq_n_u8(high, 4 - At);
    if constexpr (At > 4) high = vshrq_n_u8(high, At - 4);
    return vbslq_u8(vdupq_n_u8(((1 << Count) - 1) << 4), high, codes);
}

inline Ints splat_ints(int x) { return vdupq_n_s32(x); }

// Sums start at the bits of 1.5 * 2^23, so that they become floats by a subtraction. A conversion takes four times as long. Sums are
// less than 2^22.
constexpr int kSumStart = 0x4b400000;
inline Vec to_float(Ints sum) { return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f)); }

template <CodeRange, int Step>
inline Ints dot(Ints sum, Codes codes, HalfBlock inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(codes), "w"(inputs), "i"(Step));  // the intrinsic adds moves
    return sum;
#else
    int8x16_t a = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs), Step));
    int8x16_t w = vreinterpretq_s8_u8(codes);
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

inline Vec load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vec load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Vec load_u8(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
}
inline Vec load_i8(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
}

// Returns the largest size of 32 inputs; NaN if one is NaN.
inline float largest_size(const float* x) {
    Vec large = vabsq_f32(load(x));
    for (int i = 4; i < 32; i += 4) large = vmaxq_f32(large, vabsq_f32(load(x + i)));
    return vmaxvq_f32(large);
}

// Rounds 16 inputs times `factor`, at most 127 each, and returns the sum of the codes.
inline int round_half(const float* x, float factor, int8_t* to) {
    int16x8_t low[4];  // the low halves of the bits of floats near 1.5 * 2^23 are integers
    for (int i = 0; i < 4; i++)
        low[i] = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(load(x + 4 * i), factor), vdupq_n_f32(12582912.0f)));
    int16x8_t first = vuzp1q_s16(low[0], low[1]), second = vuzp1q_s16(low[2], low[3]);
    vst1q_s8(to, vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second)));
    return vaddvq_s16(vaddq_s16(first, second));
}

}  // namespace ember
