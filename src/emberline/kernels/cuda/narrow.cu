// y = x w^T for matrices of 4-bit codes and a few rows of x, or a few rows for each of many matrices (experts). The time
// is that of reading the codes, each once.
//
// Tiles. A CTA computes 16 BLOCKS rows of w in each of WARPS / parts groups of warps, for up to 8 TILES rows of x. Warp p
// of a group has the units p, p + parts, .. of k, and a ring of slots that only it fills and reads. A slot has a unit of
// each of its blocks, and the same 128 k of x. An output is the sum over the warps of a group, in order.
//
// Copies. Codes are fetched by bulk copies, of which an SM starts one in about 60 ns, so they must be few and large. The
// rows of x are fetched by cp.async. A slot's barrier counts the bytes of the codes, and an arrival of each lane.
#include "common.cuh"
#include "narrow.cuh"
#include "narrow_slots.cuh"

// The work of all CTAs: items, each a tile of rows of x and a tile of rows of w. Items that read the same rows of w are
// adjacent, so that one of them reads from memory and the others from the L2.
template <int BLOCKS, int TILES, int WARPS> struct Work {
  const Problem& p;
  int row_tiles, column_tiles;
  int tile_columns;  // of out
  DEVICE Work(const Problem& problem) : p(problem) {
    tile_columns = 16 * BLOCKS * (WARPS / p.parts) / (p.gated ? 2 : 1);
    column_tiles = (p.width + tile_columns - 1) / tile_columns;
    row_tiles = p.order ? load_int(p.num_tiles) : (p.rows + p.tile_rows - 1) / p.tile_rows;
  }
  DEVICE int count() const { return row_tiles * column_tiles; }
  DEVICE int expert(int tile) const { return p.order ? load_int(p.tile_experts + tile) : 0; }
  DEVICE int rows(int tile) const {
    return p.order ? load_int(p.tile_counts + tile) : min(p.tile_rows, p.rows - tile * p.tile_rows);
  }
  DEVICE int assignment(int tile, int row) const {
    return p.order ? load_int(p.order + tile * p.tile_rows + row) : tile * p.tile_rows + row;
  }
};

// What a warp fetches next. Step s of the warp is in slot s % stages. The row of x and the expert of an item are loaded
// while the item before it is fetched, which hides the latency.
template <class F, int BLOCKS, class W> struct Fetcher {
  const Problem& p;
  const W& work;
  u32 slots, slot_bytes, barriers;
  int group, part, units, own, lane;  // own: steps of the warp in an item, the last of which may be beyond k
  u64 evict_first;
  int item, items, j, slot;
  int rows, next_rows, next_expert, next_assignment;  // rows: of x in the item
  int row, left;  // of x: where the lane's row starts, in units of 16 bytes; bytes of a row from the next step on
  const u8* w;                                        // the next codes
  bool has_rows;                                      // of w

  DEVICE void load_item(int next) {
    if (next >= items) return;
    const int tile = next % work.row_tiles;
    next_rows = work.rows(tile), next_expert = work.expert(tile);
    next_assignment = work.assignment(tile, min(lane, p.tile_rows - 1));
  }
  DEVICE void open_item() {
    if (item >= items) return;
    const int column = item / work.row_tiles * work.tile_columns;
    const int block = column / (p.gated ? 8 : 16) + group * BLOCKS;
    const u8* const codes = p.codes + next_expert * p.expert_bytes + i64(part) * CELL<F>;
    has_rows = block < p.blocks, rows = next_rows, left = 2 * (p.k - 128 * part);
    row = lane < rows ? next_assignment / p.divisor * (p.k / 8) : 0;
    w = codes + block_offset<F>(block, units);
    load_item(item + gridDim.x);
  }
  // Fetches codes, x, or both, for the next step into its slot, which must be free. Nothing is beyond k.
  template <bool CODES, bool X> DEVICE void fetch() {
    if (item >= items) return;
    const u32 at = slots + slot * slot_bytes, barrier = barriers + 8 * slot;
    const u32 w_bytes = has_rows && left > 0 ? BLOCKS * UNIT<F> : 0;
    if (CODES && lane == 0) {
      barrier_expect_bytes(barrier, w_bytes);
      if (w_bytes) copy_bytes(at, w, w_bytes, barrier, evict_first);
    }
    if (X) fetch_rows(at + BLOCKS * UNIT<F>, barrier);
    if (++slot == p.stages) slot = 0;
    w += p.parts * CELL<F>, left -= 256 * p.parts;
    if (++j < own) return;
    j = 0, item += gridDim.x;
    open_item();
  }
  // Fetches 128 k of the rows of x, two rows at a time. What is beyond k, a multiple of 8, becomes zero.
  DEVICE void fetch_rows(u32 to, u32 barrier) {
    const int chunk = lane % 16;
    const u32 bytes = left > 16 * chunk ? 16 : 0;
    const u8* const from = reinterpret_cast<const u8*>(p.x) + (2 * p.k - left + 16 * chunk);
#pragma unroll 1
    for (int first = 0; first < rows; first += 2) {
      const int index = first + lane / 16, own = __shfl_sync(ALL_LANES, row, index);
      if (index < rows) copy_chunk(to + index * X_PITCH + 16 * chunk, from + 16 * u64(u32(own)), bytes);
    }
    arrive_after_copies(barrier);
  }
};

