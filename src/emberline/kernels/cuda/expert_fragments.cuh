// The weights of experts for few rows: sources, and fragments of 16 rows x 64 k that a warp multiplies by 8 rows of x by
// mma. Include after common.cuh and uw12.cuh.
#pragma once

struct PlainRows {  // [experts * n, k]
  static constexpr u32 BLOCK_BYTES = 2048;  // 16 rows x 64 k
  TensorMap map;
};
struct PlainPairs {  // gates and ups as [experts, width / 8, 2, 8, k]
  static constexpr u32 BLOCK_BYTES = 2048;
  TensorMap map;
};
struct PackedUnits {
  static constexpr u32 BLOCK_BYTES = UNIT_BYTES;
  const u8 *planes, *headers;
  u32 stride;  // bytes of a header
  int total_blocks;
};

// The matrices of a layer's experts: blocks of 16 rows of each, and k / 64.
struct ExpertStack {
  int blocks, units;
};

// Copies 64 k of COUNT adjacent blocks of an expert, which are in the same 64 rows.
template <int COUNT>
DEVICE void fetch_blocks(const PlainRows& w, u32 to, ExpertStack stack, int expert, int block, int unit, u32 barrier,
                         u64 policy) {
  copy_tile(to, &w.map, 64 * unit, 16 * (expert * stack.blocks + block), barrier, policy);
}
template <int COUNT>
DEVICE void fetch_blocks(const PlainPairs& w, u32 to, ExpertStack, int expert, int block, int unit, u32 barrier,
                         u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(&w.map), "r"(barrier), "r"(64 * unit), "r"(0), "r"(block), "r"(expert), "l"(policy) : "memory");
}
template <int COUNT>
DEVICE void fetch_blocks(const PackedUnits& w, u32 to, ExpertStack stack, int expert, int block, int unit, u32 barrier,
                         u64 policy) {
  const u8* const from = w.planes + unit_offset(expert * stack.blocks + block, unit, stack.units);
  copy_bytes(to, from, COUNT * UNIT_BYTES, barrier, policy);
}

// The headers of COUNT adjacent blocks: their bytes, and their copy. Plain weights have none.
template <class W> DEVICE u32 header_bytes(const W&, int) { return 0; }
DEVICE u32 header_bytes(const PackedUnits& w, int count) { return count * w.stride; }
template <class W> DEVICE void fetch_headers(const W&, u32, int, int, u32, u64) {}
DEVICE void fetch_headers(const PackedUnits& w, u32 to, int block, int count, u32 barrier, u64 policy) {
  copy_bytes(to, w.headers + i64(block) * w.stride, count * w.stride, barrier, policy);
}

// Loads the fragments of a block, unit `unit` of k, from shared memory. `header`: of the block.
template <class W> DEVICE void load_fragments(u32 (&a)[4][4], const W&, u32 from, u32, int, int, int lane) {
  const u32 at = swizzled_offset(lane & 15, lane >> 4);
  // The swizzle is an XOR, so the address of the chunk 2 f further is that of the first ^ 32 f.
#pragma unroll
  for (int f = 0; f < 4; f++) load_matrices(a[f], from + (at ^ (32 * f)));
}
DEVICE void load_fragments(u32 (&a)[4][4], const PackedUnits&, u32 from, u32 header, int unit, int units, int lane) {
  Unit packed;
  packed.load_shared(from, lane);
  const u32 begin = load_shared_2(header + STARTS_OFFSET + 2 * unit);
  const u32 end = load_shared_2(header + STARTS_OFFSET + 2 * unit + 2);
  decode_unit(a, packed, load_shared_4(header + lane / 4 * 4), load_shared_4(header + lane / 4 * 4 + 32));
#pragma unroll 1
  for (u32 i = begin; i < end; i++) restore_escape(a, load_shared_4(header + escapes_offset(units) + 4 * i), lane);
}

// 64 k of 8 rows of x.
struct InputFragments {
  u32 b[2][4];
  DEVICE void load(u32 from, int lane) {
    const u32 at = swizzled_offset(lane & 7, lane >> 3);  // the address 4 chunks further is ^ 64
    load_matrices(b[0], from + at);
    load_matrices(b[1], from + (at ^ 64));
  }
};
DEVICE void multiply_unit(float (&sums)[4], const u32 (&a)[4][4], const InputFragments& x) {
#pragma unroll
  for (int f = 0; f < 4; f++) multiply(sums, a[f], x.b[f / 2][2 * (f % 2)], x.b[f / 2][2 * (f % 2) + 1]);
}

// Sums of a warp in shared memory, [column][row]. PITCH is padded to avoid bank conflicts.
template <int PITCH> DEVICE void store_sums(float* to, const float (&sums)[4], int lane) {
  float* const at = to + 2 * (lane % 4) * PITCH + lane / 4;
  at[0] = sums[0], at[PITCH] = sums[1], at[8] = sums[2], at[PITCH + 8] = sums[3];
}
// Returns two adjacent sums, added over the warps in order.
template <int WARPS> DEVICE float2 add_warps(const float* sums, int pitch) {
  float2 total = *reinterpret_cast<const float2*>(sums);
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    const float2 more = *reinterpret_cast<const float2*>(sums + w * pitch);
    total.x += more.x, total.y += more.y;
  }
  return total;
}
