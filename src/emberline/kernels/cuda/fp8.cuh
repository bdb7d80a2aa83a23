// Float8 weights (e4m3) in rows. Include after common.cuh.
//
// Within each 16 columns (k), codes are in another order, so that the 4 bytes that ldmatrix gives to a lane are the codes
// of its part of mma's A operand: byte 4t + 2e + b is the code of k 2t + e + 8b. `kernels/cuda/fp8_weight.py` arranges
// them. Inputs that are multiplied as float8 too have the same order, so that sums over k are the same.
#pragma once

// Decodes the 4 bytes of a lane to pairs of bf16: those of k 2t and 2t + 1, and those of k 2t + 8 and 2t + 9.
// Sign, exponent and mantissa are moved to their places in bf16, whose exponents are larger by 120: the product with
// 2^120 is exact, also for subnormal codes.
DEVICE void decode_codes(u32& first, u32& second, u32 codes) {
  constexpr u32 EXPONENT_AND_MANTISSA = 0x07f007f0u, SIGNS = 0x80808080u, FACTORS = 0x7b807b80u;
  const auto select = [](u32 ones, u32 zeros) {  // bits of `ones` where the mask has ones, of `zeros` elsewhere
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(EXPONENT_AND_MANTISSA), "r"(ones), "r"(zeros));
    return bits;
  };
  u32 signs;
  asm("and.b32 %0, %1, %2;" : "=r"(signs) : "r"(codes), "r"(SIGNS));  // not moved behind the shift by the compiler
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(first) : "r"(select(codes << 4, signs << 8)), "r"(FACTORS));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(second) : "r"(select(codes >> 4, signs)), "r"(FACTORS));
}