// The epilogue. The CTA's threads share the outputs of an item in pairs of columns of out.
template <int BLOCKS, class W> struct Outputs {
  static constexpr int PITCH = 16 * BLOCKS + 4;
  const Problem& p;
  const W& work;
  const float* partials;
  int pitch;  // floats from a warp's partial sums to the next warp's
  int pairs, tile, column_tile, rows, expert, assignment;  // assignment: of the thread's first output

  DEVICE void start(int item) {
    pairs = work.tile_columns / 2;
    tile = item % work.row_tiles, column_tile = item / work.row_tiles;
    rows = work.rows(tile), expert = work.expert(tile);
    assignment = work.assignment(tile, min(int(threadIdx.x) / pairs, p.tile_rows - 1));
  }
  DEVICE float2 sum(int group, int row, int local) const {
    const float* at = partials + group * p.parts * pitch + row * PITCH + local;
    float2 total = *reinterpret_cast<const float2*>(at);
#pragma unroll 4
    for (int i = 1; i < p.parts; i++) {
      const float2 more = *reinterpret_cast<const float2*>(at + i * pitch);
      total.x += more.x, total.y += more.y;
    }
    return total;
  }
  DEVICE void finish() const {
    const int per_group = p.gated ? 4 * BLOCKS : 8 * BLOCKS;  // pairs
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * pairs; i += blockDim.x) {
      const int row = i / pairs, pair = i % pairs, group = pair / per_group, own = pair % per_group;
      const int place = i == threadIdx.x ? assignment : work.assignment(tile, row);
      const int column = 2 * (column_tile * pairs + pair), local = p.gated ? own / 4 * 16 + 2 * (own % 4) : 2 * own;
      if (column >= p.width) continue;
      const float2 first = sum(group, row, local), up = p.gated ? sum(group, row, local + 8) : first;
      finish_pair(p, expert, column, place, place, first, up);
    }
  }
};

// Registers of a thread, so that as many CTAs fit on an SM as plans assume. With many warps some are left for the next
// kernel, which may be a small one that can start and wait there.
constexpr int max_registers(int tiles, int warps) { return tiles == 4 ? 255 : tiles == 2 ? 168 : warps == 16 ? 96 : 112; }

// Shared memory: the rings of the warps, `buffers` sets of partial sums, and the barriers. With two sets, a warp writes
// one while slower warps read the other. With none, a warp's partial sums are in the slot that it read last, which is
// refilled after they have been summed.
template <class F, int BLOCKS, int TILES, int WARPS>
__global__ void __maxnreg__(max_registers(TILES, WARPS)) narrow(const __grid_constant__ Problem p) {
  using W = Work<BLOCKS, TILES, WARPS>;
  extern __shared__ __align__(128) u8 memory[];
  constexpr int PARTIAL_PITCH = 16 * BLOCKS + 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 base = shared_address(memory), slot_bytes = BLOCKS * UNIT<F> + p.x_rows * X_PITCH;
  const u32 ring_bytes = p.stages * slot_bytes, rings_bytes = WARPS * ring_bytes;
  const u32 partial_bytes = p.x_rows * PARTIAL_PITCH * 4;
  const u32 barriers = base + rings_bytes + p.buffers * WARPS * partial_bytes + 8 * warp * p.stages;
  if (lane == 0) {
    for (int i = 0; i < p.stages; i++) barrier_init(barriers + 8 * i, 1 + 32);
    fence_barrier_init();
  }
  __syncwarp();
  if (!p.triggers_late) let_next_kernel_start();
  if (!p.early) wait_for_previous_kernel();
  const W work(p);
  const int units = (p.k + 127) / 128, part = warp % p.parts, own = (units + p.parts - 1) / p.parts;
  const int items = work.count();
  Fetcher<F, BLOCKS, W> fetcher{p, work, base + warp * ring_bytes, slot_bytes, barriers, warp / p.parts, part, units, own,
                                lane, l2_evict_first(), int(blockIdx.x), items};
  fetcher.load_item(blockIdx.x);
  fetcher.open_item();
  if (p.early) {
    auto inputs = fetcher;
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) fetcher.template fetch<true, false>();
    wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) inputs.template fetch<false, true>();
  } else {
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) fetcher.template fetch<true, true>();
  }
  if (p.triggers_late) let_next_kernel_start();

  u32 parity = 0, set = 0;  // set: of partial sums
  int slot = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    Outputs<BLOCKS, W> outputs{p, work};
    outputs.start(item);
    float sums[BLOCKS][TILES][4] = {};
    int last = slot;
