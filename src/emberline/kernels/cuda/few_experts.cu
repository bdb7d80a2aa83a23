// The experts of at most 8 rows of x, in two kernels that select the experts themselves. The weights of each expert that
// any row selected are read once. As in linear.cu, a CTA has no producer warp: warp i has the units i, i + WARPS, .. of
// 64 k, and a private ring of slots that only it fills and reads.
//
// Tiles. The rows that selected an expert are a tile (expert_tiles.cuh): column r is row r of x. A slot has 64 k of the
// tile's rows of x, each fetched on its own, and of rows of w. Columns without a row have arbitrary values, which do not
// affect the others.
//
// `multiply_gate_up` writes silu(gate) * up of row r and tile i to row 8 i + r. An item is a tile and 16 BLOCKS rows of
// its expert's matrix; a CTA computes item after item. A block of 16 rows has 8 rows of gate and the 8 matching rows of
// up: packed weights are stored so, plain ones are fetched in this order.
//
// `add_down` adds the weighted outputs of all tiles to the residual. A CTA has 16 rows of w of every tile's expert.
//
// Order of sums. An output is the sum over warps, in order, of each warp's sum unit by unit; in `add_down`, of each
// warp's weighted sums expert by expert. It does not depend on the other rows.
#include "common.cuh"
#include "uw12.cuh"
#include "expert_tiles.cuh"
#include "expert_fragments.cuh"

DEVICE u32 aligned_shared_memory() {
  extern __shared__ u8 unaligned[];
  return (shared_address(unaligned) + 1023) & ~1023u;
}

