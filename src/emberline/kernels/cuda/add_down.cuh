// `add_down` of grouped.cu: the products with the second matrices of experts for at most 8 rows, and their sum.
#pragma once

// One step of `add_down`: 16 rows x 128 k of an expert. Packed: the header of the rows follows in the slot.
constexpr int STEP_UNITS = 2;
DEVICE u32 step_bytes(const PlainRows&, int count) { return PlainRows::BLOCK_BYTES * count; }
DEVICE u32 step_bytes(const PackedUnits& w, int count) { return UNIT_BYTES * count + w.stride; }
DEVICE void fetch_header(const PlainRows&, u32, int, u32, u64) {}
DEVICE void fetch_header(const PackedUnits& w, u32 to, int block, u32 barrier, u64 policy) {
  copy_bytes(to + STEP_UNITS * UNIT_BYTES, w.headers + i64(block) * w.stride, w.stride, barrier, policy);
}
// Loads the fragments of unit `unit` of k, which is unit i of the step.
DEVICE void load_fragments(u32 (&a)[4][4], const PlainRows&, u32 step, int i, int, int, int lane) {
  const u32 at = swizzled_offset(lane & 15, lane >> 4);
#pragma unroll
  for (int f = 0; f < 4; f++) load_matrices(a[f], step + PlainRows::BLOCK_BYTES * i + (at ^ (32 * f)));
}
DEVICE void load_fragments(u32 (&a)[4][4], const PackedUnits&, u32 step, int i, int unit, int units, int lane) {
  const u32 header = step + STEP_UNITS * UNIT_BYTES;
  Unit packed;
  packed.load_shared(step + UNIT_BYTES * i, lane);
  decode_unit(a, packed, load_shared_4(header + lane / 4 * 4), load_shared_4(header + lane / 4 * 4 + 32));
  const u32 begin = load_shared_2(header + STARTS_OFFSET + 2 * unit);
  const u32 end = load_shared_2(header + STARTS_OFFSET + 2 * unit + 2);
#pragma unroll 1
  for (u32 j = begin; j < end; j++) restore_escape(a, load_shared_4(header + escapes_offset(units) + 4 * j), lane);
}

// A warp's ring of `add_down`. Its steps are pairs of units of k, tile after tile.
template <class W, class Tiles, int WARPS> struct DownRing {
  struct Step {
    int tile, unit, slot;
  };
  const W* weights;
  const TensorMap* inner;
  const Tiles* tiles;
  ExpertStack stack;
  u32 slots, barriers, slot_bytes;
  int stages, warp, lane;
  u64 evict_first, evict_last;
  DEVICE Step begin() const { return Step{STEP_UNITS * warp < stack.units ? 0 : tiles->count, STEP_UNITS * warp, 0}; }
  DEVICE void advance(Step& at) const {
    if (++at.slot == stages) at.slot = 0;
    if ((at.unit += STEP_UNITS * WARPS) >= stack.units) at.unit = STEP_UNITS * warp, at.tile++;
  }
  DEVICE int count_units(const Step& at) const { return min(STEP_UNITS, stack.units - at.unit); }
  DEVICE void fetch_weights(const Step& at) const {
    if (lane || at.tile >= tiles->count) return;
    const RowTile tile = tiles->load(at.tile, lane);
    const u32 to = slots + at.slot * slot_bytes + STEP_UNITS * 1024, barrier = barriers + 8 * at.slot;
    const int count = count_units(at);
    barrier_expect_bytes(barrier, 128 * count * __popc(tile.mask) + step_bytes(*weights, count));
#pragma unroll
    for (int i = 0; i < STEP_UNITS; i++)
      if (i < count)
        fetch_blocks<1>(*weights, to + W::BLOCK_BYTES * i, stack, tile.expert, blockIdx.x, at.unit + i, barrier,
                        evict_first);
    fetch_header(*weights, to, tile.expert * stack.blocks + blockIdx.x, barrier, evict_first);
  }
  DEVICE void fetch_x(const Step& at) const {
    if (at.tile >= tiles->count) return;
    const RowTile tile = tiles->load(at.tile, lane);
    if (lane >= MAX_SELECTING_ROWS || !(tile.mask >> lane & 1)) return;
#pragma unroll
    for (int i = 0; i < STEP_UNITS; i++)
      if (i < count_units(at))
        copy_tile(slots + at.slot * slot_bytes + 1024 * i + 128 * lane, inner, 64 * (at.unit + i),
                  MAX_SELECTING_ROWS * at.tile + lane, barriers + 8 * at.slot, evict_last);
  }
};

