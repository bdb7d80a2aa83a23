// The RMS norm of rows and the logits of a router for them, in one kernel.
//
// A CTA has 16 rows and 16 experts. It reads the weights before the preceding kernel ends, then norms its rows into shared
// memory. Warp i multiplies k from i k / WARPS on, and sums are added over the warps in order, so a row's logits do not
// depend on the other rows.
//
// Fragments. The order of k in a product is arbitrary if both operands have the same: lane t of four has 8 adjacent k of
// 32, which are one load, as k 2t, 2t + 1, 2t + 8, 2t + 9 of two mma steps.
#include "common.cuh"

constexpr int ROWS = 16, EXPERTS = 16, WARPS = 16;  // each warp norms a row

DEVICE uint4 load_past_l1(const bf16* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
DEVICE u32 norm_pair(u32 pair, float factor, float2 scale) {
  const u32 unit = pack(low(pair) * factor, high(pair) * factor);
  return pack(low(unit) * scale.x, high(unit) * scale.y);
}

// `normed`: bf16 [rows, columns], written by the CTAs of the first experts. logits: float32 [rows, experts]. CHUNKS: of 32
// k, of a warp. Shared memory: the normed rows, each with 16 bytes more to avoid bank conflicts, and the scales.
template <int CHUNKS>
__global__ void __launch_bounds__(32 * WARPS, 1)
    norm_and_score(const bf16* x, int x_stride, const float* scale, float eps, const bf16* weight, const float* bias,
                   int rows, int experts, bf16* normed, float* logits) {
  constexpr int K = 32 * CHUNKS * WARPS, PITCH = 2 * K + 16, PARTS = K / 256;  // parts: of 8 k for each lane
  extern __shared__ __align__(16) u8 memory[];
  float* const scales = reinterpret_cast<float*>(memory + ROWS * PITCH);
  __shared__ float sums[WARPS][ROWS * EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, first = 32 * CHUNKS * warp + 8 * (lane % 4);
  const int expert = EXPERTS * blockIdx.y;
  let_next_kernel_start();
  uint4 b[CHUNKS][2];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own = expert + 8 * half + group;
      b[i][half] = make_uint4(0, 0, 0, 0);
      if (own < experts) b[i][half] = *reinterpret_cast<const uint4*>(weight + i64(own) * K + first + 32 * i);
    }
  for (int i = threadIdx.x; i < K; i += 32 * WARPS) scales[i] = scale[i];
  __syncthreads();
  wait_for_previous_kernel();
  const int normed_row = ROWS * blockIdx.x + warp;
  if (normed_row < rows) {
    uint4 values[PARTS];
    float size = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) values[i] = load_past_l1(x + i64(normed_row) * x_stride + 256 * i + 8 * lane);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) size += low(pairs[j]) * low(pairs[j]) + high(pairs[j]) * high(pairs[j]);
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) size += __shfl_xor_sync(ALL_LANES, size, distance);
    const float factor = rsqrtf(size / K + eps);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int column = 256 * i + 8 * lane;
      const float2* const factors = reinterpret_cast<const float2*>(scales + column);
      const uint4 result = make_uint4(norm_pair(values[i].x, factor, factors[0]), norm_pair(values[i].y, factor, factors[1]),
                                      norm_pair(values[i].z, factor, factors[2]), norm_pair(values[i].w, factor, factors[3]));
      *reinterpret_cast<uint4*>(memory + warp * PITCH + 2 * column) = result;
      if (blockIdx.y == 0) *reinterpret_cast<uint4*>(normed + i64(normed_row) * K + column) = result;
    }
  }
  __syncthreads();
  float c[2][4] = {};
  const u32 at = shared_address(memory) + group * PITCH + 2 * first;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const uint4 upper = load_shared_16(at + 64 * i), lower = load_shared_16(at + 8 * PITCH + 64 * i);
    const u32 a0[4] = {upper.x, lower.x, upper.y, lower.y}, a1[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      multiply(c[half], a0, b[i][half].x, b[i][half].y);
      multiply(c[half], a1, b[i][half].z, b[i][half].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    sums[warp][(group + i % 4 / 2 * 8) * EXPERTS + i / 4 * 8 + lane % 4 * 2 + i % 2] = c[i / 4][i % 4];
  __syncthreads();
  const int row = ROWS * blockIdx.x + threadIdx.x / EXPERTS, own = expert + threadIdx.x % EXPERTS;
  if (threadIdx.x >= ROWS * EXPERTS || row >= rows || own >= experts) return;
  float total = sums[0][threadIdx.x];
#pragma unroll
  for (int i = 1; i < WARPS; i++) total += sums[i][threadIdx.x];
  logits[i64(row) * experts + own] = total + (bias ? bias[own] : 0.f);
}
