// y[m, n] = x[m, k] w[n, k]^T for prompts: hundreds to thousands of rows of x, by Hopper's warpgroup products, with
// what follows the product built in.
//
// Who owns what. A CTA computes a tile of 128 rows of x and WIDTH of w, each of its two computing warpgroups 64 rows,
// in steps of 64 k. One warp fetches into a ring of slots, a tile of x and one of w each, 128 bytes a row, swizzled;
// rows past m and n read as zero. CTAS CTAs, a cluster, stand below each other and share their rows of w: each fetches
// a part of them for all. Else the L2 would have to hand out 48 KiB for 4 MFLOP, all that it can; two CTAs take 32.
//
// A cluster goes from tile to tile, and the ring with it: the next tile is fetched while this one is finished. Tiles
// come in bands of some rows, column by column, so that what all clusters work on at one time is about a square: few
// different bytes for the L2. The second warpgroup stays `lag` steps behind the first, so that the one's products run
// while the other finishes.
//
// Order of sums. An output is summed over k step by step, and nothing else: it depends neither on m, nor on the row of
// x, nor on WIDTH, CTAS or the grid.
//
// Barriers. FULL: one arrival, with the bytes of a slot, from whichever CTA they come; EMPTY: one arrival of each
// computing warp of the cluster, as what a CTA fetches is written to all of its CTAs. Use u of a slot has parity u & 1:
// a warpgroup waits for FULL with it, the fetcher for EMPTY with the other, which a new barrier has already passed. No
// bytes can come early for the phase after: their fetcher has seen this CTA's warps leave the slot.
//
// Fragments. Warp i of a warpgroup has rows 16 i .. of its 64: lane l holds in d[4 j + 2 r + e] row l / 4 + 8 r and
// column 8 j + 2 (l % 4) + e. Gated: columns come in groups of 32, 16 gates and the 16 of up that belong to them, so
// that d[i] and d[i + 8] are a gate and its up.
#include "common.cuh"
#include "wgmma.cuh"

enum Epilogue { STORE, ADD, GATED };

constexpr int GROUPS = 2, WARPS = 4 * GROUPS, ROWS = 64 * GROUPS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // 128 * 40 + 256 * 232 = 384 * 168, the launch's
constexpr u32 PANEL = 128 * 64;  // bytes of 64 rows of 64 outputs

template <int COLUMNS, int SHARING> struct Shape {
  static constexpr int WIDTH = COLUMNS, CTAS = SHARING, STAGES = WIDTH == 256 ? 4 : 6;
  static constexpr u32 X_BYTES = 128 * ROWS, W_BYTES = 128 * WIDTH, SLOT = X_BYTES + W_BYTES;
  // A panel for each group, and the one that is being stored.
  static constexpr u32 PANELS = STAGES * SLOT, BARRIERS = PANELS + 2 * GROUPS * PANEL;
};

struct Ring {
  u32 slots, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

struct Tiles {
  int rows, columns, band;  // how many tiles there are, and rows of them in a band
  int first, stride;        // of this cluster
  DEVICE int count() const { return rows * columns; }
  DEVICE int2 place(int tile) const {  // row and column
    const int above = tile / (band * columns), rest = tile - above * band * columns;
    const int high = min(band, rows - above * band), column = rest / high;
    return make_int2(above * band + rest - column * high, column);
  }
};

// As barrier_wait, but a hang ends by a store to nowhere: in a kernel with a trap in it, the compiler does not use the
// registers that a warpgroup takes over from another.
DEVICE void barrier_wait_without_trap(u32 barrier, u32 parity) {
#pragma unroll 1
  for (u32 tries = 0; !barrier_passed(barrier, parity); tries++)
    if (tries > (1u << 22)) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
}

// -- clusters ---------------------------------------------------------------------------------------------------------

// All threads of the cluster.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A warp is done with a slot, which every CTA of the cluster must know. Each warp says so itself: its wait covers its
// own products only. It has read and not written, so that nothing need be made visible: a release to the cluster would
// be a fence of the whole device, at every step.
template <class S> DEVICE void release(u32 barrier) {
  const u32 lane = threadIdx.x % 32;
  if (S::CTAS == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < S::CTAS) {
    asm volatile("{ .reg .b32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [far]; }" ::"r"(barrier), "r"(lane) : "memory");
  }
}
// To the same place in each CTA of the cluster; each is told by its own barrier.
template <int CTAS> DEVICE void copy_tile_multicast(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy) {
  if (CTAS == 1) return copy_tile(to, map, x, y, barrier, policy);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(u16((1 << CTAS) - 1)), "l"(policy) : "memory");
}

// -- warpgroup products -----------------------------------------------------------------------------------------------

