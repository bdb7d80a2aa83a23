// Products of rows with the matrices of their experts, for few rows of each expert: the weights of each expert that any
// row uses are read once. As in linear.cu, a CTA has no producer warp: warp i has the units i, i + WARPS, .. of 64 k,
// and a private ring of slots that only it fills and reads.
//
// Tiles. The rows that use an expert are a tile, or several: at most COLUMNS rows each (expert_tiles.cuh). An item is
// a tile and 16 BLOCKS rows of its expert's matrix; a CTA computes item after item while its rings run on. A slot has
// 64 k of the tile's rows of x, each fetched on its own, and of the rows of w. Columns without a row have arbitrary
// values, which do not affect the others.
//
// Gates and ups. A block of 16 rows has 8 rows of gate and the 8 matching rows of up. Packed weights are stored so;
// plain ones have all rows of gate before those of up, and are fetched in this order.
//
// `multiply_gate_up` writes silu(gate) * up of each place of a tile, tile after tile. `multiply_down` reads them, and
// writes the weighted outputs of each assignment. For at most 8 rows of x, both select the experts themselves, and
// `add_down` adds the weighted outputs of all experts to the residual: a CTA has 16 rows of w of every expert in use.
//
// Order of sums. An output is the sum over warps, in order, of each warp's sum unit by unit; in `add_down`, of each
// warp's weighted sums expert by expert. It does not depend on the other rows.
#include "common.cuh"
#include "uw12.cuh"
#include "skinny.cuh"
#include "expert_tiles.cuh"

template <class W, int BLOCKS_, int TILES_, int WARPS_> struct Shape {
  static constexpr int BLOCKS = BLOCKS_, TILES = TILES_, WARPS = WARPS_, THREADS = 32 * WARPS;
  static constexpr int ROWS = 16 * BLOCKS, COLUMNS = 8 * TILES;
  static constexpr u32 X_BYTES = 128 * COLUMNS, W_BYTES = W::BLOCK_BYTES * BLOCKS;
  static constexpr u32 SLOT = (X_BYTES + W_BYTES + 1023) & ~1023u;  // tiles of x must be aligned to 1024
  static constexpr int PITCH = ROWS + 4, PARTIAL = COLUMNS * PITCH;  // floats
};

