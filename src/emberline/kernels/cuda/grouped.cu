// Products of rows with the matrices of their experts by Hopper's wgmma. As in wide.cu, the product is computed as
// y^T = w x^T, one producer warp fetches into a ring of slots, and packed weights are decoded into registers. The rows
// of x are sorted by expert into tiles of up to COLUMNS rows.
//
// Items. An item is a tile and 64 GROUPS rows of its expert's matrix, 64 for each warpgroup. A CTA computes item after
// item while the ring runs on.
//
// Few rows of each expert (COLUMNS is 32): reading the weights takes most of the time. The rows of x are fetched one by
// one, from where they are.
//
// Many rows: x was copied into the order of the tiles. The instruction has as many columns as the tile has rows, rounded
// up to 32. Two CTAs of a cluster may compute different rows of w for the same tile; each fetches half of the rows of x,
// by multicast. Otherwise the L2 would have to deliver more than it can.
//
// Gates and ups. A block of 16 rows has 8 rows of gate and the 8 matching rows of up, as in few_experts.cu, so that a lane
// holds both of an output.
#include "common.cuh"
#include "wgmma.cuh"
#include "uw12.cuh"
#include "wide_products.cuh"
#include "wide.cuh"

constexpr int BOX_ROWS = 32;  // rows of x that a copy fetches, with many rows

DEVICE int load_int(const int* at) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

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

// -- items ------------------------------------------------------------------------------------------------------------

// The tiles. The input of place p is row order[p] / divisor of x, or row p if `divisor` is 0. It is multiplied by
// factors[order[p]], if not null.
struct Tiles {
  const int *experts, *counts, *order;
  const float* factors;
  int divisor, count;
};

// The items of a CTA. Those of a cluster have the same tile.
struct Items {
  Tiles tiles;
  int blocks, steps_per_tile;  // blocks of rows of an expert's matrix; of them, or pairs of them, for a cluster
  int share, rank, first, stride;
  DEVICE int count() const { return tiles.count * steps_per_tile; }
  DEVICE int tile(int step) const { return u32(step) / u32(steps_per_tile); }
  DEVICE int block(int step) const { return u32(step) % u32(steps_per_tile) * share + rank; }
};

// What the producer needs of an item.
struct FetchedItem {
  int step, tile, expert, rows;
  int row;  // of x, of the lane's column
};
template <int COLUMNS> DEVICE FetchedItem load_item(const Items& items, int step, int lane) {
  FetchedItem found{step, items.tile(step), 0, 0, 0};
  if (step >= items.count()) return found;
  found.expert = load_int(items.tiles.experts + found.tile), found.rows = load_int(items.tiles.counts + found.tile);
  found.row = found.tile * COLUMNS + lane;
  if (COLUMNS <= 32 && items.tiles.divisor && lane < COLUMNS)
    found.row = load_int(items.tiles.order + found.row) / items.tiles.divisor;
  return found;
}

// The headers of an item's rows in shared memory, double-buffered; each warp reads one. Barriers: two FULL, two EMPTY.
struct HeaderBuffers {
  u32 memory, bytes, barriers;
  DEVICE u32 at(int i) const { return memory + (i & 1) * bytes; }
  DEVICE u32 full(int i) const { return barriers + 8 * (i & 1); }
  DEVICE u32 empty(int i) const { return barriers + 16 + 8 * (i & 1); }
};

