// y[m, n / 2] = silu(gate) * up, where gate and up are the products x[m, k] w[n, k]^T of float8 operands, for up to 256
// rows of x.
//
// What enters an SM limits the speed: about 32 bytes per cycle. A CTA of wide.cu reads all rows of x for each 128 rows of
// w, and 28,672 rows are 1.7 tiles for each SM. Here a CTA has WIDTH rows of w, so many that there is about one tile for
// each SM. So x, not w, is the first operand of the products: a warpgroup has 64 rows of x, a step 128 k. More than 128
// rows of x are those of two CTAs, a cluster: each fetches half of the rows of w for both (multicast).
//
// Groups of 32 rows of w are 16 gates, then their 16 ups. Lane l of warp i of a warpgroup holds in d[4 j + 2 r + e] row
// 16 i + l / 4 + 8 r of x and row 8 j + 2 (l % 4) + e of w. So d[16 c + i] and d[16 c + i + 8] are a gate and its up.
#include "common.cuh"
#include "wgmma.cuh"
#include "wgmma_products.cuh"

template <int GROUPS_, int WIDTH_, int CTAS_> struct Shape {
  static constexpr int GROUPS = GROUPS_, WIDTH = WIDTH_, CTAS = CTAS_, WARPS = 4 * GROUPS, ROWS = 64 * GROUPS;
  static constexpr u32 X_BYTES = 8192 * GROUPS, W_BYTES = 128 * WIDTH, SLOT = X_BYTES + W_BYTES;
};

struct Ring {
  u32 slots, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Releases a slot that this warp no longer reads, in every CTA that writes to it.
template <class S> DEVICE void release_slot(u32 barrier, int lane) {
  if (S::CTAS == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < S::CTAS) {
    asm volatile("{ .reg .b32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [far]; }" ::"r"(barrier), "r"(lane) : "memory");
  }
}
// Copies to the same address in each CTA of the cluster. Each CTA's own barrier counts the bytes.
template <class S> DEVICE void copy_tile_to_all(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy) {
  if (S::CTAS == 1) return copy_tile(to, map, x, y, barrier, policy);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(u16((1 << S::CTAS) - 1)), "l"(policy) : "memory");
}

struct Arguments {
  const TensorMap *w_map, *x_map;
  const float *w_scales, *x_scales;  // [n] and [m]
  bf16* out;
  int n, units, m, pdl;
  int rank, first, stride;  // of the CTA in its cluster; the cluster's first tile, and the distance to its next
};

// Fetches step after step into the ring. `pdl`: weights are fetched at once, x after the preceding kernel has ended.
template <class S> DEVICE void fetch(Ring ring, const Arguments& args, int tiles) {
  const u64 evict_first = l2_evict_first(), evict_last = l2_evict_last();
  const u32 x_bytes = 128 * min((args.m + 7) / 8 * 8, S::ROWS);  // of few rows, those beyond m are not fetched
  const int own = (tiles - args.first + args.stride - 1) / args.stride, count = own * args.units;
  const int prefetched = args.pdl ? min(ring.stages, count) : 0;
  constexpr int PART = S::WIDTH / S::CTAS;
  int tile = args.first, unit = 0;
  const auto fetch_x = [&](int stage, int unit) {
    copy_tile(ring.slots + stage * S::SLOT, args.x_map, 128 * unit, S::ROWS * args.rank, ring.full + 8 * stage,
              evict_last);
  };
  const auto fetch_w = [&] {
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES + 128 * PART * args.rank;
    copy_tile_to_all<S>(at, args.w_map, 128 * unit, S::WIDTH * tile + PART * args.rank, ring.full + 8 * ring.stage,
                        evict_first);
    ring.advance();
    if (++unit == args.units) unit = 0, tile += args.stride;
  };
#pragma unroll 1
  for (int i = 0; i < prefetched; i++) {
    barrier_expect_bytes(ring.full + 8 * ring.stage, x_bytes + S::W_BYTES);
    fetch_w();
  }
  wait_for_previous_kernel();
#pragma unroll 1
  for (int stage = 0, j = 0; stage < prefetched; stage++) {
    fetch_x(stage, j);
    if (++j == args.units) j = 0;
  }
#pragma unroll 1
  for (int i = prefetched; i < count; i++) {
    barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    barrier_expect_bytes(ring.full + 8 * ring.stage, x_bytes + S::W_BYTES);
    fetch_x(ring.stage, unit);
    fetch_w();
  }
}