// Rows of 64 k for wgmma: address and offset from 8 rows to the next 8 in units of 16 bytes, 128-byte swizzle. The next
// 16 k are 32 bytes on. In a cluster an address tells the CTA too, in bits that belong to others here.
DEVICE u64 matrix_descriptor(u32 address) {
  return u64((address & 0x3ffff) >> 4) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}


// d = x w^T, or more of it, over 16 k.
DEVICE void wgmma(float (&d)[64], u64 x, u64 w, int more) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "l"(x), "l"(w), "r"(more));
}
DEVICE void wgmma(float (&d)[128], u64 x, u64 w, int more) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, %128, %129, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96) : "l"(x), "l"(w), "r"(more));
}

// -- the fetching thread ----------------------------------------------------------------------------------------------

DEVICE u64 l2_evict_normal() { u64 p; asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }

// Step after step into the ring. `early`: weights are asked for at once, all else when the kernel before has ended.
template <class S, Epilogue END>
DEVICE void fetch(Ring ring, const TensorMap* x_map, const TensorMap* w_map, const TensorMap* residual_map, Tiles tiles,
                  int units, u32 rank, bool pdl) {
  const u64 policy = l2_evict_normal();
  int row = 0, column = 0, unit = 0;
  const auto go_to = [&](int tile) {
    const int2 at = tiles.place(tile);
    row = (at.x * S::CTAS + int(rank)) * ROWS, column = at.y * S::WIDTH;
  };
  const auto fetch_x = [&](int stage, int unit) {
    copy_tile(ring.slots + stage * S::SLOT, x_map, 64 * unit, row, ring.full + 8 * stage, policy);
  };
  const auto fetch_w = [&] {
    constexpr int PART = S::WIDTH / S::CTAS;
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES + rank * PART * 128;
    copy_tile_multicast<S::CTAS>(at, w_map, 64 * unit, column + int(rank) * PART, ring.full + 8 * ring.stage, policy);
    ring.advance();
  };
  go_to(tiles.first);
  const int ahead = pdl ? min(S::STAGES, units) : 0;
#pragma unroll 1
  for (; unit < ahead; unit++) {
    barrier_expect_bytes(ring.full + 8 * ring.stage, S::SLOT);
    fetch_w();
  }
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < ahead; i++) fetch_x(i, i);
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.count(); tile += tiles.stride) {
    go_to(tile);
#pragma unroll 1
    for (; unit < units; unit++) {
      barrier_wait_without_trap(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect_bytes(ring.full + 8 * ring.stage, S::SLOT);
      fetch_x(ring.stage, unit);
      fetch_w();
    }
    unit = 0;
#pragma unroll 1
    for (int part = 0; part < S::WIDTH && END == ADD; part += 128) {  // two panels of both groups in a slot
      barrier_wait_without_trap(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      const u32 to = ring.slots + ring.stage * S::SLOT, barrier = ring.full + 8 * ring.stage;
      barrier_expect_bytes(barrier, 2 * GROUPS * PANEL);
      copy_tile(to, residual_map, column + part, row, barrier, policy);
      copy_tile(to + GROUPS * PANEL, residual_map, column + part + 64, row, barrier, policy);
      ring.advance();
    }
  }
}

// -- the computing warpgroups -----------------------------------------------------------------------------------------

// A tile's sums. The next step's products are issued before the last one's slot is given back. `signal`: the step at
// which the other group may begin.
template <class S> DEVICE void add_up(float (&d)[S::WIDTH / 2], Ring& ring, int units, u32 group, int signal) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait_without_trap(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at + group * 8192), w = matrix_descriptor(at + S::X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, x + 2 * step, w + 2 * step, step ? 1 : i);
    wgmma_commit();
    wgmma_wait<1>();
    if (i) release<S>(ring.empty + 8 * last);
    if (i == signal) asm volatile("bar.arrive 3, 256;" ::: "memory");
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  release<S>(ring.empty + 8 * last);
}