// Fetches item after item into the ring. Called by a warp. `weights_first`: x is not complete before the preceding
// kernel has ended, but all else is.
template <class S, class W> struct Producer {
  Ring ring;
  const W* weights;
  const TensorMap* x;
  const Items* items;
  HeaderBuffers headers;
  int units, lane;
  u64 evict_first, evict_last;

  DEVICE ItemRows rows_of(const FetchedItem& item) const {
    return ItemRows{item.expert, items->block(item.step), items->blocks};
  }
  DEVICE void fetch_headers(const FetchedItem& item, int i) const {
    if (!W::PACKED || lane) return;
    barrier_wait_without_trap<S>(headers.empty(i), (i >> 1 & 1) ^ 1);
    barrier_expect_bytes(headers.full(i), headers.bytes);
    weights->template fetch_headers<S::GROUPS>(headers.at(i), rows_of(item), headers.full(i), evict_first);
  }
  DEVICE void fetch_weights(const FetchedItem& item, int unit, int stage) const {
    if (lane) return;
    const u32 barrier = ring.full + 8 * stage;
    const int rows = S::COLUMNS <= 32 ? item.rows : (item.rows + BOX_ROWS - 1) / BOX_ROWS * BOX_ROWS;
    barrier_expect_bytes(barrier, 128 * rows + S::W_BYTES);
    weights->template fetch<S::GROUPS>(ring.slots + stage * S::SLOT + S::X_BYTES, rows_of(item), unit, units, barrier,
                                       evict_first);
  }
  DEVICE void fetch_x(const FetchedItem& item, int unit, int stage) const {
    const u32 at = ring.slots + stage * S::SLOT, barrier = ring.full + 8 * stage;
    if (S::COLUMNS <= 32) {
      if (lane < item.rows) copy_tile(at + 128 * lane, x, 64 * unit, item.row, barrier, evict_last);
      return;
    }
    if (lane) return;
    const SharedX sharing = ring.sharing;
#pragma unroll 1
    for (int row = BOX_ROWS * sharing.index; row < item.rows; row += BOX_ROWS * sharing.ctas) {
      const u32 to = at + 128 * row;
      const int from = item.tile * S::COLUMNS + row;
      if (sharing.is_shared()) copy_tile_multicast(to, x, 64 * unit, from, barrier, evict_last, sharing);
      else copy_tile(to, x, 64 * unit, from, barrier, evict_last);
    }
  }
  DEVICE void run(bool weights_first) {
    FetchedItem item = load_item<S::COLUMNS>(*items, items->first, lane);
    int early = 0;  // steps whose weights were fetched before the preceding kernel ended: units of the first item
    if (weights_first) {
      if (item.step < items->count()) early = min(units, ring.stages);
#pragma unroll 1
      for (int i = 0; i < early; i++) fetch_weights(item, i, i);
      if (early) fetch_headers(item, 0);
      wait_for_previous_kernel();
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; item.step < items->count(); i++) {
      const FetchedItem next = load_item<S::COLUMNS>(*items, item.step + items->stride, lane);
      if (i || !weights_first) fetch_headers(item, i);
#pragma unroll 1
      for (int unit = 0; unit < units; unit++) {
        if (i || unit >= early) {
          if (lane == 0) barrier_wait_without_trap<S>(ring.empty + 8 * ring.stage, ring.parity ^ 1);
          fetch_weights(item, unit, ring.stage);
        }
        __syncwarp();
        fetch_x(item, unit, ring.stage);
        ring.advance();
      }
      item = next;
    }
  }
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
// silu(gate) * up of a warp's 16 rows of w, for 32 columns. Lanes exchange values until each has 8 outputs of a row.
DEVICE void store_activations(const float* c, bf16* out, i64 width, int column, int count, int lane) {
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = transpose_8x8(pack(silu(c[4 * i]) * c[4 * i + 2], silu(c[4 * i + 1]) * c[4 * i + 3]));
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

// Multiplies the sums of each column by its factor, which equals scaled inputs.
template <int N> DEVICE void scale_columns(float (&d)[N], const Tiles& tiles, int tile, int count, int lane) {
#pragma unroll
  for (int j = 0; j < N / 4; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 8 * j + 2 * (lane % 4) + e;
      if (column >= count) continue;
      const int assignment = load_int(tiles.order + tile * (2 * N) + column);
      float factor;
      asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(factor) : "l"(tiles.factors + assignment) : "memory");
      d[4 * j + e] *= factor, d[4 * j + 2 + e] *= factor;
    }
}

// Computes item after item. Called by consumer warps.
template <class S, bool GATED>
DEVICE void compute_items(Ring ring, const Items& items, HeaderBuffers headers, u32 header_stride, bf16* out, int n,
                          int units, int warp, int lane) {
  int i = 0, count = 0;
  if (items.first < items.count()) count = load_int(items.tiles.counts + items.tile(items.first));
  float d[S::COLUMNS / 2];
#pragma unroll 1
  for (int step = items.first; step < items.count(); step += items.stride, i++) {
    const int tile = items.tile(step), block = items.block(step), following = step + items.stride;
    int next_count = 0;
    if (following < items.count()) next_count = load_int(items.tiles.counts + items.tile(following));
    u32 header = 0;
    if (S::PACKED) {
      barrier_wait_without_trap<S>(headers.full(i), i >> 1 & 1);
      header = headers.at(i) + warp * header_stride;
    }
    accumulate_rows<S>(d, ring, header, count, units, warp, lane);
    if (S::PACKED && lane == 0) barrier_arrive(headers.empty(i));
    if (GATED && items.tiles.factors) scale_columns(d, items.tiles, tile, count, lane);
    const i64 width = GATED ? n / 2 : n;
    bf16* const to = out + i64(tile) * S::COLUMNS * width + (S::ROWS * block + 16 * warp) / (GATED ? 2 : 1);
#pragma unroll
    for (int quad = 0; quad < S::COLUMNS / 32; quad++) {
      if (32 * quad >= count) break;
      if (GATED) store_activations(d + 16 * quad, to, width, 32 * quad, count, lane);
      else store_products(d + 16 * quad, to, width, 32 * quad, count, lane);
    }
    count = next_count;
  }
}

constexpr int ctas_per_sm(int groups, int columns) { return columns > 64 ? 1 : 4 / groups; }

// `prefetched`: so many units of k of each CTA's first item are fetched into the L2 before the tables are complete, as
// if each expert had one tile; 0 if many experts have none.
//
// out: [places, n], or [places, n / 2] if GATED. `top`: experts of a row, if x is not sorted. The kernel that wrote the
// tables must have ended before the preceding kernel let this one start if not GATED. Shared memory: the ring, the
// headers, the barriers.
template <class W, bool GATED, int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(count_threads(GROUPS, COLUMNS), ctas_per_sm(GROUPS, COLUMNS))
    multiply_tiles(const __grid_constant__ W weights, const __grid_constant__ TensorMap x, bf16* out,
                   const int* experts, const int* counts, const int* order, const int* num_tiles,
                   const float* factors, int top, int n, int k, int stages, int share, int num_experts, int prefetched) {
  using S = Shape<GROUPS, COLUMNS, W::PACKED>;
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = blockIdx.x % u32(share);
  const u32 headers_at = base + stages * S::SLOT, header_bytes = weights.header_bytes(GROUPS);
  const u32 barriers = headers_at + 2 * header_bytes;
  const HeaderBuffers headers{headers_at, header_bytes, barriers};
  const Ring ring{base, barriers + 32, barriers + 32 + 8 * u32(stages), stages, SharedX{share, rank, 0, 0}};
  if (threadIdx.x == 32 * S::WARPS) {
    prefetch_map(&x);
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, S::WARPS * share);
    }
#pragma unroll 1
    for (int i = 0; i < 2; i++) barrier_init(headers.full(i), 1), barrier_init(headers.empty(i), S::WARPS);
    fence_barrier_init();
  }
  __syncthreads();
  if (share > 1) cluster_sync();
  const bool weights_first = !GATED && share == 1;
  const int blocks = u32(n) / u32(S::ROWS), units = k / 64;
  if (GATED && prefetched && threadIdx.x == 32 * S::WARPS) {
    const int expert = blockIdx.x / u32(blocks);
    if (expert < num_experts) weights.template prefetch<GROUPS>(ItemRows{expert, int(blockIdx.x % u32(blocks)), blocks},
                                                                min(prefetched, units), units);
  }
  if (!weights_first) wait_for_previous_kernel();
  let_next_kernel_start();
  const Tiles tiles{experts, counts, order, factors, top, load_int(num_tiles)};
  const Items items{tiles, blocks, int(u32(blocks) / u32(share)), share, rank, int(blockIdx.x / u32(share)),
                    int(gridDim.x / u32(share))};
  if (warp >= S::WARPS) {
    if (S::TRADES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    if (warp == S::WARPS)
      Producer<S, W>{ring, &weights, &x, &items, headers, units, lane, l2_evict_first(), l2_evict_last()}.run(
          weights_first);
    __syncwarp();
  } else {
    if (S::TRADES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    u32 stride = 0;
    if constexpr (W::PACKED) stride = weights.stride;
    compute_items<S, GATED>(ring, items, headers, stride, out, n, units, warp, lane);
    __syncwarp();
  }
  wait_for_previous_kernel();
  if (share > 1) cluster_sync();  // a CTA must not exit before its peer stops arriving at its barriers
}