// Adds the weighted outputs of all experts to `state`, [rows, n]. CTA b has the 16 rows b of w of every expert. The
// kernel that wrote the logits must have ended before the preceding kernel let this one start.
template <class W, int WARPS, int PER_LANE>
__global__ void __launch_bounds__(32 * WARPS, 1)
    add_down(const __grid_constant__ W weights, const __grid_constant__ TensorMap inner, bf16* state,
             const float* logits, const float* correction, int rows, int num_experts, int top, int sigmoid,
             int renormalize, float scale, int n, int k, int slot_bytes, int stages) {
  constexpr int PITCH = 16 + 4, PARTIAL = MAX_SELECTING_ROWS * PITCH;
  using Tiles = SelectedTiles<PER_LANE>;
  __shared__ Tiles tiles;
  __shared__ alignas(16) float partials[WARPS * PARTIAL];
  const u32 base = aligned_shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 barriers = base + WARPS * stages * slot_bytes + 8 * warp * stages;
  let_next_kernel_start();
  if (lane == 0) {
    prefetch_map(&inner);
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(barriers + 8 * i, 1);
    fence_barrier_init();
  }
  tiles.select(SelectionRules{logits, correction, rows, num_experts, top, sigmoid, renormalize, scale}, warp, WARPS,
               lane);
  const DownRing<W, Tiles, WARPS> ring{&weights, &inner, &tiles, ExpertStack{n / 16, k / 64},
                                       base + warp * stages * slot_bytes, barriers, u32(slot_bytes), stages, warp, lane,
                                       l2_evict_first(), l2_evict_last()};
  auto next = ring.begin(), first = next, now = next;
#pragma unroll 1
  for (int i = 0; i < stages; i++) ring.fetch_weights(next), ring.advance(next);
  wait_for_previous_kernel();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < stages; i++) ring.fetch_x(first), ring.advance(first);
  // The outputs that this thread adds to: columns 16 b + 2 (i % 8) and the next, of row i / 8.
  bf16* const to = state + i64(threadIdx.x / 8) * n + 16 * blockIdx.x + 2 * (threadIdx.x % 8);
  const bool adds = threadIdx.x < 8 * u32(rows);
  const u32 before = adds ? load_past_l1(to) : 0;
  const int column = 2 * (lane % 4);
  float total[4] = {};
  u32 parity = 0;
#pragma unroll 1
  while (now.tile < tiles.count) {
    const int index = now.tile;
    const RowTile tile = tiles.load(index, lane);
    float sums[1][1][4] = {};
#pragma unroll 1
    while (now.tile == index) {
      barrier_wait(barriers + 8 * now.slot, parity);
      const u32 at = ring.slots + now.slot * slot_bytes;
      InputFragments<1> columns[STEP_UNITS];
      u32 a[STEP_UNITS][1][4][4];
      const int count = ring.count_units(now);
#pragma unroll
      for (int i = 0; i < STEP_UNITS; i++) {
        if (i >= count) break;
        columns[i].load(at + 1024 * i, lane);
        load_fragments(a[i][0], weights, at + STEP_UNITS * 1024, i, now.unit + i, ring.stack.units, lane);
      }
      __syncwarp();  // all lanes have read the slot
      ring.fetch_weights(next);
      __syncwarp();
      ring.fetch_x(next), ring.advance(next);
#pragma unroll
      for (int i = 0; i < STEP_UNITS; i++)
        if (i < count) multiply_into(sums, a[i], columns[i].b);
      ring.advance(now);
      if (now.slot == 0) parity ^= 1;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = column + i % 2;
      if (tile.mask >> row & 1) total[i] += tiles.weights[tile.expert][row] * sums[0][0][i];
    }
  }
  float* const own = partials + warp * PARTIAL + column * PITCH + lane / 4;
  own[0] = total[0], own[PITCH] = total[1], own[8] = total[2], own[PITCH + 8] = total[3];
  __syncthreads();
  if (!adds) return;
  const float2 y = sum_partials<WARPS>(partials + threadIdx.x / 8 * PITCH + 2 * (threadIdx.x % 8), PARTIAL);
  *reinterpret_cast<u32*>(to) = pack(low(before) + y.x, high(before) + y.y);
}
