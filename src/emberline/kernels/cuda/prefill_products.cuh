// Products of prefill.cu: scores of queries and keys, and sums of weighted values, by wgmma on tiles in shared memory.
#pragma once
#include "wgmma.cuh"

constexpr int ROWS = 128;  // queries of a tile
constexpr u32 PANEL = ROWS * 128;  // bytes of 128 rows of 64 bf16, in TMA's 128-byte swizzle

// Sizes for a head size. Columns beyond the head size are zero in shared memory.
template <int D>
struct Sizes {
  static constexpr int KEYS = D > 128 ? 64 : 128;  // of a tile; sums of a large head leave fewer registers for scores
  static constexpr int PANELS = (D + 63) / 64, COLUMNS = 64 * PANELS;
  static constexpr u32 KV_PANEL = KEYS * 128;
};

// wgmma's descriptor of a matrix in shared memory: address in bits 0-13, leading offset in 16-29, stride offset in
// 32-45, in units of 16 bytes, and 1 in bits 62-63 for the 128-byte swizzle. Atoms are 8 rows of 128 bytes, aligned to
// 1024. Address bits 4-6 are XORed with bits 7-9, as TMA does, so bytes added to the address within an atom select
// columns.
//   Q, K: the inner dimension is contiguous. Stride offset: 1024, from 8 rows to the next 8; the leading offset is
// unused.
//     A step of 16 of the inner dimension is 32 bytes: steps 0-3 are in one panel, 4-7 in the next.
//   V: keys are the inner dimension, and head dimensions contiguous. Stride offset: 1024, from 8 keys to the next 8;
//     leading offset: KV_PANEL, from 64 head dimensions to the next 64. A step of 16 keys is 2048 bytes.
DEVICE u64 matrix_descriptor(u32 address, u32 leading) {
  return u64(address >> 4) | u64(leading >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}

// Accumulators of m64nN: lane l of warp w of the warpgroup holds in d[4 j + 2 r + e] row 16 w + l / 4 + 8 r, column
// 8 j + 2 (l % 4) + e. Rounded to pairs, d[8 k ..] is the A operand's fragment of columns 16 k .. 16 k + 15.
template <bool ADD>
DEVICE void wgmma(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "l"(a), "l"(b), "n"(int(ADD)));
}
template <bool ADD>
DEVICE void wgmma(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0) : "l"(a), "l"(b), "n"(int(ADD)));
}
DEVICE void add_group(float (&d)[128], const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, {%128, %129, %130, %131}, %132, "
      "p, 1, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void add_group(float (&d)[96], const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" REGISTERS_96 "}, {%96, %97, %98, %99}, %100, "
      "p, 1, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void add_group(float (&d)[64], const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void add_group(float (&d)[32], const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
      : FLOATS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int D> DEVICE void score(float (&s)[Sizes<D>::KEYS / 2], u64 q, u64 k) {
  wgmma_fence();
  wgmma<false>(s, q, k);
#pragma unroll
  for (int step = 1; step < D / 16; step++) {
    const u32 q_offset = (step / 4 * PANEL + step % 4 * 32) >> 4;
    const u32 k_offset = (step / 4 * Sizes<D>::KV_PANEL + step % 4 * 32) >> 4;
    wgmma<true>(s, q + q_offset, k + k_offset);
  }
  wgmma_commit();
}
template <int D>
DEVICE void add_values(float (&o)[Sizes<D>::COLUMNS / 2], const u32 (&p)[Sizes<D>::KEYS / 4], u64 v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Sizes<D>::KEYS / 16; step++) add_group(o, p + 4 * step, v + (step * 2048 >> 4));
  wgmma_commit();
}
