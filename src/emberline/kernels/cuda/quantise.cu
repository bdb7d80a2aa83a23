// Quantises rows of bf16 to float8 (e4m3), with a scale for each row or for each 128 columns, after an optional RMS norm.
//
// A CTA has one row. A thread has 16 adjacent columns of each of CHUNKS parts of the row, and stores their codes in the
// order of fp8.cuh. The number of threads depends on k only, and so does the order of sums.
//
// The kernel computes little, and the next product waits for it. So whatever does not depend on the preceding kernel is
// done before the wait: the norm's weight, which the L2 rarely holds, is then in registers already.
#include "common.cuh"

constexpr int MAX_THREADS = 512, MAX_WARPS = MAX_THREADS / 32;
constexpr float MAX_CODE = 448.f, MIN_SCALE = 0x1p-100f;

// Loads past L1. With PDL this CTA started early, and L1 may hold data from before the preceding kernel's writes.
DEVICE uint4 load_past_l1(const bf16* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
DEVICE void unpack_8(float* to, uint4 v) {
  to[0] = low(v.x), to[1] = high(v.x), to[2] = low(v.y), to[3] = high(v.y);
  to[4] = low(v.z), to[5] = high(v.z), to[6] = low(v.w), to[7] = high(v.w);
}
DEVICE float round_to_bf16(float x) { return to_float(to_bf16(x)); }

// Combines a value of all threads of the CTA. Words of `memory` of warps that the CTA does not have must be zero, which
// changes neither a sum nor the largest of absolute values.
template <class F> DEVICE float reduce(float value, float4 (&memory)[MAX_WARPS / 4], F combine) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    value = combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(memory)[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_WARPS / 4; i++) {
    const float4 more = memory[i];
    value = combine(combine(combine(combine(value, more.x), more.y), more.z), more.w);
  }
  return value;
}

DEVICE u32 to_codes(float k0, float k8, float k1, float k9) {
  u16 first, second;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(first) : "f"(k8), "f"(k0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(second) : "f"(k9), "f"(k1));
  return first | u32(second) << 16;
}

// Returns elements i .. i + 3 of the 16 at this column, or zeros beyond the row.
DEVICE float4 load_weight(const float* weight, int column, int i, int k) {
  return column < k ? *reinterpret_cast<const float4*>(weight + column + i) : float4{};
}

// `scales`: [rows], or if BLOCKS [k / 128][pitch].
template <int CHUNKS, bool NORM, bool BLOCKS>
__global__ void __launch_bounds__(MAX_THREADS)
    quantise_rows(const bf16* x, int stride, const float* weight, float eps, u8* codes, float* scales, int pitch, int k) {
  constexpr bool LOADS_EARLY = NORM && CHUNKS <= 2;  // of longer rows, registers do not suffice
  __shared__ float4 memory[2][MAX_WARPS / 4];
  let_next_kernel_start();
  const auto column_of = [](int c) { return 16 * int(c * blockDim.x + threadIdx.x); };
  float4 early[CHUNKS][4];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (LOADS_EARLY) early[c][i] = load_weight(weight, column_of(c), 4 * i, k);
  if (threadIdx.x < 2 * MAX_WARPS) reinterpret_cast<float*>(memory)[threadIdx.x] = 0.f;
  __syncthreads();
  wait_for_previous_kernel();
  const i64 row = blockIdx.x;
  const bf16* const from = x + row * stride;
  float v[CHUNKS][16];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int column = column_of(c);
    uint4 half[2] = {};
    if (column < k) half[0] = load_past_l1(from + column), half[1] = load_past_l1(from + column + 8);
    unpack_8(v[c], half[0]), unpack_8(v[c] + 8, half[1]);
  }
  if (NORM) {
    float squares = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < 16; i++) squares += v[c][i] * v[c][i];
    squares = reduce(squares, memory[0], [](float a, float b) { return a + b; });
    const float factor = rsqrtf(squares / k + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float* const four = v[c] + 4 * i;
        const float4 w = LOADS_EARLY ? early[c][i] : load_weight(weight, column_of(c), 4 * i, k);
        four[0] = round_to_bf16(round_to_bf16(four[0] * factor) * w.x);
        four[1] = round_to_bf16(round_to_bf16(four[1] * factor) * w.y);
        four[2] = round_to_bf16(round_to_bf16(four[2] * factor) * w.z);
        four[3] = round_to_bf16(round_to_bf16(four[3] * factor) * w.w);
      }
  }
  float largest[CHUNKS], of_row = 0.f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    largest[c] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) largest[c] = fmaxf(largest[c], fabsf(v[c][i]));
    of_row = fmaxf(of_row, largest[c]);
  }
  if (!BLOCKS) of_row = reduce(of_row, memory[1], [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int column = column_of(c);
    float size = of_row;
    if (BLOCKS) {
      size = largest[c];
#pragma unroll
      for (int distance = 4; distance; distance /= 2) size = fmaxf(size, __shfl_xor_sync(ALL_LANES, size, distance));
    }
    const float scale = fmaxf(size / MAX_CODE, MIN_SCALE), inverse = 1.f / scale;
    if (column >= k) continue;
    if (BLOCKS && column % 128 == 0) scales[i64(column / 128) * pitch + row] = scale;
    if (!BLOCKS && column == 0) scales[row] = scale;
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
      words[t] = to_codes(v[c][2 * t] * inverse, v[c][2 * t + 8] * inverse, v[c][2 * t + 1] * inverse,
                          v[c][2 * t + 9] * inverse);
    *reinterpret_cast<uint4*>(codes + row * k + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
