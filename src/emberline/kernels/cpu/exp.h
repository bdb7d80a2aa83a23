// The exponential, for softmax and the sigmoid, and functions made of it. They give the same bits on every machine, which those of
// libm need not.
#pragma once
#include "isa.h"

namespace ember {

// e^x for -87 <= x <= 0, within 3 ulp, and e^-87 below: x = n ln2 + r with |r| <= ln2/2, then a polynomial in r. V is a float or
// a Vec. Terms are paired instead of Horner's rule, which halves the latency.
template <class V>
inline V exp_negative(V x) {
    const V shift = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    x = max(x, splat<V>(-87.0f));
    V n = fma(x, splat<V>(1.44269504f), shift), whole = sub(n, shift);
    V r = fma(whole, splat<V>(-1.42860677e-6f), fma(whole, splat<V>(-0.693145752f), x)), r2 = mul(r, r);
    V high = fma(r, splat<V>(1.0f / 720), splat<V>(1.0f / 120)), low = fma(r, splat<V>(1.0f / 24), splat<V>(1.0f / 6));
    V p = fma(fma(fma(high, r2, low), r, splat<V>(0.5f)), r2, r);
    return scale_by_exponent(add(p, splat<V>(1.0f)), n);
}

// The sigmoid from e^-|x|, which cannot overflow.
inline float sigmoid(float x) {
    float e = exp_negative(-std::fabs(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// x * sigmoid(x) from e^-|x|, which cannot overflow; without a branch, so that loops vectorise.
inline float silu(float x) {
    float e = exp_negative(-std::fabs(x));
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// log(1 + e^x) within 5 ulp, from e = e^-|x|, which cannot overflow: log(1 + e) = 2 atanh(s) with s = e / (2 + e) <= 1/3, by its
// series.
inline float softplus(float x) {
    float e = exp_negative(-std::fabs(x)), s = e / (2.0f + e), s2 = s * s, terms = 1.0f / 15;
    for (int n = 13; n > 0; n -= 2) terms = fma(terms, s2, 1.0f / float(n));
    return (x < 0.0f ? 0.0f : x) + 2.0f * s * terms;
}

// tanh(x) within 5 ulp: a Taylor polynomial near 0, where 1 - e^-2|x| would cancel; without a branch, so that loops vectorise.
inline float tanh_vectorised(float x) {
    float size = std::fabs(x), e = exp_negative(-2.0f * size), large = (1.0f - e) / (1.0f + e), x2 = x * x;
    float terms = fma(fma(fma(62.0f / 2835, x2, -17.0f / 315), x2, 2.0f / 15), x2, -1.0f / 3);
    return std::copysign(size < 0.3f ? fma(size * x2, terms, size) : large, x);
}

// The approximation of x * Phi(x) by a tanh, "gelu_pytorch_tanh".
inline float gelu_tanh(float x) {
    float inner = 0.797884561f * fma(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + tanh_vectorised(inner));
}

// Limits x smoothly to (-cap, cap).
inline float soft_cap(float x, float cap) { return cap * tanh_vectorised(x / cap); }

}  // namespace ember
