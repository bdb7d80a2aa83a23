// The wgmma instructions of wide.cu, for each number of columns. Include after common.cuh and wgmma.cuh.
#pragma once

// wgmma's descriptor of rows of 64 k: address, and stride from 8 rows to the next 8, in units of 16 bytes, with the
// 128-byte swizzle. The next 16 k are 32 bytes further.
DEVICE u64 matrix_descriptor(u32 address) { return u64(address >> 4) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62; }

// d = w x^T over 16 k, or d += w x^T if `accumulate`.
DEVICE void wgmma(float (&d)[16], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" REGISTERS_16 "}, %16, %17, p, 1, 1, 0, 0; }"
      : FLOATS_16(d, 0) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[32], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[48], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" REGISTERS_48 "}, %48, %49, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_16(d, 32) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[64], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[80], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {" REGISTERS_80 "}, %80, %81, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_16(d, 64) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[96], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" REGISTERS_96 "}, %96, %97, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64) : "l"(w), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[128], u64 w, u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, %128, %129, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96) : "l"(w), "l"(x), "r"(accumulate));
}
// The same with w in registers, 16 rows per warp.
DEVICE void wgmma(float (&d)[16], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" REGISTERS_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
      : FLOATS_16(d, 0) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[32], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
      : FLOATS_32(d, 0) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[48], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" REGISTERS_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0; }"
      : FLOATS_32(d, 0), FLOATS_16(d, 32) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[64], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[80], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %85, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {" REGISTERS_80 "}, {%80, %81, %82, %83}, %84, p, 1, 1, "
      "0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_16(d, 64) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[96], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %101, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" REGISTERS_96 "}, {%96, %97, %98, %99}, %100, p, 1, 1, "
      "0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
DEVICE void wgmma(float (&d)[128], const u32 (&w)[4], u64 x, int accumulate) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, "
      "0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96)
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(accumulate));
}
