// Several products with 4-bit matrices, one after the other, for a few rows of x: what a decoder layer computes from the
// output of attention to the queries, keys and values of the next layer. One kernel computes all of them, so that the
// codes of a product are fetched while the product before it ends.
//
// Products. Every CTA computes some groups of 32 rows of w, whichever the product is: group g belongs to CTA g % gridDim.
// Warp i has the units i, i + WARPS, .. of 128 k. The codes of all its steps pass through one ring of slots that only it
// fills and reads; what it fetches is known before the kernel before it ends, and is listed in shared memory first. The rows
// of x are in shared memory too, as they are or normed.
//
// Barriers. Before a product reads what another one has written, all CTAs must have finished that one. So all CTAs must run
// at the same time: there is one for each SM, and no other kernel may run that waits in this way (`get_arrivals` in chain.py).
//
// Order of sums. An output is the sum over warps, in a fixed order of pairs, of each warp's sum of its even units and of
// its odd ones. It does not depend on other rows.
#include "common.cuh"
#include "narrow.cuh"
#include "narrow_slots.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, BLOCKS = 2, GROUP_ROWS = 16 * BLOCKS, MAX_ROWS = 2, MAX_PRODUCTS = 4;
constexpr int STEP_UNITS = 2;             // of a warp, in a step
constexpr int MAX_CHUNKS = 2;             // of a thread, of the columns that are normed
constexpr int SUM_PITCH = GROUP_ROWS + 4; // floats from a row's sums to the next row's
constexpr int MAX_REGISTERS = 112;        // leaves some for the next kernel, which may be a small one that can start and wait
constexpr u32 MAX_POLLS = 1u << 22;       // of a barrier: about two seconds

struct Product {
  const u8* codes;
  const bf16* x;
  const float *norm, *row_scales, *bias;  // norm: weight of the RMS norm of x; any may be null
  bf16* out;
  const bf16* residual;
  int n, units, gated;
  float factor, eps;
  DEVICE int k() const { return 128 * units; }
  DEVICE int groups() const { return n / GROUP_ROWS; }
  DEVICE int steps() const { return (units + STEP_UNITS * WARPS - 1) / (STEP_UNITS * WARPS); }  // of a warp, for a group
};
struct Chain {
  Product products[MAX_PRODUCTS];
  u32* arrivals;  // zero between launches
  int count, rows, stages;
  int x_bytes, max_steps;  // of the rows of x in shared memory; of a warp
};
static_assert(sizeof(Chain) == 352, "as in chain.py");

// -- barriers of all CTAs ---------------------------------------------------------------------------------------------

// Called when all threads of the CTA have written their outputs.
DEVICE void arrive_at_all(const Chain& p) {
  __syncthreads();
  if (threadIdx.x == 0) atomic_add_acq_rel(p.arrivals, 1);
}
DEVICE void wait_for_all(const Chain& p, int product) {
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (u32 polls = 0; load_acquire(p.arrivals) < product * gridDim.x; polls++)
      if (polls > MAX_POLLS) __trap();
  }
  __syncthreads();
}

// -- copies -----------------------------------------------------------------------------------------------------------

// What a warp does next: the codes of a group of rows of w for a unit of k, and for the warp's next unit. Less if these are
// beyond k.
struct alignas(16) Step {
  const u8* codes;
  u32 units;
};
template <class F> constexpr u32 UNIT_BYTES = BLOCKS * UNIT<F>;  // of a group's codes for a unit of k

