// aarch64 primitives. bf16 is widened by interleaving with zeros: zip runs on both vector pipes, a shift on one only.
#pragma once
#include <arm_neon.h>

#include "scalar.h"

namespace ember {

constexpr const char* kIsa = "neon";
constexpr int kLanes = 4;
constexpr int kVecs = 4;       // vectors across a panel
constexpr int kRows = 8;       // rows of the largest tile
constexpr int kShortRows = 4;  // up to so many rows, a tile has the panel's width; above, kTallVecs. Always 16 sums of 32
constexpr int kTallVecs = 2;   // registers, faster than 24: 8 x 8 reaches the peak of multiply-adds, 6 x 16 nine tenths of it
constexpr int kSpan = 128;     // products summed in one chain; 64 would be more accurate and 3 % slower

// Widened weights in registers at once. On a Neoverse N1, n consecutive widenings between multiply-adds take n / 2 + 2 cycles;
// interleaved with multiply-adds, each takes about one cycle. So long runs of widenings are faster.
constexpr int held_weights(int sums) { return sums <= 8 ? 16 : 8; }

using Vec = float32x4_t;
using Quad = float32x4_t;  // four consecutive inputs; an fma selects one by its lane

template <>
inline Vec splat(float x) {
    return vdupq_n_f32(x);
}
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec scale_by_exponent(Vec a, Vec n) {  // adds the low bits of n to a's exponent
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}
inline float total(Vec v) { return vaddvq_f32(v); }
inline float largest(Vec v) { return vmaxvq_f32(v); }
inline Quad load_quad(const float* p) { return vld1q_f32(p); }
inline Vec fma_lane(Vec sum, Vec b, Quad a, int lane) { return vfmaq_n_f32(sum, b, a[lane]); }
inline Vec fma_scalar(Vec sum, Vec b, float a) { return vfmaq_n_f32(sum, b, a); }

inline void load_pair(const float* p, Vec& low, Vec& high) {
    low = vld1q_f32(p);
    high = vld1q_f32(p + 4);
}

inline void load_pair(const bf16* p, Vec& low, Vec& high) {
    uint16x8_t both = vld1q_u16(&p->bits), none = vdupq_n_u16(0);
    low = vreinterpretq_f32_u16(vzip1q_u16(none, both));
    high = vreinterpretq_f32_u16(vzip2q_u16(none, both));
}

inline void load_pair(const f16* p, Vec& low, Vec& high) {
    float16x8_t both = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    low = vcvt_f32_f16(vget_low_f16(both));
    high = vcvt_high_f32_f16(both);
}

inline __attribute__((always_inline)) void keep_together(Vec* w) {  // eight vectors, which the compiler would otherwise interleave
    asm volatile("" : "+w"(w[0]), "+w"(w[1]), "+w"(w[2]), "+w"(w[3]), "+w"(w[4]), "+w"(w[5]), "+w"(w[6]), "+w"(w[7]));
}

template <class B>
inline void widen8(const B* from, float* to) {
    Vec low, high;
    load_pair(from, low, high);
    store(to, low);
    store(to + 4, high);
}

}  // namespace ember