#pragma unroll 1
    for (int j = 0; j < own; j++) {
      barrier_wait(barriers + 8 * slot, parity);
      const u32 at = base + warp * ring_bytes + slot * slot_bytes;
      const int columns = p.k - 128 * (part + j * p.parts);
      if (columns > 0) multiply_slot<F>(sums, at, at + BLOCKS * UNIT<F>, X_PITCH, p.x_rows, lane);
      __syncwarp();  // all lanes have read the slot
      if (p.buffers || j + 1 < own) fetcher.template fetch<true, true>();
      last = slot;
      if (++slot == p.stages) slot = 0, parity ^= 1;
    }
    const u32 first = p.buffers ? rings_bytes + set * WARPS * partial_bytes : last * slot_bytes;
    const u32 pitch = p.buffers ? partial_bytes : ring_bytes;  // from a warp's partial sums to the next warp's
    outputs.pitch = pitch / 4, outputs.partials = reinterpret_cast<const float*>(memory + first);
    float* const own_partial = reinterpret_cast<float*>(memory + first + warp * pitch);
    if (p.buffers == 2) set ^= 1;
    if (p.buffers == 1 && item != blockIdx.x) __syncthreads();  // all threads have read the previous item's sums
    store_partial(own_partial, sums, p.x_rows, lane);
    __syncthreads();
    outputs.finish();
    if (!p.buffers && item + gridDim.x < items) {
      fence_shared_writes();
      __syncthreads();
      fetcher.template fetch<true, true>();
    }
  }
}

// Writes a matrix as rows of bf16; a warp has a unit. Of a gated matrix, `gate_group` rows of gate and of up alternate.
template <class F>
__global__ void unpack(const u8* codes, const float* row_scales, const i64* columns, bf16* out, int count, int units,
                       int n, int k, int gate_group, float factor) {
  __shared__ __align__(16) u8 memory[8][UNIT<F>];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * 8 + warp;
  if (index >= count) return;
  const uint4* from = reinterpret_cast<const uint4*>(codes + i64(index) * UNIT<F>);
  for (int i = lane; i < UNIT<F> / 16; i += 32) reinterpret_cast<uint4*>(memory[warp])[i] = from[i];
  __syncwarp();
  const int block = index / 4 / units * 4 + index % 4, first_column = index / 4 % units * 128;
  const u32 at = shared_address(memory[warp]);
  F format;
  format.load(at + CODE_BYTES, lane);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = block * 16 + half * 8 + lane / 4;  // of the rows in order, and then of those that are written
    if (gate_group) row = half * (n / 2) + block * 8 + lane / 4;
    if (block * 16 >= n) continue;
    const float scale = row_scales ? factor * row_scales[row] : factor;
    if (gate_group) {
      const int pair = block * 8 + lane / 4;
      row = (2 * (pair / gate_group) + half) * gate_group + pair % gate_group;
    }
#pragma unroll
    for (int s = 0; s < 8; s++) {
      const u32 word = reinterpret_cast<const u32*>(memory[warp])[s / 4 * 128 + 4 * lane + s % 4];
      const int group = s * F::GROUP_COUNT / 8;
      u32 a[4];
      format.decode(a, word, group);
      float own = scale;
      if constexpr (F::SCALES_SUMS) own *= format.scale(half, group);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = first_column + 16 * s + 8 * i + 2 * (lane % 4);
        if (column >= k) continue;
        const u32 pair = pack(low(a[2 * i + half]) * own, high(a[2 * i + half]) * own);
        bf16* to = out + i64(row) * k;
        if (columns) to[columns[column]] = bf16{u16(pair)}, to[columns[column + 1]] = bf16{u16(pair >> 16)};
        else *reinterpret_cast<u32*>(to + column) = pair;
      }
    }
  }
}
