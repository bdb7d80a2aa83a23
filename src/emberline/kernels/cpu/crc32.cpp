#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__aarch64__) && defined(__ARM_FEATURE_AES)
#include <arm_neon.h>
#define EMBER_CLMUL
#elif defined(__x86_64__) && defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>
#define EMBER_CLMUL
#endif

namespace ember {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // reflected

constexpr std::array<std::array<uint32_t, 256>, 8> kTables = [] {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? kPolynomial : 0);
        tables[0][i] = c;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++) tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
    return tables;
}();

uint32_t crc_by_table(const uint8_t* data, long size, uint32_t crc) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++) crc ^= kTables[7 - i][word >> 8 * i & 255];
    }
    for (; size; data++, size--) crc = crc >> 8 ^ kTables[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(EMBER_CLMUL)
// x^(d + 32) and x^(d - 32) modulo the polynomial, reflected. Multiplying by them moves 128 bits ahead by d bits.
constexpr uint64_t kFold512[2] = {0x154442bd4, 0x1c6e41596}, kFold128[2] = {0x1751997d0, 0x0ccaa009e};

#if defined(__aarch64__)
using Vec = uint64x2_t;
inline Vec load(const void* p) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline void store(void* p, Vec v) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u64(v)); }
inline Vec xor_vec(Vec a, Vec b) { return veorq_u64(a, b); }
inline Vec fold(Vec v, Vec by, Vec next) {
    poly128_t low = vmull_p64(poly64_t(vgetq_lane_u64(v, 0)), poly64_t(vgetq_lane_u64(by, 0)));
    poly128_t high = vmull_high_p64(vreinterpretq_p64_u64(v), vreinterpretq_p64_u64(by));
    return xor_vec(xor_vec(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high)), next);
}
#else
using Vec = __m128i;
inline Vec load(const void* p) { return _mm_loadu_si128(static_cast<const Vec*>(p)); }
inline void store(void* p, Vec v) { _mm_storeu_si128(static_cast<Vec*>(p), v); }
inline Vec xor_vec(Vec a, Vec b) { return _mm_xor_si128(a, b); }
inline Vec fold(Vec v, Vec by, Vec next) {
    return xor_vec(xor_vec(_mm_clmulepi64_si128(v, by, 0x00), _mm_clmulepi64_si128(v, by, 0x11)), next);
}
#endif

// Needs at least 64 bytes. Folding leaves 16 bytes with the same remainder as all bytes before.
uint32_t crc_by_folding(const uint8_t* data, long size, uint32_t crc) {
    uint64_t first[2] = {crc, 0};
    Vec a = xor_vec(load(data), load(first)), b = load(data + 16), c = load(data + 32), d = load(data + 48), by = load(kFold512);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = fold(a, by, load(data));
        b = fold(b, by, load(data + 16));
        c = fold(c, by, load(data + 32));
        d = fold(d, by, load(data + 48));
    }
    by = load(kFold128);
    uint8_t rest[16];
    store(rest, fold(fold(fold(a, by, b), by, c), by, d));
    return crc_by_table(data, size, crc_by_table(rest, 16, 0));
}
#endif

}  // namespace

uint32_t crc32(const uint8_t* data, long size, uint32_t before) {
#if defined(EMBER_CLMUL)
    if (size >= 64) return ~crc_by_folding(data, size, ~before);
#endif
    return ~crc_by_table(data, size, ~before);
}

}  // namespace ember
