// The products of grouped.cu and fused_experts.cu: weights of experts, sums of a tile's rows by wgmma, and their stores.
// Include after common.cuh, wgmma.cuh, uw12.cuh, wgmma_products.cuh, wide.cuh and expert_tiles.cuh.
#pragma once

constexpr int BOX_ROWS = 32;  // rows of x that a copy fetches, with many rows

// -- weights ----------------------------------------------------------------------------------------------------------

// An item's rows of w: 64 GROUPS rows `block` of an expert's matrix, which has `blocks` such blocks.
struct ItemRows {
  int expert, block, blocks;
  DEVICE int index() const { return expert * blocks + block; }
};

struct PlainRows {  // [experts * n, k]
  static constexpr bool PACKED = false;
  TensorMap map;
  DEVICE u32 header_bytes(int) const { return 0; }
  template <int GROUPS> DEVICE void fetch(u32 to, ItemRows rows, int unit, int, u32 barrier, u64 policy) const {
    copy_tile(to, &map, 64 * unit, 64 * GROUPS * rows.index(), barrier, policy);
  }
  template <int GROUPS> DEVICE void fetch_headers(u32, ItemRows, u32, u64) const {}
  template <int GROUPS> DEVICE void prefetch(ItemRows, int, int) const {}
};
struct PlainPairs {  // [experts, width / 8, 2, 8, k]
  static constexpr bool PACKED = false;
  TensorMap map;
  DEVICE u32 header_bytes(int) const { return 0; }
  template <int GROUPS> DEVICE void fetch(u32 to, ItemRows rows, int unit, int, u32 barrier, u64 policy) const {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(64 * unit), "r"(0), "r"(4 * GROUPS * rows.block), "r"(rows.expert),
          "l"(policy) : "memory");
  }
  template <int GROUPS> DEVICE void fetch_headers(u32, ItemRows, u32, u64) const {}
  template <int GROUPS> DEVICE void prefetch(ItemRows rows, int count, int) const {
#pragma unroll 1
    for (int unit = 0; unit < count; unit++)
      asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %2, %3, %4}];"
                   ::"l"(&map), "r"(64 * unit), "r"(0), "r"(4 * GROUPS * rows.block), "r"(rows.expert) : "memory");
  }
};
struct PackedUnits {
  static constexpr bool PACKED = true;
  const u8 *planes, *headers;
  u32 stride;  // bytes of a header
  int total_blocks;
  DEVICE u32 header_bytes(int groups) const { return 4 * groups * stride; }
  template <int GROUPS> DEVICE void fetch(u32 to, ItemRows rows, int unit, int units, u32 barrier, u64 policy) const {
    const u8* const from = planes + unit_offset(4 * GROUPS * rows.index(), unit, units);
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      copy_bytes(to + i * 4 * UNIT_BYTES, from + i64(i) * units * 4 * UNIT_BYTES, 4 * UNIT_BYTES, barrier, policy);
  }
  template <int GROUPS> DEVICE void fetch_headers(u32 to, ItemRows rows, u32 barrier, u64 policy) const {
    copy_bytes(to, headers + i64(4 * GROUPS) * rows.index() * stride, 4 * GROUPS * stride, barrier, policy);
  }
  // Fetches the first `count` units of k into the L2.
  template <int GROUPS> DEVICE void prefetch(ItemRows rows, int count, int units) const {
    const u8* const from = planes + unit_offset(4 * GROUPS * rows.index(), 0, units);
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                   ::"l"(from + i64(i) * units * 4 * UNIT_BYTES), "r"(count * 4 * UNIT_BYTES) : "memory");
  }
};

// The headers of an item's rows in shared memory, double-buffered; each warp reads one. Barriers: two FULL, two EMPTY.
struct HeaderBuffers {
  u32 memory, bytes, barriers;
  DEVICE u32 at(int i) const { return memory + (i & 1) * bytes; }
  DEVICE u32 full(int i) const { return barriers + 8 * (i & 1); }
  DEVICE u32 empty(int i) const { return barriers + 16 + 8 * (i & 1); }
};

