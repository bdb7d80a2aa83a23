// Memory that several GPUs or processes access: ordered loads and stores, the clock, elements. Include after common.cuh.
//
// This file has all inline assembly of collectives.cu, so that tests can replace it and run the rest on a CPU.
#pragma once

// -- order -----------------------------------------------------------------------------------------------------------

// What was written before a release, also by other threads of the CTA before a barrier, is visible after an acquire that
// reads the released value.
DEVICE void store_release(u64* at, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
DEVICE u64 load_acquire(const u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
DEVICE void store_relaxed(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
DEVICE u64 load_relaxed(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// -- elements --------------------------------------------------------------------------------------------------------

struct alignas(2) f16 { u16 bits; };

DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE float to_float(float x) { return x; }
DEVICE void round_to(bf16& to, float x) { to = to_bf16(x); }
DEVICE void round_to(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
DEVICE void round_to(float& to, float x) { to = x; }

// These loads bypass L1, which may hold what was there before: with programmatic dependent launch, from the preceding kernel.
DEVICE uint4 load_unit(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
// A volatile load has the order of a relaxed one.
DEVICE u32 load_unit(const u32* at) { return *static_cast<const volatile u32*>(at); }
DEVICE u16 load_unit(const u16* at) { return *static_cast<const volatile u16*>(at); }
DEVICE u8 load_unit(const u8* at) { return *static_cast<const volatile u8*>(at); }
DEVICE bf16 load_unit(const bf16* at) { return bf16{load_unit(&at->bits)}; }
DEVICE f16 load_unit(const f16* at) { return f16{load_unit(&at->bits)}; }
DEVICE float load_unit(const float* at) { return *static_cast<const volatile float*>(at); }

// -- approximations that Triton's norm uses ----------------------------------------------------------------------------

DEVICE float divide_fast(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
DEVICE float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
