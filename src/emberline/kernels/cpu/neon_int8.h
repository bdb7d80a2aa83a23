// aarch64 with the dot product instruction; without it, widening products.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 0;

using Codes = uint8x16_t;
using Ints = int32x4_t;

struct InputBlock {  // 32 inputs
    int8x16_t half[2];
};

inline InputBlock load_inputs(const int8_t* p) { return {{vld1q_s8(p), vld1q_s8(p + 16)}}; }
inline Codes load_codes(const uint8_t* p) { return vld1q_u8(p); }
inline void store_codes(uint8_t* p, Codes c) { vst1q_u8(p, c); }
inline Codes low_nibbles(Codes c) { return vandq_u8(c, vdupq_n_u8(15)); }
inline Codes high_nibbles(Codes c) { return vshrq_n_u8(c, 4); }
inline Codes load_table(const uint8_t* p) { return vld1q_u8(p); }
inline Codes look_up(Codes table, Codes index) { return vqtbl1q_u8(table, index); }

// Returns bits [At, At + Count) of each byte, shifted to start at bit 4.
template <int At, int Count>
inline Codes bits_to_4(Codes c) {
    Codes mask = vdupq_n_u8(((1 << Count) - 1) << 4);
    if constexpr (At < 4) return vandq_u8(vshlq_n_u8(c, 4 - At), mask);
    else if constexpr (At == 4) return vandq_u8(c, mask);
    else return vandq_u8(vshrq_n_u8(c, At - 4), mask);
}
inline Codes join(Codes a, Codes b) { return vorrq_u8(a, b); }

inline Ints splat_ints(int x) { return vdupq_n_s32(x); }

template <CodeRange, int Step>
inline Ints dot(Ints sum, Codes codes, const InputBlock& inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(codes), inputs.half[Step / 4], Step % 4);
#else
    int8x16_t a = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs.half[Step / 4]), Step % 4));
    int8x16_t w = vreinterpretq_s8_u8(codes);
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

inline Vec to_float(Ints v) { return vcvtq_f32_s32(v); }
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

}  // namespace ember
