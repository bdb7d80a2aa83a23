// Selects the experts of rows and sorts the rows by expert into tiles, in two kernels: `routing.SortedRows` describes the
// result. The order of an expert's rows is arbitrary, which does not affect the results of grouped products.
#include "common.cuh"
#include "expert_tiles.cuh"

// Selects the experts of a block of rows. Writes their weights and numbers, the rank of each assignment among those of
// the block and its expert, and how many assignments of the block each expert has: counts[blocks, 32 PER_LANE].
template <int PER_LANE>
__global__ void __launch_bounds__(256) select_rows(const float* logits, const float* correction, int rows, int experts,
                                                   int top, int sigmoid, int renormalize, float scale,
                                                   int rows_per_block, float* weights, int* chosen, int* ranks,
                                                   int* counts) {
  constexpr int EXPERTS = 32 * PER_LANE;
  __shared__ int shared_counts[EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < EXPERTS; i += blockDim.x) shared_counts[i] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const SelectionRules rules{logits, correction, rows, experts, top, sigmoid, renormalize, scale};
  const int begin = blockIdx.x * rows_per_block, end = min(rows, begin + rows_per_block);
#pragma unroll 1
  for (int row = begin + warp; row < end; row += 8) {
    const Selected found = select_experts<PER_LANE>(rules, row, lane);
    if (lane < top) {
      const i64 at = i64(row) * top + lane;
      weights[at] = found.weight;
      chosen[at] = found.expert;
      ranks[at] = atomicAdd(&shared_counts[found.expert], 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < EXPERTS; i += blockDim.x) counts[blockIdx.x * EXPERTS + i] = shared_counts[i];
}

// Writes the assignments of a block of rows to their places, and describes the tiles of some experts.
template <int PER_LANE>
__global__ void __launch_bounds__(1024) place_rows(const int* chosen, const int* ranks, const int* counts, int rows,
                                                   int top, int rows_per_block, int tile_rows, int grain,
                                                   int* order,
                                                   int* places_out, int* tile_experts, int* tile_counts,
                                                   int* num_tiles) {
  constexpr int EXPERTS = 32 * PER_LANE, GROUPS = 1024 / EXPERTS;  // of threads, which share the blocks
  __shared__ int totals[EXPERTS], places[EXPERTS], first_tiles[EXPERTS], sizes[EXPERTS];  // sizes: rows of full tiles
  const int thread = threadIdx.x, expert = thread % EXPERTS, lane = thread % 32;
  if (thread < EXPERTS) totals[thread] = places[thread] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  int total = 0, before = 0;
#pragma unroll 8
  for (int block = thread / EXPERTS; block < int(gridDim.x); block += GROUPS) {
    const int count = load_int(counts + block * EXPERTS + expert);
    total += count;
    if (block < int(blockIdx.x)) before += count;
  }
  if (total) atomicAdd(&totals[expert], total);
  if (before) atomicAdd(&places[expert], before);
  __syncthreads();
  if (thread < 32) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) own += (totals[lane * PER_LANE + i] + tile_rows - 1) / tile_rows;
    const int end = sum_up_to_lane(own, lane);
    int tile = end - own;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int total = totals[lane * PER_LANE + i], count = (total + tile_rows - 1) / tile_rows;
      first_tiles[lane * PER_LANE + i] = tile;
      // Several tiles of an expert have about as many rows each, because small ones take almost as long.
      const int even = (total + max(count, 1) - 1) / max(count, 1);
      sizes[lane * PER_LANE + i] = min(tile_rows, max(1, (even + grain - 1) / grain * grain));
      tile += count;
    }
    if (lane == 31 && blockIdx.x == 0) *num_tiles = end;
  }
  __syncthreads();
  const int begin = blockIdx.x * rows_per_block * top, end = min(rows, int(blockIdx.x + 1) * rows_per_block) * top;
#pragma unroll 1
  for (int i = begin + thread; i < end; i += 1024) {
    const int number = load_int(chosen + i);
    const int rank = places[number] + load_int(ranks + i), tile = rank / sizes[number];
    const int place = (first_tiles[number] + tile) * tile_rows + rank - tile * sizes[number];
    order[place] = i;
    places_out[i] = place;
  }
  // The tiles of experts b, b + blocks, .. are described by block b, each expert by a warp.
#pragma unroll 1
  for (int number = blockIdx.x + thread / 32 * gridDim.x; number < EXPERTS; number += 32 * gridDim.x)
#pragma unroll 1
    for (int tile = lane; tile * tile_rows < totals[number]; tile += 32) {
      tile_experts[first_tiles[number] + tile] = number;
      tile_counts[first_tiles[number] + tile] = max(0, min(sizes[number], totals[number] - tile * sizes[number]));
    }
}

// Copies each row of x, of `chunks` times 16 bytes, to its places.
__global__ void __launch_bounds__(256) sort_rows(const uint4* x, const int* places, int top, int chunks, uint4* out) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 row = blockIdx.x;
#pragma unroll 1
  for (int i = threadIdx.x; i < chunks; i += 256) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x + row * chunks + i) : "memory");
#pragma unroll 4
    for (int rank = 0; rank < top; rank++) out[i64(load_int(places + row * top + rank)) * chunks + i] = v;
  }
}
