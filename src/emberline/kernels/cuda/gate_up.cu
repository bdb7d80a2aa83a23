// y[m, n / 2] = silu(gate) * up, where gate and up are the products x[m, k] w[n, k]^T of float8 operands, for up to 128
// rows of x.
//
// What enters an SM limits the speed: about 32 bytes per cycle. A CTA of wide.cu reads all rows of x for each 128 rows of
// w, and 28,672 rows are 1.7 tiles for each SM. Here a CTA has WIDTH rows of w, so many that there is about one tile for
// each SM. So x, not w, is the first operand of the products: a warpgroup has 64 rows of x, a step 128 k.
//
// Groups of 32 rows of w are 16 gates, then their 16 ups. Lane l of warp i of a warpgroup holds in d[4 j + 2 r + e] row
// 16 i + l / 4 + 8 r of x and row 8 j + 2 (l % 4) + e of w. So d[16 c + i] and d[16 c + i + 8] are a gate and its up.
#include "common.cuh"
#include "wgmma.cuh"
#include "wgmma_fp8.cuh"

template <int GROUPS_, int WIDTH_> struct Shape {
  static constexpr int GROUPS = GROUPS_, WIDTH = WIDTH_, WARPS = 4 * GROUPS, THREADS = 128 * GROUPS + 32;
  static constexpr u32 X_BYTES = 8192 * GROUPS, W_BYTES = 128 * WIDTH, SLOT = X_BYTES + W_BYTES;
};

struct Ring {
  u32 slots, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

DEVICE u64 matrix_descriptor(u32 address) { return u64(address >> 4) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62; }

struct Arguments {
  const TensorMap *w_map, *x_map;
  const float *w_scales, *x_scales;  // [n] and [m]
  bf16* out;
  int n, units, m, pdl;
};

// Fetches step after step into the ring. `pdl`: weights are fetched at once, x after the preceding kernel has ended.
template <class S> DEVICE void fetch(Ring ring, const Arguments& args, int tiles) {
  const u64 evict_first = l2_evict_first(), evict_last = l2_evict_last();
  const u32 x_bytes = 128 * ((args.m + 7) / 8 * 8);  // rows beyond m are not fetched
  const int own = (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x), count = own * args.units;
  const int prefetched = args.pdl ? min(ring.stages, count) : 0;
  int tile = blockIdx.x, unit = 0;
  const auto fetch_x = [&](int stage, int unit) {
    copy_tile(ring.slots + stage * S::SLOT, args.x_map, 128 * unit, 0, ring.full + 8 * stage, evict_last);
  };
  const auto fetch_w = [&] {
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES, barrier = ring.full + 8 * ring.stage;
    copy_tile(at, args.w_map, 128 * unit, S::WIDTH * tile, barrier, evict_first);
    ring.advance();
    if (++unit == args.units) unit = 0, tile += gridDim.x;
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
    if (i && lane == 0) barrier_arrive(ring.empty + 8 * last);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  if (lane == 0) barrier_arrive(ring.empty + 8 * last);
}

// silu(gate) * up, rounded as in torch: gate and up to bf16, then silu, then the product.
DEVICE float gated_silu(float gate, float up) {
  gate = to_float(to_bf16(gate));
  return to_float(to_bf16(gate / (1.f + expf(-gate)))) * to_float(to_bf16(up));
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

// Shared memory: the ring, then its barriers. Boxes of the tensor maps: WIDTH rows of w, m rows of x rounded up to 8.
template <int GROUPS, int WIDTH>
__global__ void __launch_bounds__(128 * GROUPS + 32, 1)
    gate_up(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* w_scales,
            const float* x_scales, bf16* out, int n, int k, int m, int stages, int pdl) {
  using S = Shape<GROUPS, WIDTH>;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Ring ring{base, base + stages * S::SLOT, base + stages * (S::SLOT + 8), stages};
  const Arguments args{&w_map, &x_map, w_scales, x_scales, out, n, (k + 127) / 128, m, pdl};
  const int tiles = (n + WIDTH - 1) / WIDTH;
  if (threadIdx.x == 32 * S::WARPS) {
    prefetch_map(&w_map), prefetch_map(&x_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, S::WARPS);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp == S::WARPS) {
    if (lane == 0) fetch<S>(ring, args, tiles);
    __syncwarp();
    wait_for_previous_kernel();
    return;
  }
  wait_for_previous_kernel();
  const int row = 16 * warp + lane / 4;
  float of_x[2], d[WIDTH / 2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(of_x[r]) : "l"(x_scales + min(row + 8 * r, m - 1)) : "memory");
  Ring own = ring;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    accumulate_tile<S>(d, own, args.units, warp / 4, lane);
    finish<S>(d, args, tile, row, of_x, lane);
  }
}
