// The wgmma products of 64 rows of a and N rows of b, for each N that kernels use, in bf16 and in float8 (e4m3). Include
// after common.cuh and wgmma.cuh.
#pragma once

// wgmma's descriptor of rows of 128 bytes: address, and stride from 8 rows to the next 8, in units of 16 bytes, with the
// 128-byte swizzle. The next 32 bytes (16 k of bf16, 32 of float8) are 2 further. In a cluster, an address may contain
// the CTA's rank in high bits, which are masked.
DEVICE u64 matrix_descriptor(u32 address) {
  return u64((address & 0x3ffff) >> 4) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}

// Defines, for sums of N columns in N / 2 registers:
//   wgmma: d = a b^T over 16 k of bf16, or d += a b^T if `accumulate`; a in shared memory or in registers, 16 rows per
//   warp.
//   wgmma_fp8: the same over 32 k of float8. The tensor cores keep few more bits of these sums than bf16 has.
// I0 .. I5 are the numbers of the operands behind the sums.
#define DEFINE_PRODUCTS(N, REGISTERS, SUMS, I0, I1, I2, I3, I4, I5)                                                 \
  DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                                              \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #I2 ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, %" #I0 ", %" #I1        \
                 ", p, 1, 1, 0, 0; }" : SUMS : "l"(a), "l"(b), "r"(accumulate));                                    \
  }                                                                                                                 \
  DEVICE void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {                                  \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #I5 ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #I0 ", %" #I1       \
                 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, 0; }"                                                   \
                 : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                     \
  }                                                                                                                 \
  DEVICE void wgmma_fp8(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                                          \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #I2 ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, %" #I0 ", %" #I1        \
                 ", p, 1, 1; }" : SUMS : "l"(a), "l"(b), "r"(accumulate));                                          \
  }

#define SUMS_48 FLOATS_32(d, 0), FLOATS_16(d, 32)
#define SUMS_64 FLOATS_32(d, 0), FLOATS_32(d, 32)
#define SUMS_80 SUMS_64, FLOATS_16(d, 64)
#define SUMS_96 SUMS_64, FLOATS_32(d, 64)
#define SUMS_112 SUMS_96, FLOATS_16(d, 96)
#define SUMS_128 SUMS_96, FLOATS_32(d, 96)
DEFINE_PRODUCTS(32, REGISTERS_16, FLOATS_16(d, 0), 16, 17, 18, 19, 20, 21)
DEFINE_PRODUCTS(64, REGISTERS_32, FLOATS_32(d, 0), 32, 33, 34, 35, 36, 37)
DEFINE_PRODUCTS(96, REGISTERS_48, SUMS_48, 48, 49, 50, 51, 52, 53)
DEFINE_PRODUCTS(128, REGISTERS_64, SUMS_64, 64, 65, 66, 67, 68, 69)
DEFINE_PRODUCTS(160, REGISTERS_80, SUMS_80, 80, 81, 82, 83, 84, 85)
DEFINE_PRODUCTS(192, REGISTERS_96, SUMS_96, 96, 97, 98, 99, 100, 101)
DEFINE_PRODUCTS(224, REGISTERS_112, SUMS_112, 112, 113, 114, 115, 116, 117)
DEFINE_PRODUCTS(256, REGISTERS_128, SUMS_128, 128, 129, 130, 131, 132, 133)
