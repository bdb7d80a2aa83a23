// The wgmma instructions of float8 operands (e4m3), for each number of columns. Include after common.cuh and wgmma.cuh.
#pragma once

// d = a b^T over 32 k, or d += a b^T if `accumulate`. Operands are rows of bytes, as those of 16 k in bf16. The tensor
// cores keep few more bits of the sums than bf16 has, so sums over many k should be added to others in float32.
DEVICE void wgmma_fp8(float (&d)[16], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" REGISTERS_16 "}, %16, %17, p, 1, 1; }"
      : FLOATS_16(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" REGISTERS_32 "}, %32, %33, p, 1, 1; }"
      : FLOATS_32(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[48], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" REGISTERS_48 "}, %48, %49, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_16(d, 32) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REGISTERS_64 "}, %64, %65, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[80], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 {" REGISTERS_80 "}, %80, %81, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_16(d, 64) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[96], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {" REGISTERS_96 "}, %96, %97, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[112], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %114, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n224k32.f32.e4m3.e4m3 {" REGISTERS_112 "}, %112, %113, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_16(d, 96) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_fp8(float (&d)[128], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" REGISTERS_128 "}, %128, %129, p, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96) : "l"(a), "l"(b), "r"(accumulate));
}
