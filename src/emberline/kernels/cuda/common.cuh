// Shared by all kernels: types without system headers, TMA copies and their mbarriers, fragments and matrix products.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(2) bf16 { u16 bits; };
struct alignas(64) TensorMap { u64 opaque[16]; };

#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = 0xffffffffu;  // mask of all lanes of a warp

// -- bf16 ------------------------------------------------------------------------------------------------------------

DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE bf16 to_bf16(float x) { return bf16{u16(pack(x, 0.f))}; }

// x / (1 + exp(-x)), rounded as a division would. A division takes longer and compiles to a call, and setmaxnreg has no
// effect in a kernel with calls. Numerator and denominator are divided by 4, because the approximate reciprocal of more
// than 2^126 is 0.
DEVICE float silu(float x) {
  const float denominator = fminf(__fmaf_rn(expf(-x), .25f, .25f), 0x1.fffffep127f), numerator = x * .25f;
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(denominator));
  const float quotient = numerator * reciprocal;
  return __fmaf_rn(__fmaf_rn(-denominator, quotient, numerator), reciprocal, quotient);
}

// -- programmatic dependent launch
// -------------------------------------------------------------------------------------

// Before compute capability 9.0, a kernel always starts after the previous one has ended.
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}
#endif

// -- shared memory, mbarriers, TMA copies -----------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE bool barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
// A wait of more than about a second is a bug in a kernel: trap instead of hanging the device.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
  for (u32 tries = 0; !barrier_passed(barrier, parity); tries++)
    if (tries > (1u << 22)) __trap();
}

DEVICE u64 l2_evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 l2_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Copies contiguous bytes, a multiple of 16, to shared memory.
DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DEVICE void copy_tile(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy) : "memory");
}
DEVICE void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy) : "memory");
}
// Loads from L2, where partial results of other CTAs are: L1 is not coherent.
DEVICE float4 load_l2(const float4* at) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}

// Words by which CTAs tell each other that their results are stored.
DEVICE u32 atomic_add_acq_rel(u32* word, u32 more) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(more) : "memory");
  return before;
}
DEVICE u32 load_acquire(const u32* word) {
  u32 now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  return now;
}

// Makes ordinary stores to shared memory visible to the async proxy: wgmma and TMA copies.
DEVICE void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Byte offset of the 16-byte column `chunk` of `row` in a tile of 128-byte rows that TMA wrote with the 128-byte
// swizzle. The tile must be aligned to 1024 bytes.
DEVICE u32 swizzled_offset(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// -- fragments
// --------------------------------------------------------------------------------------------------------------

// Transposes among four lanes: x[i] of lane q becomes x[q] of lane i.
DEVICE void transpose_quad(u32 (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const auto swap = [](bool first, u32& a, u32& b, int distance) {
    const u32 other = __shfl_xor_sync(ALL_LANES, first ? a : b, distance);
    (first ? a : b) = other;
  };
  swap(odd, x[0], x[1], 1), swap(odd, x[2], x[3], 1);
  swap(upper, x[0], x[2], 2), swap(upper, x[1], x[3], 2);
}
DEVICE uint4 load_shared_16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
DEVICE void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// c += a b by mma: a is 16x16 row-major, b is 16x8 column-major. Lane l holds rows l / 4 and l / 4 + 8, columns 2 (l %
// 4) and the next.
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
