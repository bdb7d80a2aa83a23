// Products of unpacked blocks by Arm's matrix instruction, which multiplies two rows of eight inputs by two columns of eight codes.
#pragma once
#include "blocks.h"

#if defined(__ARM_FEATURE_MATMUL_INT8) && !defined(EMBER_PORTABLE)
#define EMBER_I8MM 1
#else
#define EMBER_I8MM 0
#endif

#if EMBER_I8MM
namespace ember {

// Rearranges two vectors of codes, four of each of four columns, to two vectors with eight codes of two columns.
inline void pair_codes(Codes& first, Codes& second) {
    uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
    first = vreinterpretq_u8_u32(vzip1q_u32(a, b)), second = vreinterpretq_u8_u32(vzip2q_u32(a, b));
}

// Computes the sums of the halves [First, Last) of a block for R rows and four columns, whose codes are paired.
template <int First, int Last, int R>
inline __attribute__((always_inline)) void sum_pairs(Ints (&sum)[R][1], const uint8_t* codes, const int8_t* inputs, long stride) {
    constexpr int kPairs = (R + 1) / 2;
    Ints pair[kPairs][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; p++) pair[p][0] = pair[p][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int eight = 2 * First; eight < 2 * Last; eight++) {
        const uint8_t* at = codes + eight * 2 * kCodeBytes;
        int8x16_t left = vreinterpretq_s8_u8(load_codes(at)), right = vreinterpretq_s8_u8(load_codes(at + kCodeBytes));
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; p++) {
            const int8_t* row = inputs + 2 * p * stride + eight * 8;
            int8x16_t both = vcombine_s8(vld1_s8(row), vld1_s8(2 * p + 1 < R ? row + stride : row));
            pair[p][0] = vmmlaq_s32(pair[p][0], both, left);
            pair[p][1] = vmmlaq_s32(pair[p][1], both, right);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        int64x2_t a = vreinterpretq_s64_s32(pair[r / 2][0]), b = vreinterpretq_s64_s32(pair[r / 2][1]);
        sum[r][0] = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    }
}

}  // namespace ember
#endif
