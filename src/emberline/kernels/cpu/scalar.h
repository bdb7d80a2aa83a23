// Scalar arithmetic for every instruction set. Compiled with -ffp-contract=off: multiply-adds fuse only where fma() is called,
// so a vectorised loop and its scalar tail give the same bits, whatever the compiler vectorises.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ember {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

struct f16 {
    uint16_t bits;
};

// The exponent bias differs by 112 = 127 - 15. A multiplication corrects it and also normalises subnormal numbers.
inline float widen(f16 x) {
    uint32_t bits = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    std::memcpy(&bits, &f, 4);
    if ((x.bits & 0x7c00) == 0x7c00) bits = 0x7f800000 | uint32_t(x.bits & 0x3ff) << 13;  // infinity or NaN
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline bf16 round_bf16(float x) {  // to nearest, ties to even, NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return {uint16_t(nan ? (bits >> 16) | 0x40 : rounded)};
}

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bf16& to) { to = round_bf16(x); }

inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

template <class V>
V splat(float x);
template <>
inline float splat(float x) {
    return x;
}
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float max(float a, float b) { return a < b ? b : a; }
inline float scale_by_exponent(float a, float n) {  // adds the low bits of n to a's exponent
    uint32_t bits, low;
    std::memcpy(&bits, &a, 4);
    std::memcpy(&low, &n, 4);
    bits += low << 23;
    std::memcpy(&a, &bits, 4);
    return a;
}

// Sums in sixteen lanes and then pairwise: the same order for every caller, and one that vectorises.
template <class Term>
inline float lane_sum(int n, Term term) {
    float lane[16] = {};
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += term(i + j);
    for (; i < n; i++) lane[i % 16] += term(i);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

inline float rms_scale(const float* x, int n, float eps) {
    float squares = lane_sum(n, [x](int i) { return x[i] * x[i]; });
    return 1.0f / std::sqrt(squares / float(n) + eps);
}

}  // namespace ember
