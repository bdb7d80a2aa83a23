// Scalar arithmetic that every instruction set shares. Compiled with -ffp-contract=off: a product and a sum fuse only where
// fma() says so, hence a vectorised loop and its scalar tail give the same bits, whatever the compiler chose to vectorise.
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

// e^x for x <= 0, within 2 ulp; 0 below e^-87. x = n ln2 + r with |r| <= ln2/2, then a polynomial in r.
inline float exp_negative(float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    constexpr float kLeast = -87.0f;
    float clamped = x < kLeast ? kLeast : x;
    float shifted = fma(clamped, 1.44269504f, kShift);
    float n = shifted - kShift;
    float r = fma(n, -0.693145752f, clamped);
    r = fma(n, -1.42860677e-6f, r);
    float p = fma(r, 1.0f / 720, 1.0f / 120);
    p = fma(p, r, 1.0f / 24);
    p = fma(p, r, 1.0f / 6);
    p = fma(p, r, 0.5f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    uint32_t exponent, bits;
    std::memcpy(&exponent, &shifted, 4);
    std::memcpy(&bits, &p, 4);
    bits += exponent << 23;
    float y;
    std::memcpy(&y, &bits, 4);
    return x < kLeast ? 0.0f : y;
}

// Both branches of the sigmoid from e^-|x|, which cannot overflow.
inline float silu(float x) {
    float e = exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// Sums in sixteen lanes and then pairwise: one order for every caller, and one that vectorises.
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