// Computes a tile's sums. The next step's products are issued before the previous slot is released.
template <class S> DEVICE void accumulate_tile(float (&d)[S::WIDTH / 2], Ring& ring, int units, int group, int lane) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at + group * 8192), w = matrix_descriptor(at + S::X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_fp8(d, x + 2 * step, w + 2 * step, step ? 1 : i);
    wgmma_commit();
    wgmma_wait<1>();
    if (i) release_slot<S>(ring.empty + 8 * last, lane);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  release_slot<S>(ring.empty + 8 * last, lane);
}

// silu(gate) * up, rounded as in torch: gate and up to bf16, then silu, then the product.
DEVICE float gated_silu(float gate, float up) {
  return to_float(to_bf16(silu(to_float(to_bf16(gate))))) * to_float(to_bf16(up));
}

template <class S> DEVICE void finish(const float (&d)[S::WIDTH / 2], const Arguments& args, int tile, int row,
                                      const float (&of_x)[2], int lane) {
#pragma unroll
  for (int c = 0; c < S::WIDTH / 32; c++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int gate = S::WIDTH * tile + 32 * c + 8 * i + 2 * (lane % 4);  // row of w
      if (gate >= args.n) return;
      const float2 of_gate = *reinterpret_cast<const float2*>(args.w_scales + gate);
      const float2 of_up = *reinterpret_cast<const float2*>(args.w_scales + gate + 16);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float* const at = d + 16 * c + 4 * i + 2 * r;
        const float first = gated_silu(at[0] * (of_x[r] * of_gate.x), at[8] * (of_x[r] * of_up.x));
        const float second = gated_silu(at[1] * (of_x[r] * of_gate.y), at[9] * (of_x[r] * of_up.y));
        bf16* const to = args.out + i64(row + 8 * r) * (args.n / 2) + S::WIDTH / 2 * tile + 16 * c + 8 * i + 2 * (lane % 4);
        if (row + 8 * r < args.m) *reinterpret_cast<u32*>(to) = pack(first, second);
      }
    }
}

// Shared memory: the ring, then its barriers. Boxes of the tensor maps: WIDTH / CTAS rows of w, and the rows of x of a
// CTA, m of them rounded up to 8 if they are fewer.
template <int GROUPS, int WIDTH, int CTAS>
__global__ void __launch_bounds__(128 * GROUPS + 32, 1)
    gate_up(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* w_scales,
            const float* x_scales, bf16* out, int n, int k, int m, int stages, int pdl) {
  using S = Shape<GROUPS, WIDTH, CTAS>;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Ring ring{base, base + stages * S::SLOT, base + stages * (S::SLOT + 8), stages};
  const Arguments args{&w_map, &x_map, w_scales, x_scales, out, n, (k + 127) / 128, m, pdl,
                       int(blockIdx.x) % CTAS, int(blockIdx.x) / CTAS, int(gridDim.x) / CTAS};
  const int tiles = (n + WIDTH - 1) / WIDTH;
  if (threadIdx.x == 32 * S::WARPS) {
    prefetch_map(&w_map), prefetch_map(&x_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++)
      barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, S::WARPS * CTAS);
    fence_barrier_init();
  }
  if (CTAS == 1) __syncthreads();
  else cluster_sync();
  if (warp == S::WARPS) {
    if (lane == 0) fetch<S>(ring, args, tiles);
    __syncwarp();
    wait_for_previous_kernel();
    if (CTAS > 1) cluster_sync();  // a CTA must not exit before its peer stops arriving at its barriers
    return;
  }
  wait_for_previous_kernel();
  const int row = S::ROWS * args.rank + 16 * warp + lane / 4;
  float of_x[2], d[WIDTH / 2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(of_x[r]) : "l"(x_scales + min(row + 8 * r, m - 1)) : "memory");
  Ring own = ring;
#pragma unroll 1
  for (int tile = args.first; tile < tiles; tile += args.stride) {
    accumulate_tile<S>(d, own, args.units, warp / 4, lane);
    finish<S>(d, args, tile, row, of_x, lane);
  }
  __syncwarp();
  if (CTAS > 1) cluster_sync();
}
