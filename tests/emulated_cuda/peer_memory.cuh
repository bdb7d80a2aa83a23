// The order of memory accesses on a CPU. Replaces peer_memory.cuh. Loads of data are not atomic: a race detector finds
// those that no flag orders.
#pragma once

inline void store_release(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline u64 load_acquire(const u64* at) {
  sched_yield();
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void store_relaxed(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline u64 load_relaxed(const u64* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000ull + now.tv_nsec;
}

struct f16 { u16 bits; };  // rounded as a bf16: not all compilers know the format
inline float to_float(f16 x) { return to_float(bf16{x.bits}); }
inline float to_float(float x) { return x; }
inline void round_to(bf16& to, float x) { to = to_bf16(x); }
inline void round_to(f16& to, float x) { to = f16{to_bf16(x).bits}; }
inline void round_to(float& to, float x) { to = x; }

template <class T> inline T load_unit(const T* at) { return *at; }

inline float divide_fast(float a, float b) { return a / b; }
inline float rsqrt_fast(float x) { return 1 / sqrtf(x); }
