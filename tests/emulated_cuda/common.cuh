// What kernels need to run on a CPU: each thread of a CTA is a thread of the operating system. Replaces common.cuh.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct bf16 { u16 bits; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return uint4{x, y, z, w}; }
constexpr u32 ALL_LANES = 0xffffffffu;

inline float as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 as_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float to_float(bf16 x) { return as_float(u32(x.bits) << 16); }
inline bf16 to_bf16(float x) {
  const u32 bits = as_bits(x);
  return bf16{u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

struct Dim { u32 x; };
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

struct Barrier {
  pthread_barrier_t barrier;
  explicit Barrier(int threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
};
struct Cta {
  Barrier all;
  std::vector<std::unique_ptr<Barrier>> warps;
  std::vector<int> votes;
  std::vector<float> lanes;
  alignas(16) u8 shared[4096] = {};
  explicit Cta(int threads) : all(threads), votes(threads), lanes(threads) {
    for (int first = 0; first < threads; first += 32)
      warps.push_back(std::make_unique<Barrier>(min(32, threads - first)));
  }
};
inline thread_local Cta* current_cta;

inline void __syncthreads() { current_cta->all.wait(); }
inline int __syncthreads_and(int vote) {
  current_cta->votes[threadIdx.x] = vote;
  __syncthreads();
  int result = 1;
  for (int each : current_cta->votes) result &= each;
  __syncthreads();
  return result;
}
inline float __shfl_xor_sync(u32, float value, int distance) {
  Barrier& warp = *current_cta->warps[threadIdx.x / 32];
  current_cta->lanes[threadIdx.x] = value;
  warp.wait();
  const float other = current_cta->lanes[threadIdx.x ^ distance];
  warp.wait();
  return other;
}
// A kernel's shared memory. Tests replace declarations with __shared__ by it.
template <class T> inline T& shared_memory() { return *reinterpret_cast<T*>(current_cta->shared); }

// Runs a kernel and waits for its end.
inline void launch(int blocks, int threads, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::thread> running;
  for (int block = 0; block < blocks; block++) ctas.push_back(std::make_unique<Cta>(threads));
  for (int block = 0; block < blocks; block++)
    for (int thread = 0; thread < threads; thread++)
      running.emplace_back([&, block, thread] {
        threadIdx = {u32(thread)}, blockIdx = {u32(block)}, blockDim = {u32(threads)}, gridDim = {u32(blocks)};
        current_cta = ctas[block].get();
        kernel();
      });
  for (std::thread& each : running) each.join();
}
