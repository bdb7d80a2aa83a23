// Both products of routed experts in one kernel, for few rows of each expert. The weights of the second product follow
// those of the first without a pause, which a second kernel would need to start.
//
// Items. As in grouped.cu, an item is a tile of up to 32 rows of x and 128 rows of its expert's matrix. The items of gate
// and up precede those of down. A CTA computes items i, i + CTAs, .. A tile's items of down need all its items of gate and
// up, which other CTAs compute: warps count those that are stored, in `words[2 tile]`. All CTAs run at the same time, and
// no item waits for a later one, so the counts are reached. `words[2 tile + 1]` counts the items of down that have read
// the first count; the last one sets both to zero for the next launch.
//
// Tables. Each CTA selects the experts of all rows itself, into shared memory.
#include "common.cuh"
#include "wgmma.cuh"
#include "uw12.cuh"
#include "wgmma_products.cuh"
#include "wide.cuh"
#include "expert_tiles.cuh"
#include "expert_products.cuh"

constexpr int GROUPS = 2, WARPS = 4 * GROUPS, ALL_WARPS = WARPS + 1, TILE_ROWS = 32;
constexpr int MAX_ROWS = 64, MAX_ASSIGNMENTS = 512;

// -- tables -----------------------------------------------------------------------------------------------------------

// Where the outputs of a row's experts are stored, and their weights: [rows, top].
struct Assignments {
  int* places;
  float* weights;
};

// Tiles in shared memory, for 32 PER_LANE experts. The rows of an expert are in their order.
template <int PER_LANE> struct SharedTiles {
  static constexpr int EXPERTS = 32 * PER_LANE, TILES = EXPERTS + MAX_ASSIGNMENTS / TILE_ROWS;
  u64 masks[EXPERTS];  // of each expert, the rows that selected it
  int count;
  u16 first_tiles[EXPERTS], experts[TILES], chosen[MAX_ASSIGNMENTS];
  u8 counts[TILES], rows[TILES * TILE_ROWS];

  DEVICE int num_tiles() const { return count; }
  DEVICE int expert(int tile) const { return experts[tile]; }
  DEVICE int num_rows(int tile) const { return counts[tile]; }
  DEVICE int row(int tile, int column) const { return rows[TILE_ROWS * tile + column]; }

  // Selects the experts of all rows. Called by all threads of the CTA, after the kernel that wrote the logits.
  DEVICE void select(const SelectionRules& rules, const Assignments& out, int warp, int lane) {
    for (int i = threadIdx.x; i < EXPERTS; i += 32 * ALL_WARPS) masks[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int row = warp; row < rules.rows; row += ALL_WARPS) {
      const Selected found = select_experts<PER_LANE>(rules, row, lane);
      if (lane >= rules.top) continue;
      atomicOr(&masks[found.expert], 1ull << row);
      chosen[row * rules.top + lane] = found.expert;
      if (blockIdx.x == 0) out.weights[row * rules.top + lane] = found.weight;
    }
    __syncthreads();
    if (warp == 0) number_tiles(lane);
    __syncthreads();
#pragma unroll 1
    for (int expert = warp; expert < EXPERTS; expert += ALL_WARPS) list_rows(expert, lane);
    if (blockIdx.x == 0)
      for (int i = threadIdx.x; i < rules.rows * rules.top; i += 32 * ALL_WARPS) {
        const int expert = chosen[i];
        out.places[i] = TILE_ROWS * first_tiles[expert] + rank(expert, u32(i) / u32(rules.top));
      }
    __syncthreads();
  }

 private:
  // The number of the expert's rows before this one.
  DEVICE int rank(int expert, int row) const { return __popcll(masks[expert] & ((1ull << row) - 1)); }
  DEVICE void number_tiles(int lane) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) own += (__popcll(masks[lane * PER_LANE + i]) + TILE_ROWS - 1) / TILE_ROWS;
    const int end = sum_up_to_lane(own, lane);
    int tile = end - own;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      first_tiles[lane * PER_LANE + i] = tile;
      tile += (__popcll(masks[lane * PER_LANE + i]) + TILE_ROWS - 1) / TILE_ROWS;
    }
    if (lane == 31) count = end;
  }
  DEVICE void list_rows(int expert, int lane) {
    const u64 mask = masks[expert];
    const int total = __popcll(mask), first = first_tiles[expert];
#pragma unroll
    for (int row = lane; row < MAX_ROWS; row += 32)
      if (mask >> row & 1) rows[TILE_ROWS * first + rank(expert, row)] = row;  // the tiles of an expert are adjacent
    if (lane * TILE_ROWS < total) {
      experts[first + lane] = expert;
      counts[first + lane] = min(TILE_ROWS, total - lane * TILE_ROWS);
    }
  }
};