// Lists the steps of a warp in order, and returns how many there are.
template <class F> DEVICE int list_steps(const Chain& p, Step* steps, int warp, int lane) {
  int count = 0;
#pragma unroll 1
  for (int i = 0; i < p.count; i++) {
    const Product& product = p.products[i];
    const int own_groups = (product.groups() - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    const int per_group = product.steps();
    for (int at = lane; at < own_groups * per_group; at += 32) {
      const int group = blockIdx.x + at / per_group * gridDim.x, unit = warp + STEP_UNITS * WARPS * (at % per_group);
      const u8* const codes = product.codes + block_offset<F>(BLOCKS * group, product.units) + i64(unit) * CELL<F>;
      steps[count + at] = Step{codes, u32(unit < product.units) + u32(unit + WARPS < product.units)};
    }
    count += own_groups * per_group;
  }
  __syncwarp();
  return count;
}

// A warp's ring of slots. Step s is in slot s % stages.
template <class F> struct Ring {
  static constexpr u32 SLOT = STEP_UNITS * UNIT_BYTES<F>;
  const Chain& p;
  const Step* steps;
  u32 slots, barriers;
  int count, next, slot;  // of the step that is fetched next
  u64 evict_first;
  // Called by one lane.
  DEVICE void fetch() {
    if (next == count) return;
    const Step step = steps[next++];
    const u32 to = slots + slot * SLOT, barrier = barriers + 8 * slot;
    barrier_expect_bytes(barrier, step.units * UNIT_BYTES<F>);
    if (step.units > 0) copy_bytes(to, step.codes, UNIT_BYTES<F>, barrier, evict_first);
    if (step.units > 1) copy_bytes(to + UNIT_BYTES<F>, step.codes + WARPS * CELL<F>, UNIT_BYTES<F>, barrier, evict_first);
    if (++slot == p.stages) slot = 0;
  }
};

// -- rows of x --------------------------------------------------------------------------------------------------------

DEVICE uint4 load_l2_16(const bf16* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
DEVICE float square_pair(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
DEVICE u32 norm_pair(u32 pair, float scale, float first, float second) {
  const u32 rounded = pack(low(pair) * scale, high(pair) * scale);
  return pack(low(rounded) * first, high(rounded) * second);
}

// Copies all rows of x into shared memory.
DEVICE void copy_rows(const Chain& p, const Product& product, uint4* to, u32 pitch) {
  const int chunks = product.k() / 8;
#pragma unroll 1
  for (int row = 0; row < p.rows; row++)
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks; i += THREADS)
      to[row * (pitch / 16) + i] = load_l2_16(product.x + i64(row) * product.k() + 8 * i);
  __syncthreads();
}

// Eight columns at a time of the rows of x that are normed. A thread has the same columns of all rows.
struct Norm {
  float4 weights[MAX_CHUNKS][2];
  // Loads the weights, which no product changes.
  DEVICE void load_weights(const Product& product) {
    if (!product.norm) return;
#pragma unroll
    for (int i = 0; i < MAX_CHUNKS; i++) {
      const int chunk = threadIdx.x + THREADS * i;
      if (8 * chunk >= product.k()) continue;
      weights[i][0] = reinterpret_cast<const float4*>(product.norm)[2 * chunk];
      weights[i][1] = reinterpret_cast<const float4*>(product.norm)[2 * chunk + 1];
    }
  }
  // Norms all rows of x into shared memory. `squares`: [MAX_ROWS][WARPS].
  DEVICE void run(const Chain& p, const Product& product, uint4* to, u32 pitch, float* squares) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = product.k() / 8;
#pragma unroll 1
    for (int row = 0; row < p.rows; row++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < MAX_CHUNKS; i++) {
        const int chunk = threadIdx.x + THREADS * i;
        if (chunk >= chunks) continue;
        const uint4 v = load_l2_16(product.x + i64(row) * product.k() + 8 * chunk);
        sum += square_pair(v.x) + square_pair(v.y) + square_pair(v.z) + square_pair(v.w);
        to[row * (pitch / 16) + chunk] = v;
      }
#pragma unroll
      for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
      if (lane == 0) squares[row * WARPS + warp] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < p.rows; row++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += squares[row * WARPS + i];
      const float scale = rsqrtf(sum / product.k() + product.eps);
#pragma unroll
      for (int i = 0; i < MAX_CHUNKS; i++) {
        const int chunk = threadIdx.x + THREADS * i;
        if (chunk >= chunks) continue;
        uint4& v = to[row * (pitch / 16) + chunk];
        const float4 first = weights[i][0], second = weights[i][1];
        v = make_uint4(norm_pair(v.x, scale, first.x, first.y), norm_pair(v.y, scale, first.z, first.w),
                       norm_pair(v.z, scale, second.x, second.y), norm_pair(v.w, scale, second.z, second.w));
      }
    }
    __syncthreads();
  }
};

// -- outputs ----------------------------------------------------------------------------------------------------------

