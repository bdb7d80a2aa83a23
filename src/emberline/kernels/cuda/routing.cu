// Selects the experts of rows and sorts the rows by expert into tiles: `routing.SortedRows` describes the result. Few rows
// take one kernel, more take two. The order of an expert's rows is arbitrary, which does not affect the results of grouped products.
#include "common.cuh"
#include "expert_tiles.cuh"

// Synchronises all threads of the cluster; their writes to shared memory are visible afterwards.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the tiles of each expert are, in shared memory.
template <int PER_LANE> struct TileTable {
  static constexpr int EXPERTS = 32 * PER_LANE;
  int totals[EXPERTS], before[EXPERTS];  // assignments of each expert: all, and those of preceding blocks
  int first_tiles[EXPERTS], sizes[EXPERTS];  // sizes: rows of full tiles

  // Called by a warp when the totals are complete. Returns the number of tiles in the last lane.
  DEVICE int number_tiles(int tile_rows, int grain, int lane) {
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
    return end;
  }
  // Returns the place of an expert's assignment, by its rank among those of its block.
  DEVICE int place(int expert, int rank, int tile_rows) const {
    rank += before[expert];
    const int tile = rank / sizes[expert];
    return (first_tiles[expert] + tile) * tile_rows + rank - tile * sizes[expert];
  }
  // Describes the tiles of experts b, b + blocks, .., each expert by a warp.
  DEVICE void describe_tiles(int* tile_experts, int* tile_counts, int tile_rows, int block, int blocks, int warp,
                             int lane) const {
#pragma unroll 1
    for (int number = block + warp * blocks; number < EXPERTS; number += 32 * blocks)
#pragma unroll 1
      for (int tile = lane; tile * tile_rows < totals[number]; tile += 32) {
        tile_experts[first_tiles[number] + tile] = number;
        tile_counts[first_tiles[number] + tile] = max(0, min(sizes[number], totals[number] - tile * sizes[number]));
      }
  }
};

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
  __shared__ TileTable<PER_LANE> tiles;
  const int thread = threadIdx.x, expert = thread % EXPERTS, lane = thread % 32;
  if (thread < EXPERTS) tiles.totals[thread] = tiles.before[thread] = 0;
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
  if (total) atomicAdd(&tiles.totals[expert], total);
  if (before) atomicAdd(&tiles.before[expert], before);
  __syncthreads();
  if (thread < 32) {
    const int end = tiles.number_tiles(tile_rows, grain, lane);
    if (lane == 31 && blockIdx.x == 0) *num_tiles = end;
  }
  __syncthreads();
  const int begin = blockIdx.x * rows_per_block * top, end = min(rows, int(blockIdx.x + 1) * rows_per_block) * top;
#pragma unroll 1
  for (int i = begin + thread; i < end; i += 1024) {
    const int place = tiles.place(load_int(chosen + i), load_int(ranks + i), tile_rows);
    order[place] = i;
    places_out[i] = place;
  }
  tiles.describe_tiles(tile_experts, tile_counts, tile_rows, blockIdx.x, gridDim.x, thread / 32, lane);
}

// Both of the above for up to CLUSTER * MAX_CLUSTER_ASSIGNMENTS assignments: the CTAs of one cluster exchange the counts of
// their rows through shared memory.
constexpr int CLUSTER = 8, MAX_CLUSTER_ASSIGNMENTS = 1024;
template <int PER_LANE>
__global__ void __launch_bounds__(1024)
    route_rows(const float* logits, const float* correction, int rows, int experts, int top, int sigmoid,
               int renormalize, float scale, int tile_rows, int grain, float* weights, int* chosen, int* order,
               int* places_out, int* tile_experts, int* tile_counts, int* num_tiles) {
  constexpr int EXPERTS = 32 * PER_LANE;
  __shared__ TileTable<PER_LANE> tiles;
  __shared__ int counts[EXPERTS];
  __shared__ u16 own_experts[MAX_CLUSTER_ASSIGNMENTS], ranks[MAX_CLUSTER_ASSIGNMENTS];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, block = blockIdx.x;
  const int rows_per_block = (rows + CLUSTER - 1) / CLUSTER, begin = block * rows_per_block;
  const int count = max(0, min(rows, begin + rows_per_block) - begin);
  if (thread < EXPERTS) counts[thread] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const SelectionRules rules{logits, correction, rows, experts, top, sigmoid, renormalize, scale};
#pragma unroll 1
  for (int row = warp; row < count; row += 32) {
    const Selected found = select_experts<PER_LANE>(rules, begin + row, lane);
    if (lane < top) {
      const i64 at = i64(begin + row) * top + lane;
      weights[at] = found.weight, chosen[at] = found.expert;
      own_experts[row * top + lane] = found.expert, ranks[row * top + lane] = atomicAdd(&counts[found.expert], 1);
    }
    __syncwarp();
  }
  cluster_sync();
  if (thread < EXPERTS) {
    int total = 0, before = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
      int more;
      asm volatile("{ .reg .u32 far;\n mapa.shared::cluster.u32 far, %1, %2;\n ld.shared::cluster.s32 %0, [far]; }"
                   : "=r"(more) : "r"(shared_address(counts + thread)), "r"(other) : "memory");
      total += more;
      if (other < block) before += more;
    }
    tiles.totals[thread] = total, tiles.before[thread] = before;
  }
  cluster_sync();  // no CTA exits while others read its counts
  if (thread < 32) {
    const int end = tiles.number_tiles(tile_rows, grain, lane);
    if (lane == 31 && block == 0) *num_tiles = end;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < count * top; i += 1024) {
    const int place = tiles.place(own_experts[i], ranks[i], tile_rows);
    order[place] = begin * top + i;
    places_out[begin * top + i] = place;
  }
  tiles.describe_tiles(tile_experts, tile_counts, tile_rows, block, CLUSTER, warp, lane);
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