// -- items ------------------------------------------------------------------------------------------------------------

// The items of both products. `blocks`: of 128 rows of an expert's matrix; `units`: k / 64.
struct Items {
  int tiles, gate_up_blocks, gate_up_units, down_blocks, down_units;
  DEVICE int num_gate_up() const { return tiles * gate_up_blocks; }
  DEVICE int count() const { return tiles * (gate_up_blocks + down_blocks); }
};
struct Item {
  bool exists, is_down;
  int tile, block, blocks, units;
  DEVICE Item(const Items& items, int number) {
    exists = number < items.count(), is_down = number >= items.num_gate_up();
    if (is_down) number -= items.num_gate_up();
    blocks = is_down ? items.down_blocks : items.gate_up_blocks, units = is_down ? items.down_units : items.gate_up_units;
    tile = u32(number) / u32(blocks), block = u32(number) % u32(blocks);
  }
};

DEVICE void add_release(u32* word) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}
// Orders ordinary stores to global memory before TMA copies that read them, in both threads.
DEVICE void fence_global_writes() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Fetches item after item into the ring. Called by a warp.
template <class S, class Up, class Down, class Tiles> struct Producer {
  Ring ring;
  const Up* gate_up;
  const Down* down;
  const TensorMap *x, *inner;
  const Tiles* tiles;
  const Items* items;
  HeaderBuffers headers;
  u32* words;
  int lane;
  u64 evict_first, evict_last;

  DEVICE void fetch_headers(const Item& item, const ItemRows& rows, int i) const {
    if (!S::PACKED || lane) return;
    barrier_wait(headers.empty(i), (i >> 1 & 1) ^ 1);
    const u32 barrier = headers.full(i);
    barrier_expect_bytes(barrier, item.is_down ? down->header_bytes(GROUPS) : gate_up->header_bytes(GROUPS));
    if (item.is_down) down->template fetch_headers<GROUPS>(headers.at(i), rows, barrier, evict_first);
    else gate_up->template fetch_headers<GROUPS>(headers.at(i), rows, barrier, evict_first);
  }
  DEVICE void fetch_weights(const Item& item, const ItemRows& rows, int num_rows, int unit, int stage) const {
    const u32 barrier = ring.full + 8 * stage, to = ring.slots + stage * S::SLOT + S::X_BYTES;
    barrier_expect_bytes(barrier, 128 * num_rows + S::W_BYTES);
    if (item.is_down) down->template fetch<GROUPS>(to, rows, unit, item.units, barrier, evict_first);
    else gate_up->template fetch<GROUPS>(to, rows, unit, item.units, barrier, evict_first);
  }
  // Waits until the activations of an item of down are stored. Meanwhile lane 0 fetches its weights into slots that are
  // free; returns their number.
  DEVICE int wait_for_activations(const Item& item, const ItemRows& rows, int num_rows) const {
    u32* const word = words + 2 * item.tile;
    const u32 all = items->gate_up_blocks * WARPS;
    const int most = min(item.units, ring.stages);
    int fetched = 0, stage = ring.stage;
    u32 parity = ring.parity;
    if (lane == 0) {
#pragma unroll 1
      for (u32 tries = 0; load_acquire(word) < all; tries++) {
        if (fetched < most && barrier_passed(ring.empty + 8 * stage, parity ^ 1)) {
          fetch_weights(item, rows, num_rows, fetched++, stage);
          if (++stage == ring.stages) stage = 0, parity ^= 1;
        }
        if (tries > (1u << 24)) __trap();
      }
      if (atomicAdd(word + 1, 1u) == u32(item.blocks) - 1) word[0] = word[1] = 0;
    }
    __syncwarp();
    fence_global_writes();
    return fetched;
  }
  DEVICE void run() {
#pragma unroll 1
    for (int i = 0, number = blockIdx.x;; i++, number += gridDim.x) {
      const Item item(*items, number);
      if (!item.exists) break;
      const ItemRows rows{tiles->expert(item.tile), item.block, item.blocks};
      const int num_rows = tiles->num_rows(item.tile);
      int row = TILE_ROWS * item.tile + lane;
      if (!item.is_down && lane < num_rows) row = tiles->row(item.tile, lane);
      const TensorMap* const from = item.is_down ? inner : x;
      fetch_headers(item, rows, i);
      const int fetched = item.is_down ? wait_for_activations(item, rows, num_rows) : 0;
#pragma unroll 1
      for (int unit = 0; unit < item.units; unit++) {
        if (lane == 0 && unit >= fetched) {
          barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
          fetch_weights(item, rows, num_rows, unit, ring.stage);
        }
        __syncwarp();
        if (lane < num_rows)
          copy_tile(ring.slots + ring.stage * S::SLOT + 128 * lane, from, 64 * unit, row, ring.full + 8 * ring.stage,
                    evict_last);
        ring.advance();
      }
    }
  }
};

