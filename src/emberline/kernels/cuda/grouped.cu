// Products of rows with the matrices of their experts by Hopper's wgmma. As in wide.cu, the product is computed as
// y^T = w x^T, one producer warp fetches into a ring of slots, and packed weights are decoded into registers. The rows
// of x are sorted by expert into tiles of up to COLUMNS rows.
//
// Items. An item is a tile and 64 GROUPS rows of its expert's matrix, 64 for each warpgroup. A CTA computes item after
// item while the ring runs on.
//
// Inputs. With tiles of 32 rows, the rows of x may be fetched one by one from where they are. Otherwise x is in the order of
// the tiles, and 32 rows are fetched at a time. The instruction has as many columns as the tile has rows, rounded up to 32.
// Two CTAs of a cluster may compute different rows of w for the same tile; each fetches half of the rows of x, by
// multicast. Otherwise the L2 would have to deliver more than it can.
//
// Gates and ups. A block of 16 rows has 8 rows of gate and the 8 matching rows of up, as in few_experts.cu, so that a lane
// holds both of an output.
#include "common.cuh"
#include "wgmma.cuh"
#include "uw12.cuh"
#include "wgmma_products.cuh"
#include "wide.cuh"
#include "expert_tiles.cuh"
#include "expert_products.cuh"

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
};
DEVICE FetchedItem load_item(const Items& items, int step) {
  FetchedItem found{step, items.tile(step), 0, 0};
  if (step >= items.count()) return found;
  found.expert = load_int(items.tiles.experts + found.tile), found.rows = load_int(items.tiles.counts + found.tile);
  return found;
}

// Fetches item after item into the ring. Called by a warp. `weights_first`: x is not complete before the preceding
// kernel has ended, but all else is.
template <class S, class W> struct Producer {
  static constexpr int BOXES = S::COLUMNS / BOX_ROWS;
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
    const int rows = gathers() ? item.rows : (item.rows + BOX_ROWS - 1) / BOX_ROWS * BOX_ROWS;
    barrier_expect_bytes(barrier, 128 * rows + S::W_BYTES);
    weights->template fetch<S::GROUPS>(ring.slots + stage * S::SLOT + S::X_BYTES, rows_of(item), unit, units, barrier,
                                       evict_first);
  }
  // Whether the rows of x are fetched one by one. For more rows this takes longer than the products.
  DEVICE bool gathers() const { return S::COLUMNS == BOX_ROWS && items->tiles.divisor; }
  // The rows of a box: of x, if they are fetched one by one.
  DEVICE void load_rows(int (&rows)[BOXES], const FetchedItem& item) const {
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
      const int row = BOX_ROWS * (i * ring.sharing.ctas + ring.sharing.index) + lane;
      if (row < item.rows)
        rows[i] = u32(load_int(items->tiles.order + item.tile * S::COLUMNS + row)) / u32(items->tiles.divisor);
    }
  }
  DEVICE void fetch_x(const FetchedItem& item, const int (&rows)[BOXES], int unit, int stage) const {
    const SharedX sharing = ring.sharing;
    const u32 at = ring.slots + stage * S::SLOT, barrier = ring.full + 8 * stage;
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
      const int box = BOX_ROWS * (i * sharing.ctas + sharing.index), row = box + (gathers() ? lane : 0);
      if (box >= item.rows) break;
      if (gathers() ? row >= item.rows : lane) continue;
      const int from = gathers() ? rows[i] : item.tile * S::COLUMNS + row;
      if (sharing.is_shared()) copy_tile_multicast(at + 128 * row, x, 64 * unit, from, barrier, evict_last, sharing);
      else copy_tile(at + 128 * row, x, 64 * unit, from, barrier, evict_last);
    }
  }
  DEVICE void run(bool weights_first) {
    FetchedItem item = load_item(*items, items->first);
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
      const FetchedItem next = load_item(*items, item.step + items->stride);
      int rows[BOXES] = {};
      if (gathers()) load_rows(rows, item);
      if (i || !weights_first) fetch_headers(item, i);
#pragma unroll 1
      for (int unit = 0; unit < units; unit++) {
        if (i || unit >= early) {
          if (lane == 0) barrier_wait_without_trap<S>(ring.empty + 8 * ring.stage, ring.parity ^ 1);
          fetch_weights(item, unit, ring.stage);
        }
        __syncwarp();
        fetch_x(item, rows, unit, ring.stage);
        ring.advance();
      }
      item = next;
    }
  }
};

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
// out: [places, n], or [places, n / 2] if GATED. `top`: experts of a row, or 0 if x is sorted. The kernel that wrote the
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