// A warp's pair of a group's rows of w: two outputs, or a gate and its up. Half of the lanes have the one row, half the
// other; what finishes the outputs is loaded before their sums are computed.
struct Outputs {
  const Chain& p;
  const Product& product;
  int lane, local, column, width;
  float scale, bias;
  u32 before;  // of row `lane`: what is added to both outputs
  DEVICE Outputs(const Chain& chain, const Product& own, int group, int warp, int lane_) : p(chain), product(own), lane(lane_) {
    const int half = lane / 16;
    width = product.gated ? product.n / 2 : product.n;
    local = product.gated ? warp / 8 * 16 + warp % 8 + 8 * half : 2 * warp + half;  // blocks have 8 gates, then their ups
    column = product.gated ? GROUP_ROWS / 2 * group + warp : GROUP_ROWS * group + 2 * warp;
    scale = product.factor;
    if (product.row_scales) scale *= product.row_scales[column + (product.gated ? half * width : half)];
    bias = product.bias && !product.gated ? product.bias[column + half] : 0.f;
    before = 0;
    if (product.residual && lane < p.rows) before = *reinterpret_cast<const u32*>(product.residual + i64(lane) * width + column);
  }
  // Adds the sums of all warps, each half of the lanes those of its row of w, and stores the outputs.
  DEVICE void finish(const float* sums) const {
#pragma unroll 1
    for (int row = 0; row < p.rows; row++) {
      float sum = sums[(lane % 16 * p.rows + row) * SUM_PITCH + local];
#pragma unroll
      for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
      sum = __fmaf_rn(sum, scale, bias);
      const float other = __shfl_xor_sync(ALL_LANES, sum, 16);
      const u32 added = __shfl_sync(ALL_LANES, before, row);
      if (lane) continue;
      bf16* const out = product.out + i64(row) * width + column;
      if (product.gated) *out = to_bf16(sum / (1.f + __expf(-sum)) * other);
      else *reinterpret_cast<u32*>(out) = pack(sum + low(added), other + high(added));
    }
  }
};

// Shared memory: the rings of the warps, the rows of x, two sets of the warps' sums, the squares, the lists of steps, the
// barriers.
template <class F> __global__ void __maxnreg__(MAX_REGISTERS) chain(const __grid_constant__ Chain p) {
  extern __shared__ __align__(16) u8 memory[];
  constexpr u32 SLOT = Ring<F>::SLOT;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 base = shared_address(memory), rings_bytes = WARPS * p.stages * SLOT, sum_floats = p.rows * SUM_PITCH;
  uint4* const x = reinterpret_cast<uint4*>(memory + rings_bytes);
  float* const sums = reinterpret_cast<float*>(memory + rings_bytes + p.x_bytes);
  float* const squares = sums + 2 * WARPS * sum_floats;
  Step* const steps = reinterpret_cast<Step*>(squares + MAX_ROWS * WARPS) + warp * p.max_steps;
  const u32 barriers = shared_address(steps + (WARPS - warp) * p.max_steps) + 8 * warp * p.stages;
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) barrier_init(barriers + 8 * i, 1);
    fence_barrier_init();
  }
  const int count = list_steps<F>(p, steps, warp, lane);
  Ring<F> ring{p, steps, base + warp * p.stages * SLOT, barriers, count, 0, 0, l2_evict_first()};
  if (lane == 0)
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) ring.fetch();
  wait_for_previous_kernel();
  let_next_kernel_start();

  u32 parity = 0, set = 0;
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < p.count; i++) {
    const Product& product = p.products[i];
    const u32 pitch = 2 * product.k() + 16, own_x = shared_address(x) + 256 * warp;
    const int per_group = product.steps(), groups = product.groups(), units = product.units;
    Norm norm;
    norm.load_weights(product);
    if (i) wait_for_all(p, i);
    if (product.norm) norm.run(p, product, x, pitch, squares);
    else copy_rows(p, product, x, pitch);
#pragma unroll 1
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
      const Outputs outputs(p, product, group, warp, lane);
      float own[BLOCKS][1][4] = {}, odd[BLOCKS][1][4] = {};
#pragma unroll 1
      for (int j = 0; j < per_group; j++) {
        const int unit = warp + STEP_UNITS * WARPS * j;
        const u32 at = ring.slots + slot * SLOT, rows = own_x + 256 * STEP_UNITS * WARPS * j;
        barrier_wait(barriers + 8 * slot, parity);
        if (unit + WARPS < units) {  // the products of two units do not wait for each other
          multiply_slot<F>(own, at, rows, pitch, p.rows, lane);
          multiply_slot<F>(odd, at + UNIT_BYTES<F>, rows + 256 * WARPS, pitch, p.rows, lane);
        } else if (unit < units) {
          multiply_slot<F>(own, at, rows, pitch, p.rows, lane);
        }
        __syncwarp();  // all lanes have read the slot
        if (lane == 0) ring.fetch();
        if (++slot == p.stages) slot = 0, parity ^= 1;
      }
#pragma unroll
      for (int r = 0; r < BLOCKS; r++)
#pragma unroll
        for (int j = 0; j < 4; j++) own[r][0][j] += odd[r][0][j];
      float* const all = sums + set * WARPS * sum_floats;
      store_partial<BLOCKS, 1>(all + warp * sum_floats, own, p.rows, lane);
      __syncthreads();
      outputs.finish(all);
      set ^= 1;
    }
    if (i + 1 < p.count) arrive_at_all(p);
  }
  if (threadIdx.x == 0 && atomic_add_acq_rel(p.arrivals, 1) == p.count * gridDim.x - 1) *p.arrivals = 0;
}
