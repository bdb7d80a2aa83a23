// Any machine, by the compiler's generic vectors. Multiply-adds fuse only if the machine supports it.
#pragma once
#include "scalar.h"

namespace ember {

constexpr const char* kIsa = "portable";
constexpr int kLanes = 4;
constexpr int kVecs = 2;       // vectors across a panel
constexpr int kRows = 4;       // rows of the largest tile
constexpr int kShortRows = 4;  // every tile spans the panel
constexpr int kTallVecs = 2;
constexpr int kSpan = 64;      // products summed in one chain
constexpr int held_weights(int) { return kVecs; }  // widened weights in registers at once; see neon.h

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
using Quad = const float*;

template <>
inline Vec splat(float x) {
    return Vec{x, x, x, x};
}
inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec max(Vec a, Vec b) { return a < b ? b : a; }
inline Vec fma(Vec a, Vec b, Vec c) { return Vec{fma(a[0], b[0], c[0]), fma(a[1], b[1], c[1]), fma(a[2], b[2], c[2]), fma(a[3], b[3], c[3])}; }
inline Vec scale_by_exponent(Vec a, Vec n) { return Vec((Bits)a + ((Bits)n << 23)); }  // adds the low bits of n to a's exponent
inline float total(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float largest(Vec v) { return max(max(v[0], v[2]), max(v[1], v[3])); }
inline Quad load_quad(const float* p) { return p; }
inline Vec fma_scalar(Vec sum, Vec b, float a) { return fma(b, splat<Vec>(a), sum); }
inline Vec fma_lane(Vec sum, Vec b, Quad a, int lane) { return fma_scalar(sum, b, a[lane]); }

template <class B>
inline void load_pair(const B* p, Vec& low, Vec& high) {
    low = Vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
    high = Vec{widen(p[4]), widen(p[5]), widen(p[6]), widen(p[7])};
}

template <class B>
inline void widen8(const B* from, float* to) {
    for (int i = 0; i < 8; i++) to[i] = widen(from[i]);
}

inline void keep_together(Vec*) {}

}  // namespace ember