// Gates and ups as [experts, width / 8, 2, 8, k].
struct PlainPairs {
  static constexpr u32 BLOCK_BYTES = 2048;
  TensorMap map;
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

// The step that a warp fetches next: a unit of an item, and the slot for it.
struct Cursor {
  int item, unit, slot;
  RowTile tile, next;  // of this item, and of the CTA's next item
};

// A warp's ring of slots. The warp's steps are its units, item after item.
template <class W, class S, class Tiles> struct Ring {
  const W* weights;
  const TensorMap* x;
  const Tiles* tiles;
  ExpertStack stack;
  u32 slots, barriers;
  int stages, warp, lane;
  int items, items_per_tile;
  u64 evict_first, evict_last;  // L2 eviction policies of weights and of x

  DEVICE RowTile load_tile(int item) const { return tiles->load(item / items_per_tile, lane); }
  DEVICE Cursor begin() const {
    const int first = warp < stack.units ? int(blockIdx.x) : items;
    return Cursor{first, warp, 0, load_tile(first), load_tile(first + gridDim.x)};
  }
  DEVICE void advance(Cursor& at) const {
    if (++at.slot == stages) at.slot = 0;
    if ((at.unit += S::WARPS) < stack.units) return;
    at.unit = warp, at.item += gridDim.x;
    at.tile = at.next, at.next = load_tile(at.item + gridDim.x);
  }
  // Returns the first block of the item in its expert's matrix.
  DEVICE int block(int item) const { return item % items_per_tile * S::BLOCKS; }
  DEVICE void fetch_weights(const Cursor& at) const {
    if (lane || at.item >= items) return;
    const u32 to = slots + at.slot * S::SLOT + S::X_BYTES, barrier = barriers + 8 * at.slot;
    barrier_expect_bytes(barrier, 128 * __popc(at.tile.mask) + S::W_BYTES);
    fetch_blocks<S::BLOCKS>(*weights, to, stack, at.tile.expert, block(at.item), at.unit, barrier, evict_first);
  }
  DEVICE void fetch_x(const Cursor& at) const {
    if (at.item < items && lane < S::COLUMNS && at.tile.mask >> lane & 1)
      copy_tile(slots + at.slot * S::SLOT + 128 * lane, x, 64 * at.unit, at.tile.row, barriers + 8 * at.slot,
                evict_last);
  }
  DEVICE void fetch(Cursor& at) const {
    fetch_weights(at);
    __syncwarp();
    fetch_x(at);
    advance(at);
  }
};

// The headers of the CTA's item i, double-buffered: half i % 2 of their memory. Plain rows have none.
template <class W, class S, class Tiles> struct Headers {
  static DEVICE u32 bytes(const W&) { return 0; }
  DEVICE void open(const Ring<W, S, Tiles>&, u32, u32) {}
  DEVICE void fetch(const Ring<W, S, Tiles>&, int) {}
  DEVICE u32 wait(int) const { return 0; }
};
template <class S, class Tiles> struct Headers<PackedUnits, S, Tiles> {
  u32 memory, barriers, stride;
  RowTile next;  // of the next item whose headers are fetched
  static DEVICE u32 bytes(const PackedUnits& w) { return 2 * S::BLOCKS * w.stride; }
  DEVICE void open(const Ring<PackedUnits, S, Tiles>& ring, u32 at, u32 barriers_at) {
    memory = at, barriers = barriers_at, stride = ring.weights->stride;
    if (threadIdx.x == 0) {
      barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
      fence_barrier_init();
    }
    __syncthreads();
    next = ring.load_tile(blockIdx.x);
    fetch(ring, 0), fetch(ring, 1);
  }
  // Fetches the headers of item i, if it exists. Those of item i - 2 must no longer be in use.
  DEVICE void fetch(const Ring<PackedUnits, S, Tiles>& ring, int i) {
    const int item = blockIdx.x + i * gridDim.x;
    if (item >= ring.items) return;
    const RowTile tile = next;
    next = ring.load_tile(item + gridDim.x);
    if (threadIdx.x) return;
    const u32 barrier = barriers + 8 * (i & 1), bytes = S::BLOCKS * stride;
    const int block = tile.expert * ring.stack.blocks + ring.block(item);
    barrier_expect_bytes(barrier, bytes);
    copy_bytes(memory + (i & 1) * bytes, ring.weights->headers + i64(block) * stride, bytes, barrier, ring.evict_first);
  }
  DEVICE u32 wait(int i) const {
    barrier_wait(barriers + 8 * (i & 1), i >> 1 & 1);
    return memory + (i & 1) * S::BLOCKS * stride;
  }
};

// The assignments of an item's columns and their weights, in shared memory, double-buffered.
template <int COLUMNS> struct ItemColumns {
  int assignments[2][COLUMNS];
  float factors[2][COLUMNS];
  // Loads those of item i, for a tile with this index. `weights`: null: all are 1. Read them after a CTA barrier.
  DEVICE void load(const int* order, const float* weights, const RowTile& tile, int index, int i) {
    const int column = threadIdx.x;
    if (column >= COLUMNS || !(tile.mask >> column & 1)) return;
    const int assignment = load_int(order + index * COLUMNS + column);
    assignments[i & 1][column] = assignment;
    factors[i & 1][column] = weights ? load_float(weights + assignment) : 1.f;
  }
};

// Where the outputs of items go. The CTA's threads share an item's outputs in pairs.
// Activations: place p of a tile is row p of `out`, [places, width]. Inputs are multiplied by `weights`, if not null.
template <class S> struct Activations {
  bf16* out;
  int width;
  const int* order;
  const float* weights;
  ItemColumns<S::COLUMNS>* columns;
  DEVICE void load(const RowTile& tile, int index, int i) const {
    if (weights) columns->load(order, weights, tile, index, i);
  }
  DEVICE void finish(const float* partials, const RowTile& tile, int index, int part, int i) const {
    constexpr int PAIRS = S::ROWS / 4;
    for (int j = threadIdx.x; j < S::COLUMNS * PAIRS; j += S::THREADS) {
      const int column = j / PAIRS, pair = j % PAIRS;
      if (!(tile.mask >> column & 1)) continue;
      const float* const at = partials + column * S::PITCH + pair / 4 * 16 + pair % 4 * 2;
      float2 gate = sum_partials<S::WARPS>(at, S::PARTIAL), up = sum_partials<S::WARPS>(at + 8, S::PARTIAL);
      if (weights) {
        const float factor = columns->factors[i & 1][column];
        gate.x *= factor, gate.y *= factor, up.x *= factor, up.y *= factor;
      }
      const float first = gate.x / (1.f + __expf(-gate.x)) * up.x, second = gate.y / (1.f + __expf(-gate.y)) * up.y;
      bf16* const to = out + i64(index * S::COLUMNS + column) * width + part * (S::ROWS / 2) + 2 * pair;
      *reinterpret_cast<u32*>(to) = pack(first, second);
    }
  }
};
// Weighted outputs: assignment a is row a of `out`, [assignments, n].
template <class S> struct WeightedOutputs {
  bf16* out;
  int n;
  const int* order;
  const float* weights;
  ItemColumns<S::COLUMNS>* columns;
  DEVICE void load(const RowTile& tile, int index, int i) const { columns->load(order, weights, tile, index, i); }
  DEVICE void finish(const float* partials, const RowTile& tile, int, int part, int i) const {
    constexpr int PAIRS = S::ROWS / 2;
    for (int j = threadIdx.x; j < S::COLUMNS * PAIRS; j += S::THREADS) {
      const int column = j / PAIRS, pair = j % PAIRS;
      if (!(tile.mask >> column & 1)) continue;
      const float factor = columns->factors[i & 1][column];
      const float2 y = sum_partials<S::WARPS>(partials + column * S::PITCH + 2 * pair, S::PARTIAL);
      bf16* const to = out + i64(columns->assignments[i & 1][column]) * n + part * S::ROWS + 2 * pair;
      *reinterpret_cast<u32*>(to) = pack(y.x * factor, y.y * factor);
    }
  }
};

// Computes the CTA's items. `weights_first`: the tables of tiles are complete, but x is not before the preceding kernel
// has ended. Shared memory: the rings, `buffers` sets of partial sums, two sets of headers, and the barriers. With two
// sets of sums, a warp writes one while slower warps read the other; with one, a CTA barrier separates them.
template <class W, class S, class Tiles, class Outputs>
DEVICE void run_items(const W& weights, const TensorMap* x, const Tiles& tiles, int num_tiles, ExpertStack stack,
                      Outputs outputs, u32 base, int stages, int buffers, bool weights_first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int per_tile = stack.blocks / S::BLOCKS;
  const u32 sums_at = base + S::WARPS * stages * S::SLOT;
  const u32 headers_at = sums_at + buffers * S::WARPS * S::PARTIAL * 4;
  const u32 barriers = headers_at + Headers<W, S, Tiles>::bytes(weights);
  float* const shared_sums = static_cast<float*>(__cvta_shared_to_generic(sums_at));
  const Ring<W, S, Tiles> ring{&weights, x, &tiles, stack, base + warp * stages * S::SLOT, barriers + 8 * warp * stages,
                               stages, warp, lane, num_tiles * per_tile, per_tile, l2_evict_first(), l2_evict_last()};
  if (lane == 0) {
    prefetch_map(x);
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(ring.barriers + 8 * i, 1);
    fence_barrier_init();
  }
  __syncwarp();
  Cursor next = ring.begin();
  Headers<W, S, Tiles> headers;
  if (weights_first) {
    Cursor at = next;
#pragma unroll 1
    for (int i = 0; i < stages; i++) ring.fetch_weights(next), ring.advance(next);
    headers.open(ring, headers_at, barriers + 8 * S::WARPS * stages);
    wait_for_previous_kernel();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < stages; i++) ring.fetch_x(at), ring.advance(at);
  } else {
#pragma unroll 1
    for (int i = 0; i < stages; i++) ring.fetch(next);
    headers.open(ring, headers_at, barriers + 8 * S::WARPS * stages);
  }
  u32 parity = 0;
  RowTile tile = ring.load_tile(blockIdx.x);
#pragma unroll 1
  for (int i = 0, slot = 0; blockIdx.x + i * gridDim.x < u32(ring.items); i++) {
    const int item = blockIdx.x + i * gridDim.x;
    const RowTile following = ring.load_tile(item + gridDim.x);
    outputs.load(tile, item / per_tile, i);
    WeightFragments<W, S::BLOCKS> rows;
    rows.start_tile(weights, headers.wait(i), 0, warp, S::WARPS, stack.units, lane);
    float sums[S::BLOCKS][S::TILES][4] = {};
#pragma unroll 1
    for (int j = 0; warp + j * S::WARPS < stack.units; j++) {
      barrier_wait(ring.barriers + 8 * slot, parity);
      const u32 at = ring.slots + slot * S::SLOT;
      InputFragments<S::TILES> columns;
      columns.load(at, lane);
      rows.load(at + S::X_BYTES, j, lane);
      __syncwarp();  // all lanes have read the slot
      ring.fetch(next);
      rows.decode(j, lane);
      multiply_into(sums, rows.a, columns.b);
      if (++slot == stages) slot = 0, parity ^= 1;
    }
    if (buffers == 1 && i) __syncthreads();  // all threads have read the previous item's partial sums
    float* const set = shared_sums + (buffers == 2 ? (i & 1) * S::WARPS * S::PARTIAL : 0);
    store_partial<S>(set + warp * S::PARTIAL, sums, lane);
    __syncthreads();
    headers.fetch(ring, i + 2);
    outputs.finish(set, tile, item / per_tile, item % per_tile, i);
    tile = following;
  }
}