DEVICE float inverse(float x) { asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
// x / (1 + exp(-x)), as a division would round it. That would be a call, and in a kernel with calls warpgroups cannot
// trade registers. Both sides are quartered, as the inverse of more than 2^126 is zero: infinity's only.
DEVICE float silu(float x) {
  const float below = fminf(__fmaf_rn(expf(-x), .25f, .25f), 0x1.fffffep127f), above = x * .25f;
  const float share = inverse(below), near = above * share;
  return __fmaf_rn(__fmaf_rn(-below, near, above), share, near);
}
DEVICE u32 multiply_pairs(u32 a, u32 b) { asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a; }

DEVICE void store_matrices(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// What lies outside the tensor is not written.
DEVICE void store_tile(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}
DEVICE void stores_end() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
DEVICE void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void meet_group(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// Where the group's 64 rows go: first row and column of the outputs, and how many there are of either.
struct Outputs {
  const TensorMap* map;
  u32 panels;  // two in shared memory, in turn
  int row, column, m, n;
};

// From sums to outputs, 64 columns at a time: rounded, through shared memory, and out by the copy engine. Of a panel a
// warp writes four matrices of 8 x 8 at once: rows 0 and 8, then the next 8 columns.
template <class S, Epilogue END>
DEVICE void finish(const float (&d)[S::WIDTH / 2], Ring& ring, const Outputs& to, u32 group) {
  constexpr int PANELS = S::WIDTH / (END == GATED ? 128 : 64);
  const bool leader = threadIdx.x % 128 == 0;
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, side = lane / 16;
#pragma unroll
  for (int panel = 0; panel < PANELS; panel++) {
    const u32 at = to.panels + panel % 2 * PANEL;
    const u32 added = ring.slots + ring.stage * S::SLOT + (panel % 2 * GROUPS + group) * PANEL;
    if (leader) stores_have_read<PANELS == 1 ? 0 : 1>();
    meet_group(group);
    if (END == ADD && panel % 2 == 0) barrier_wait_without_trap(ring.full + 8 * ring.stage, ring.parity);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 v[4], more[4];
      if (END == ADD) load_matrices(more, added + swizzled_offset(row, 2 * s + side));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* const c = d + (END == GATED ? 16 : 8) * (4 * panel + s) + 2 * i;
        if (END == STORE) v[i] = pack(c[0], c[1]);
        if (END == ADD) v[i] = pack(c[0] + low(more[i]), c[1] + high(more[i]));
        if (END == GATED) {
          const u32 gates = pack(c[0], c[1]);
          v[i] = multiply_pairs(pack(silu(low(gates)), silu(high(gates))), pack(c[8], c[9]));
        }
      }
      store_matrices(at + swizzled_offset(row, 2 * s + side), v);
    }
    if (END == ADD && panel % 2 == 1) {
      release<S>(ring.empty + 8 * ring.stage);
      ring.advance();
    }
    fence_shared_writes();
    meet_group(group);
    if (leader) {
      if (to.row < to.m && to.column + 64 * panel < to.n) store_tile(to.map, to.column + 64 * panel, to.row, at);
      stores_end();
    }
  }
}

template <class S, Epilogue END>
DEVICE void compute(Ring ring, const TensorMap* out_map, u32 panels, Tiles tiles, int m, int n, int units, u32 rank,
                    u32 group, int lag) {
  float d[S::WIDTH / 2];
  int signal = group == 0 && lag > 0 ? min(lag, units - 1) : -1;
  if (group == 1 && lag > 0) asm volatile("bar.sync 3, 256;" ::: "memory");
  const int half = END == GATED ? 2 : 1;
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.count(); tile += tiles.stride) {
    add_up<S>(d, ring, units, group, signal);
    signal = -1;
    const int2 at = tiles.place(tile);
    const int row = (at.x * S::CTAS + int(rank)) * ROWS + int(group) * 64;
    finish<S, END>(d, ring, Outputs{out_map, panels, row, at.y * S::WIDTH / half, m, n / half}, group);
  }
  if (threadIdx.x % 128 == 0) stores_wait();
}

// 384 threads: one warp of the first warpgroup fetches, the two others compute. The grid: at most as many clusters as
// there are tiles. Maps: boxes of 128 rows of x and of the residual, WIDTH / CTAS rows of w, 64 x 64 outputs. `early`:
// launched while the kernel before may still run.
template <int WIDTH, int CTAS, Epilogue END>
__global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
         const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap residual_map, int m, int n, int k,
         int band, int lag, int pdl) {
  using S = Shape<WIDTH, CTAS>;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u, barriers = base + S::BARRIERS;
  const u32 group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), rank = blockIdx.x % CTAS;
  const Ring ring{base, barriers, barriers + 8 * S::STAGES, S::STAGES};
  const Tiles tiles{(m + ROWS * CTAS - 1) / (ROWS * CTAS), (n + WIDTH - 1) / WIDTH, band, int(blockIdx.x) / CTAS,
                    int(gridDim.x) / CTAS};
  if (threadIdx.x == 0) {
    prefetch_map(&x_map), prefetch_map(&w_map), prefetch_map(&out_map);
    if (END == ADD) prefetch_map(&residual_map);
#pragma unroll 1
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, WARPS * CTAS);
    }
    fence_barrier_init();
  }
  if (CTAS == 1) __syncthreads();
  else cluster_sync();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) fetch<S, END>(ring, &x_map, &w_map, &residual_map, tiles, k / 64, rank, pdl);
    __syncwarp();
    wait_for_previous_kernel();
    if (CTAS > 1) cluster_sync();  // a CTA that has ended can be told nothing
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    wait_for_previous_kernel();
    const u32 panels = base + S::PANELS + (group - 1) * 2 * PANEL;
    compute<S, END>(ring, &out_map, panels, tiles, m, n, k / 64, rank, group - 1, lag);
    __syncwarp();
    if (CTAS > 1) cluster_sync();
  }
}