// Computes item after item. Called by consumer warps.
template <class S, class Tiles>
DEVICE void compute_items(Ring ring, const Items& items, const Tiles& tiles, HeaderBuffers headers,
                          u32 gate_up_stride, u32 down_stride, bf16* inner, bf16* out, u32* words, int warp, int lane) {
#pragma unroll 1
  for (int i = 0, number = blockIdx.x;; i++, number += gridDim.x) {
    const Item item(items, number);
    if (!item.exists) return;
    const int count = tiles.num_rows(item.tile);
    u32 header = 0;
    if (S::PACKED) {
      barrier_wait(headers.full(i), i >> 1 & 1);
      header = headers.at(i) + warp * (item.is_down ? down_stride : gate_up_stride);
    }
    float d[S::COLUMNS / 2];
    accumulate<S, S::COLUMNS>(d, ring, header, item.units, warp, lane);
    if (S::PACKED && lane == 0) barrier_arrive(headers.empty(i));
    const i64 width = (item.is_down ? 128 : 64) * item.blocks, first = TILE_ROWS * item.tile * width;
    const int row = S::ROWS * item.block + 16 * warp;
    if (item.is_down) {
      store_products(d, out + first + row, width, 0, count, lane);
    } else {
      store_activations(d, inner + first + row / 2, width, 0, count, lane);
      fence_global_writes();
      __syncwarp();
      if (lane == 0) add_release(words + 2 * item.tile);
    }
  }
}

// The experts of at most MAX_ROWS rows. inner: [places, width], out: [places, hidden]. `words`: two for each tile, zero. The
// launch must have no more CTAs than run at the same time. Shared memory: the ring, the headers, the barriers.
template <class Up, class Down, int PER_LANE>
__global__ void __launch_bounds__(32 * ALL_WARPS, 2)
    select_and_run(const __grid_constant__ Up gate_up, const __grid_constant__ Down down,
                   const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap inner_map, bf16* inner,
                   bf16* out, u32* words, int hidden, int width, int stages, int* places, float* weights,
                   const float* logits, const float* correction, int rows, int experts, int top, int sigmoid,
                   int renormalize, float scale) {
  using S = Shape<GROUPS, TILE_ROWS, Up::PACKED>;
  using Tiles = SharedTiles<PER_LANE>;
  extern __shared__ u8 unaligned[];
  __shared__ Tiles tiles;
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 headers_at = base + stages * S::SLOT;
  const u32 header_bytes = max(gate_up.header_bytes(GROUPS), down.header_bytes(GROUPS));
  const u32 barriers = headers_at + 2 * header_bytes;
  const HeaderBuffers headers{headers_at, header_bytes, barriers};
  const Ring ring{base, barriers + 32, barriers + 32 + 8 * u32(stages), stages, SharedX{1, 0, 0, 0}};
  if (threadIdx.x == 32 * WARPS) {
    prefetch_map(&x), prefetch_map(&inner_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, S::WARPS);
#pragma unroll 1
    for (int i = 0; i < 2; i++) barrier_init(headers.full(i), 1), barrier_init(headers.empty(i), S::WARPS);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  tiles.select(SelectionRules{logits, correction, rows, experts, top, sigmoid, renormalize, scale},
               Assignments{places, weights}, warp, lane);
  const Items items{tiles.num_tiles(), 2 * width / S::ROWS, hidden / 64, hidden / S::ROWS, width / 64};
  if (warp == WARPS) {
    Producer<S, Up, Down, Tiles>{ring, &gate_up, &down, &x, &inner_map, &tiles, &items, headers, words, lane,
                                 l2_evict_first(), l2_evict_last()}.run();
  } else {
    compute_items<S>(ring, items, tiles, headers, gate_up.header_bytes(1) / 4, down.header_bytes(1) / 4, inner, out,
                     words, warp, lane);
  }
}