DEVICE u32 aligned_shared_memory() {
  extern __shared__ u8 unaligned[];
  return (shared_address(unaligned) + 1023) & ~1023u;
}

template <class W, int BLOCKS, int TILES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1)
    multiply_gate_up(const __grid_constant__ W weights, const __grid_constant__ TensorMap x, bf16* out,
                     const int* experts, const int* counts, const int* order, const int* num_tiles,
                     const float* factors, int top, int n, int k, int stages, int buffers) {
  using S = Shape<W, BLOCKS, TILES, WARPS>;
  __shared__ ItemColumns<S::COLUMNS> columns;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int count = load_int(num_tiles);
  const SortedTiles<S::COLUMNS> tiles{experts, counts, order, top, count};
  run_items<W, S>(weights, &x, tiles, count, ExpertStack{n / 16, k / 64},
                  Activations<S>{out, n / 2, order, factors, &columns},
                  aligned_shared_memory(), stages, buffers, false);
}

// The kernel that wrote the tables must have ended before the preceding kernel let this one start.
template <class W, int BLOCKS, int TILES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1)
    multiply_down(const __grid_constant__ W weights, const __grid_constant__ TensorMap inner, bf16* out,
                  const int* experts, const int* counts, const int* order, const int* num_tiles,
                  const float* factors, int n, int k, int stages, int buffers) {
  using S = Shape<W, BLOCKS, TILES, WARPS>;
  __shared__ ItemColumns<S::COLUMNS> columns;
  let_next_kernel_start();
  const int count = load_int(num_tiles);
  const SortedTiles<S::COLUMNS> tiles{experts, counts, order, 0, count};
  run_items<W, S>(weights, &inner, tiles, count, ExpertStack{n / 16, k / 64},
                  WeightedOutputs<S>{out, n, order, factors, &columns}, aligned_shared_memory(), stages,
                  buffers, true);
}

// -- at most 8 rows ---------------------------------------------------------------------------------------------------

template <class W, int BLOCKS, int WARPS, int PER_LANE>
__global__ void __launch_bounds__(32 * WARPS, 1)
    select_and_multiply_gate_up(const __grid_constant__ W weights, const __grid_constant__ TensorMap x, bf16* out,
                                const float* logits, const float* correction, int rows, int num_experts, int top,
                                int sigmoid, int renormalize, float scale, int n, int k, int stages,
                                int buffers) {
  using S = Shape<W, BLOCKS, 1, WARPS>;
  __shared__ SelectedTiles<PER_LANE> tiles;
  wait_for_previous_kernel();
  let_next_kernel_start();
  tiles.select(SelectionRules{logits, correction, rows, num_experts, top, sigmoid, renormalize, scale},
               threadIdx.x / 32, WARPS, threadIdx.x % 32);
  run_items<W, S>(weights, &x, tiles, tiles.count, ExpertStack{n / 16, k / 64}, Activations<S>{out, n / 2},
                  aligned_shared_memory(), stages, buffers, false);
}

#include "add_down.cuh"