// Computes an item's sums for N columns. The last slot is released too.
template <class S, int N>
DEVICE void accumulate_plain(float (&all)[S::COLUMNS / 2], Ring& ring, int units, int warp, int lane) {
  float(&d)[N / 2] = reinterpret_cast<float(&)[N / 2]>(all);
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at), w = matrix_descriptor(at + S::X_BYTES + warp / 4 * 8192);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, w + 2 * step, x + 2 * step, step ? 1 : i);
    wgmma_commit();
    wgmma_wait<1>();
    if (i) ring.release_slot<S>(last, lane);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  ring.release_slot<S>(last, lane);
}
// The same for packed weights. A unit is decoded while the products of the previous one run, with two sets of
// registers. All warps of a warpgroup issue the same products in the same order, whatever escapes each has.
template <class S, int N>
DEVICE void accumulate_packed(float (&all)[S::COLUMNS / 2], Ring& ring, u32 header, int units, int warp, int lane) {
  float(&d)[N / 2] = reinterpret_cast<float(&)[N / 2]>(all);
  const u32 scale = load_shared_4(header + lane / 4 * 4), scale8 = load_shared_4(header + lane / 4 * 4 + 32);
  const u32 list = header + escapes_offset(units);
  u32 sets[2][4][4];
  int last = 0;
  Escapes escapes;
  const auto step = [&](u32 (&a)[4][4], int i) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    Unit unit;
    unit.load_shared(at + S::X_BYTES + warp * UNIT_BYTES, lane);
    decode_unit(a, unit, scale, scale8);
    if (escapes.has(i & 31)) escapes.restore(a, list, i & 31, lane);
    const u64 x = matrix_descriptor(at);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, a[step], x + 2 * step, step ? 1 : i);
    wgmma_commit();
    wgmma_wait<1>();
    if (i) ring.release_slot<S>(last, lane);
    last = ring.stage;
    ring.advance();
  };
#pragma unroll 1
  for (int i = 0; i < units; i += 2) {
    if ((i & 31) == 0) escapes.read_ranges(header, i, 1, units, lane);
    step(sets[0], i);
    if (i + 1 < units) step(sets[1], i + 1);
  }
  wgmma_wait<0>();
  order_after_wait(d);
  ring.release_slot<S>(last, lane);
}

template <class S, int N>
DEVICE void accumulate(float (&d)[S::COLUMNS / 2], Ring& ring, u32 header, int units, int warp, int lane) {
  if constexpr (S::PACKED) accumulate_packed<S, N>(d, ring, header, units, warp, lane);
  else accumulate_plain<S, N>(d, ring, units, warp, lane);
}

// The same for as many columns as the tile has rows.
template <class S>
DEVICE void accumulate_rows(float (&d)[S::COLUMNS / 2], Ring& ring, u32 header, int rows, int units, int warp,
                            int lane) {
  if constexpr (S::COLUMNS == 32) return accumulate<S, 32>(d, ring, header, units, warp, lane);
  const int boxes = (rows + BOX_ROWS - 1) / BOX_ROWS;
  if (boxes <= 1) return accumulate<S, 32>(d, ring, header, units, warp, lane);
  if (boxes == 2 || S::COLUMNS == 64) return accumulate<S, 64>(d, ring, header, units, warp, lane);
  if constexpr (S::COLUMNS > 64)
    if (boxes == 3) return accumulate<S, 96>(d, ring, header, units, warp, lane);
  if constexpr (S::COLUMNS == 128) return accumulate<S, 128>(d, ring, header, units, warp, lane);
  if constexpr (S::COLUMNS == 256) {
    if (boxes == 4) return accumulate<S, 128>(d, ring, header, units, warp, lane);
    if (boxes == 5) return accumulate<S, 160>(d, ring, header, units, warp, lane);
    if (boxes == 6) return accumulate<S, 192>(d, ring, header, units, warp, lane);
    accumulate<S, 256>(d, ring, header, units, warp, lane);
  }
}

// -- outputs ----------------------------------------------------------------------------------------------------------

DEVICE void store_16(bf16* to, const u32 (&x)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}
// silu(gate) * up, with approximate instructions: the error is far below that of rounding to bf16.
DEVICE float gated_silu(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }
// silu(gate) * up of a warp's 16 rows of w, for 32 columns. Lanes exchange values until each has 8 outputs of a row.
DEVICE void store_activations(const float* c, bf16* out, i64 width, int column, int count, int lane) {
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = transpose_8x8(pack(gated_silu(c[4 * i], c[4 * i + 2]), gated_silu(c[4 * i + 1], c[4 * i + 3])));
  transpose_quad(x);
  column += lane % 4 * 8 + lane / 4;
  if (column < count) store_16(out + column * width, x);
}
DEVICE void store_products(const float* c, bf16* out, i64 n, int column, int count, int lane) {
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = transpose_8x8(pack(c[8 * pair + 2 * i], c[8 * pair + 2 * i + 1]));
    transpose_quad(x);
    const int own = column + 16 * pair + lane % 4 / 2 * 8 + lane / 4;
    if (own < count) store_16(out + own * n + 8 * (lane % 2), x);
  }
}