// A warp's ring of slots, and its barriers.
struct Ring {
  u32 slots, barriers, slot_bytes;
  int stages;
  DEVICE void open(const TensorMap* x, int lane) const {
    if (lane == 0) {
      prefetch_map(x);
#pragma unroll 1
      for (int i = 0; i < stages; i++) barrier_init(barriers + 8 * i, 1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  DEVICE u32 slot(int i) const { return slots + i * slot_bytes; }
  DEVICE u32 barrier(int i) const { return barriers + 8 * i; }
};

// -- gate and up ------------------------------------------------------------------------------------------------------

// The step that a warp fetches next: a unit of an item, and the slot for it.
struct Step {
  int item, unit, slot;
};

template <class W, int BLOCKS, int WARPS, class Tiles> struct GateUp {
  static constexpr int ROWS = 16 * BLOCKS, PITCH = ROWS + 4, SUMS = MAX_SELECTING_ROWS * PITCH;  // floats of a warp
  static constexpr u32 X_BYTES = 128 * MAX_SELECTING_ROWS, W_BYTES = W::BLOCK_BYTES * BLOCKS;
  static constexpr u32 SLOT = (X_BYTES + W_BYTES + 1023) & ~1023u;  // rows of x must be aligned to 1024
  const W& weights;
  const TensorMap* x;
  const Tiles& tiles;
  ExpertStack stack;
  Ring ring;
  int warp, lane, items, items_per_tile;
  u32 headers, header_barriers;  // of the CTA's item i: half i % 2 of their memory
  u64 evict_first, evict_last;

  DEVICE void advance(Step& at) const {
    if (++at.slot == ring.stages) at.slot = 0;
    if ((at.unit += WARPS) >= stack.units) at.unit = warp, at.item += gridDim.x;
  }
  DEVICE void fetch(Step& at) const {
    if (at.item < items) {
      const RowTile tile = tiles.load(at.item / items_per_tile);
      const u32 to = ring.slot(at.slot), barrier = ring.barrier(at.slot);
      if (lane == 0) {
        barrier_expect_bytes(barrier, 128 * __popc(tile.mask) + W_BYTES);
        fetch_blocks<BLOCKS>(weights, to + X_BYTES, stack, tile.expert, at.item % items_per_tile * BLOCKS, at.unit,
                             barrier, evict_first);
      }
      __syncwarp();
      if (lane < MAX_SELECTING_ROWS && tile.mask >> lane & 1)
        copy_tile(to + 128 * lane, x, 64 * at.unit, lane, barrier, evict_last);
    }
    advance(at);
  }
  // Fetches the headers of the CTA's item i, if it exists. Those of item i - 2 must no longer be in use.
  DEVICE void fetch_headers(int i) const {
    const int item = blockIdx.x + i * gridDim.x;
    const u32 bytes = header_bytes(weights, BLOCKS), barrier = header_barriers + 8 * (i & 1);
    if (!bytes || threadIdx.x || item >= items) return;
    const int block = tiles.load(item / items_per_tile).expert * stack.blocks + item % items_per_tile * BLOCKS;
    barrier_expect_bytes(barrier, bytes);
    ::fetch_headers(weights, headers + (i & 1) * bytes, block, BLOCKS, barrier, evict_first);
  }
  DEVICE u32 wait_for_headers(int i) const {
    const u32 bytes = header_bytes(weights, BLOCKS);
    if (bytes) barrier_wait(header_barriers + 8 * (i & 1), i >> 1 & 1);
    return headers + (i & 1) * bytes;
  }
  DEVICE void finish(const float* sums, const RowTile& tile, int item, bf16* out) const {
    constexpr int PAIRS = ROWS / 4;
    for (int j = threadIdx.x; j < MAX_SELECTING_ROWS * PAIRS; j += 32 * WARPS) {
      const int row = j / PAIRS, pair = j % PAIRS;
      if (!(tile.mask >> row & 1)) continue;
      const float* const at = sums + row * PITCH + pair / 4 * 16 + pair % 4 * 2;
      const float2 gate = add_warps<WARPS>(at, SUMS), up = add_warps<WARPS>(at + 8, SUMS);
      const float first = gate.x / (1.f + __expf(-gate.x)) * up.x, second = gate.y / (1.f + __expf(-gate.y)) * up.y;
      const i64 place = MAX_SELECTING_ROWS * (item / items_per_tile) + row;
      bf16* const to = out + place * (8 * stack.blocks) + item % items_per_tile * (ROWS / 2) + 2 * pair;
      *reinterpret_cast<u32*>(to) = pack(first, second);
    }
  }
  // Computes the CTA's items. `shared_sums`: two sets of the warps' sums; a warp writes one while others read the other.
  DEVICE void run(bf16* out, float* shared_sums) const {
    Step next{warp < stack.units ? int(blockIdx.x) : items, warp, 0};
#pragma unroll 1
    for (int i = 0; i < ring.stages; i++) fetch(next);
    fetch_headers(0), fetch_headers(1);
    u32 parity = 0;
#pragma unroll 1
    for (int i = 0, slot = 0; int(blockIdx.x + i * gridDim.x) < items; i++) {
      const int item = blockIdx.x + i * gridDim.x;
      const RowTile tile = tiles.load(item / items_per_tile);
      const u32 header = wait_for_headers(i);
      float sums[BLOCKS][4] = {};
#pragma unroll 1
      for (int unit = warp; unit < stack.units; unit += WARPS) {
        barrier_wait(ring.barrier(slot), parity);
        const u32 at = ring.slot(slot);
        InputFragments rows;
        u32 a[BLOCKS][4][4];
        rows.load(at, lane);
#pragma unroll
        for (int r = 0; r < BLOCKS; r++)
          load_fragments(a[r], weights, at + X_BYTES + r * W::BLOCK_BYTES, header + r * header_bytes(weights, 1), unit,
                         stack.units, lane);
        __syncwarp();  // all lanes have read the slot
        fetch(next);
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) multiply_unit(sums[r], a[r], rows);
        if (++slot == ring.stages) slot = 0, parity ^= 1;
      }
      float* const set = shared_sums + (i & 1) * WARPS * SUMS;
#pragma unroll
      for (int r = 0; r < BLOCKS; r++) store_sums<PITCH>(set + warp * SUMS + 16 * r, sums[r], lane);
      __syncthreads();
      fetch_headers(i + 2);
      finish(set, tile, item, out);
    }
  }
};

// Shared memory: the rings, two sets of sums, two sets of headers, and the barriers.
template <class W, int BLOCKS, int WARPS, int PER_LANE>
__global__ void __launch_bounds__(32 * WARPS, 1)
    multiply_gate_up(const __grid_constant__ W weights, const __grid_constant__ TensorMap x, bf16* out,
                     const float* logits, const float* correction, int rows, int num_experts, int top, int sigmoid,
                     int renormalize, float scale, int n, int k, int stages) {
  using Tiles = SelectedTiles<PER_LANE>;
  using Product = GateUp<W, BLOCKS, WARPS, Tiles>;
  __shared__ Tiles tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 base = aligned_shared_memory(), sums = base + WARPS * stages * Product::SLOT;
  const u32 headers = sums + 2 * WARPS * Product::SUMS * 4, barriers = headers + 2 * header_bytes(weights, BLOCKS);
  const Ring ring{base + warp * stages * Product::SLOT, barriers + 16 + 8 * warp * stages, Product::SLOT, stages};
  ring.open(&x, lane);
  if (threadIdx.x == 0) {
    barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
    fence_barrier_init();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  tiles.select(SelectionRules{logits, correction, rows, num_experts, top, sigmoid, renormalize, scale}, warp, WARPS,
               lane);
  const int per_tile = n / (16 * BLOCKS);
  const Product product{weights, &x, tiles, ExpertStack{n / 16, k / 64}, ring, warp, lane, tiles.count * per_tile,
                        per_tile, headers, barriers, l2_evict_first(), l2_evict_last()};
  product.run(out, static_cast<float*>(__cvta_shared_to_generic(sums)));
}

// -- down -------------------------------------------------------------------------------------------------------------

// A warp's steps of `add_down`: units of k, tile after tile. A slot has x, then a block of w and its header.
template <class W, int WARPS, class Tiles> struct Down {
  static constexpr u32 X_BYTES = 128 * MAX_SELECTING_ROWS;
  const W& weights;
  const TensorMap* inner;
  const Tiles& tiles;
  ExpertStack stack;
  Ring ring;
  int warp, lane;
  u64 evict_first, evict_last;

  DEVICE Step begin() const { return Step{warp < stack.units ? 0 : tiles.count, warp, 0}; }
  DEVICE void advance(Step& at) const {
    if (++at.slot == ring.stages) at.slot = 0;
    if ((at.unit += WARPS) >= stack.units) at.unit = warp, at.item++;
  }
  DEVICE void fetch_weights(const Step& at) const {
    if (lane || at.item >= tiles.count) return;
    const RowTile tile = tiles.load(at.item);
    const u32 to = ring.slot(at.slot) + X_BYTES, barrier = ring.barrier(at.slot);
    barrier_expect_bytes(barrier, 128 * __popc(tile.mask) + W::BLOCK_BYTES + header_bytes(weights, 1));
    fetch_blocks<1>(weights, to, stack, tile.expert, blockIdx.x, at.unit, barrier, evict_first);
    fetch_headers(weights, to + W::BLOCK_BYTES, tile.expert * stack.blocks + blockIdx.x, 1, barrier, evict_first);
  }
  DEVICE void fetch_x(const Step& at) const {
    if (at.item < tiles.count && lane < MAX_SELECTING_ROWS && tiles.load(at.item).mask >> lane & 1)
      copy_tile(ring.slot(at.slot) + 128 * lane, inner, 64 * at.unit, MAX_SELECTING_ROWS * at.item + lane,
                ring.barrier(at.slot), evict_last);
  }
  // Multiplies a step's unit, and fetches another step into the slot once it is read.
  DEVICE void multiply_step(float (&sums)[4], const Step& now, Step& next) const {
    const u32 at = ring.slot(now.slot), block = at + X_BYTES;
    InputFragments rows;
    u32 a[4][4];
    rows.load(at, lane);
    load_fragments(a, weights, block, block + W::BLOCK_BYTES, now.unit, stack.units, lane);
    __syncwarp();  // all lanes have read the slot
    fetch_weights(next);
    __syncwarp();
    fetch_x(next), advance(next);
    multiply_unit(sums, a, rows);
  }
};

// The kernel that wrote the logits must have ended before the preceding kernel let this one start. CTA b has the rows
// 16 b .. 16 b + 15 of each expert's matrix.
template <class W, int WARPS, int PER_LANE>
__global__ void __launch_bounds__(32 * WARPS, 1)
    add_down(const __grid_constant__ W weights, const __grid_constant__ TensorMap inner, bf16* state,
             const float* logits, const float* correction, int rows, int num_experts, int top, int sigmoid,
             int renormalize, float scale, int n, int k, int slot_bytes, int stages) {
  constexpr int PITCH = 16 + 4, SUMS = MAX_SELECTING_ROWS * PITCH;
  using Tiles = SelectedTiles<PER_LANE>;
  __shared__ Tiles tiles;
  __shared__ alignas(16) float shared_sums[WARPS * SUMS];
  const u32 base = aligned_shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Ring ring{base + warp * stages * slot_bytes, base + WARPS * stages * slot_bytes + 8 * warp * stages,
                  u32(slot_bytes), stages};
  let_next_kernel_start();
  ring.open(&inner, lane);
  tiles.select(SelectionRules{logits, correction, rows, num_experts, top, sigmoid, renormalize, scale}, warp, WARPS,
               lane);
  const Down<W, WARPS, Tiles> product{weights, &inner, tiles, ExpertStack{n / 16, k / 64}, ring, warp, lane,
                                             l2_evict_first(), l2_evict_last()};
  Step next = product.begin(), first = next, now = next;
#pragma unroll 1
  for (int i = 0; i < stages; i++) product.fetch_weights(next), product.advance(next);
  wait_for_previous_kernel();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < stages; i++) product.fetch_x(first), product.advance(first);
  // The outputs that this thread adds to: columns 16 b + 2 (i % 8) and the next, of row i / 8.
  bf16* const to = state + i64(threadIdx.x / 8) * n + 16 * blockIdx.x + 2 * (threadIdx.x % 8);
  const bool adds = threadIdx.x < 8 * u32(rows);
  u32 before = 0;
  if (adds) before = u32(load_int(reinterpret_cast<const int*>(to)));
  float total[4] = {};
  u32 parity = 0;
#pragma unroll 1
  while (now.item < tiles.count) {
    const int index = now.item;
    const RowTile tile = tiles.load(index);
    float sums[4] = {};
#pragma unroll 1
    while (now.item == index) {
      barrier_wait(ring.barrier(now.slot), parity);
      product.multiply_step(sums, now, next);
      product.advance(now);
      if (now.slot == 0) parity ^= 1;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * (lane % 4) + i % 2;
      if (tile.mask >> row & 1) total[i] += tiles.weights[tile.expert][row] * sums[i];
    }
  }
  store_sums<PITCH>(shared_sums + warp * SUMS, total, lane);
  __syncthreads();
  if (!adds) return;
  const float2 y = add_warps<WARPS>(shared_sums + threadIdx.x / 8 * PITCH + 2 * (threadIdx.x % 8), SUMS);
  *reinterpret_cast<u32*>(to) = pack(low(before) + y.x, high(before) + y.y);
}
