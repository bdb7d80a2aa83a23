// Any machine, by loops that the compiler may vectorise.
#pragma once
#include "isa.h"

namespace ember {

enum CodeRange { kSmall, kWhole };
constexpr int kWholeOffset = 0;
constexpr int kDirectRows = 4;  // up to so many rows, tiles unpack codes in registers; more share an unpacked copy
constexpr int kDirectTile = 4;  // rows of such a tile
constexpr int kTileRows = 4;    // rows of a tile that reads the copy
constexpr int kIntVectors = 4;  // vectors of sums of integers, and of floats, in registers at once
constexpr int kFloatVectors = 8;

struct Codes {
    uint8_t byte[kLanes * 4];
};
struct Ints {
    int32_t lane[kLanes];
};
using HalfBlock = const int8_t*;  // 16 inputs

template <class F>
inline Codes map_codes(F value) {
    Codes c;
    for (int i = 0; i < kLanes * 4; i++) c.byte[i] = value(i);
    return c;
}
template <class F>
inline Vec map_lanes(F value) {
    float to[kLanes];
    for (int i = 0; i < kLanes; i++) to[i] = value(i);
    return load(to);
}

inline HalfBlock load_half(const int8_t* p) { return p; }
inline Codes load_codes(const uint8_t* p) { return map_codes([=](int i) { return p[i]; }); }
inline void store_codes(uint8_t* p, const Codes& c) { std::memcpy(p, c.byte, sizeof c.byte); }
inline Codes low_nibbles(const Codes& c) { return map_codes([&](int i) { return uint8_t(c.byte[i] & 15); }); }
inline Codes high_nibbles(const Codes& c) { return map_codes([&](int i) { return uint8_t(c.byte[i] >> 4); }); }
inline const uint8_t* load_table(const uint8_t* p) { return p; }
inline Codes look_up(const uint8_t* table, const Codes& c) { return map_codes([&](int i) { return table[c.byte[i]]; }); }

// Returns the codes with bits [At, At + Count) of `high` at bit 4.
template <int At, int Count>
inline Codes join_bits(const Codes& codes, const Codes& high) {
    return map_codes([&](int i) { return uint8_t(codes.byte[i] | (high.byte[i] >> At & ((1 << Count) - 1)) << 4); });
}

inline Ints splat_ints(int x) {
    Ints v;
    for (int& lane : v.lane) lane = x;
    return v;
}

template <CodeRange, int Step>
inline Ints dot(Ints sum, const Codes& codes, HalfBlock inputs) {
    for (int lane = 0; lane < kLanes; lane++)
        for (int i = 0; i < 4; i++) sum.lane[lane] += int8_t(codes.byte[4 * lane + i]) * inputs[4 * Step + i];
    return sum;
}

constexpr int kSumStart = 0;  // see neon_int8.h
inline Vec to_float(const Ints& v) { return map_lanes([&](int i) { return float(v.lane[i]); }); }
inline Vec load_f16(const uint16_t* p) { return map_lanes([=](int i) { return widen(f16{p[i]}); }); }
inline Vec load_bf16(const uint16_t* p) { return map_lanes([=](int i) { return widen(bf16{p[i]}); }); }
inline Vec load_u8(const uint8_t* p) { return map_lanes([=](int i) { return float(p[i]); }); }
inline Vec load_i8(const uint8_t* p) { return map_lanes([=](int i) { return float(int8_t(p[i])); }); }

// Returns the largest size of 32 inputs; NaN if one is NaN. The bits of sizes are ordered as the sizes.
inline float largest_size(const float* x) {
    uint32_t large = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        large = large < (bits & 0x7fffffff) ? bits & 0x7fffffff : large;
    }
    float size;
    std::memcpy(&size, &large, 4);
    return size;
}

// Rounds 16 inputs times `factor`, at most 127 each, and returns the sum of the codes.
inline int round_half(const float* x, float factor, int8_t* to) {
    int sum = 0;
    for (int i = 0; i < 16; i++) {
        float shifted = x[i] * factor + 12582912.0f;  // 1.5 * 2^23: the low bits are an integer
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        to[i] = int8_t(bits);
        sum += to[i];
    }
    return sum;
}

}  // namespace ember
