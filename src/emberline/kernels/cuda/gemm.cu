// y[m, n] = x[m, k] w[n, k]^T for prompts: hundreds to thousands of rows of x, by Hopper's wgmma, with a fused
// epilogue.
//
// Tiles. A CTA computes tiles of 128 rows of x and WIDTH rows of w, in steps of 64 k. Two consumer warpgroups compute
// 64 rows each. One producer thread fetches into a ring of slots (pipeline stages), each with a tile of x and one of w,
// 128 bytes per row, swizzled; rows beyond m and n are read as zero. The CTAS CTAs of a cluster have different rows of
// x and share their rows of w: each fetches a part of w and multicasts it. Without a cluster the L2 would have to
// deliver 48 KiB for 4 MFLOP, which is its limit; with two CTAs it is 32 KiB.
//
// Order of tiles. A cluster is persistent: it computes tile after tile, and the producer fetches the next tile while
// the consumers finish this one. Tiles are ordered in bands of several rows, column by column within a band. So the
// tiles that all clusters compute at one time form about a square, which minimises the different bytes that the L2 must
// hold. The second warpgroup stays `lag` steps behind the first, so that the products of one overlap with the epilogue
// of the other.
//
// Order of sums. An output is summed over k step by step. It does not depend on m, the row of x, WIDTH, CTAS or the
// grid. FIXED: k is cut into `split` parts, as in wide.cu. Each part is summed from zero, and the sums of the parts are
// added in order. So the result has the same bits as that of wide.cu with the same split.
//
// Barriers. FULL: one arrival plus the bytes of a slot, from any CTA of the cluster. EMPTY: one arrival of each
// consumer warp of the cluster, because what a CTA fetches is written to all its CTAs. Use u of a slot has parity u &
// 1: consumers wait for FULL with this parity, the producer waits for EMPTY with the opposite, which a new barrier has
// already passed. Bytes of the next phase cannot arrive early: their producer has waited until this CTA's warps
// released the slot.
//
// Float8. Codes of x and w with scales: a step has 128 k. Scales of rows are applied by the epilogue. Scales of blocks
// of 128 k are applied to the sums of each step, which are then added to those of the tile in float32; that takes
// registers for both, so WIDTH is 128.
//
// Fragments. Warp i of a warpgroup has rows 16 i .. of its 64. Lane l holds in d[4 j + 2 r + e] row l / 4 + 8 r and
// column 8 j + 2 (l % 4) + e. Gated: columns come in groups of 32, 16 gates and then their 16 ups, so that d[i] and d[i
// + 8] are a gate and its up.
#include "common.cuh"
#include "wgmma.cuh"
#include "wgmma_products.cuh"

enum Epilogue { STORE, ADD, GATED };

constexpr int GROUPS = 2, WARPS = 4 * GROUPS, ROWS = 64 * GROUPS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // 128 * 40 + 256 * 232 = 384 * 168, as launched
constexpr u32 PANEL = 128 * 64;  // bytes of 64 rows of 64 outputs

enum Numbers { BF16, FP8_ROWS, FP8_BLOCKS };  // the operands, and what has a scale

template <int COLUMNS, int SHARING, bool FIXED_ORDER, Numbers NUMBERS_ = BF16> struct Shape {
  static constexpr Numbers NUMBERS = NUMBERS_;
  static constexpr int UNIT_K = NUMBERS == BF16 ? 64 : 128;  // k of a step
  static constexpr int WIDTH = COLUMNS, CTAS = SHARING, STAGES = WIDTH == 256 ? 4 : 6;
  static constexpr bool FIXED = FIXED_ORDER, CAN_SPLIT = FIXED && WIDTH == 128;  // wider tiles have too few registers
  static constexpr u32 X_BYTES = 128 * ROWS, W_BYTES = 128 * WIDTH, SLOT = X_BYTES + W_BYTES;
  // Two panels for each warpgroup: one is filled while the other is being stored.
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
  int rows, columns, band;  // rows and columns of tiles, and rows of tiles in a band
  int first, stride;        // this cluster's first tile, and the distance to its next
  DEVICE int count() const { return rows * columns; }
  DEVICE int2 position(int tile) const {  // row and column
    const int index = tile / (band * columns), rest = tile - index * band * columns;
    const int band_rows = min(band, rows - index * band), column = rest / band_rows;
    return make_int2(index * band + rest - column * band_rows, column);
  }
};

// As barrier_wait, but a hang ends with a store to a null address. If a kernel contains a trap, the compiler ignores
// setmaxnreg and does not use the registers that a warpgroup takes over from another.
DEVICE void barrier_wait_without_trap(u32 barrier, u32 parity) {
#pragma unroll 1
  for (u32 tries = 0; !barrier_passed(barrier, parity); tries++)
    if (tries > (1u << 22)) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
}

// -- clusters ---------------------------------------------------------------------------------------------------------

// Synchronises all threads of the cluster.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Releases a slot in every CTA of the cluster. Each warp arrives itself, because wgmma_wait covers the warp's own
// products only. The warp has only read the slot, so no release at cluster scope is needed; that would be a device-wide
// fence in every step.
template <class S> DEVICE void release_slot(u32 barrier) {
  const u32 lane = threadIdx.x % 32;
  if (S::CTAS == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < S::CTAS) {
    asm volatile("{ .reg .b32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [far]; }" ::"r"(barrier), "r"(lane) : "memory");
  }
}
// Copies to the same address in each CTA of the cluster (multicast). Each CTA's own barrier counts the bytes.
template <int CTAS> DEVICE void copy_tile_multicast(u32 to, const TensorMap* map, int x, int y, u32 barrier,
                                                    u64 policy) {
  if (CTAS == 1) return copy_tile(to, map, x, y, barrier, policy);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(u16((1 << CTAS) - 1)), "l"(policy) : "memory");
}

// -- the producer thread ----------------------------------------------------------------------------------------------

DEVICE u64 l2_evict_normal() { u64 p; asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }

// Fetches step after step into the ring. `pdl`: weights are fetched at once, x and the residual after the preceding
// kernel ended.
template <class S, Epilogue EPILOGUE>
DEVICE void fetch(Ring ring, const TensorMap* x_map, const TensorMap* w_map, const TensorMap* residual_map, Tiles tiles,
                  int units, u32 rank, bool pdl) {
  const u64 policy = l2_evict_normal();
  int row = 0, column = 0, unit = 0;
  const auto set_tile = [&](int tile) {
    const int2 at = tiles.position(tile);
    row = (at.x * S::CTAS + int(rank)) * ROWS, column = at.y * S::WIDTH;
  };
  const auto fetch_x = [&](int stage, int unit) {
    copy_tile(ring.slots + stage * S::SLOT, x_map, S::UNIT_K * unit, row, ring.full + 8 * stage, policy);
  };
  const auto fetch_w = [&] {
    constexpr int PART = S::WIDTH / S::CTAS;
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES + rank * PART * 128;
    copy_tile_multicast<S::CTAS>(at, w_map, S::UNIT_K * unit, column + int(rank) * PART, ring.full + 8 * ring.stage,
                                 policy);
    ring.advance();
  };
  set_tile(tiles.first);
  const int prefetched = pdl ? min(S::STAGES, units) : 0;
#pragma unroll 1
  for (; unit < prefetched; unit++) {
    barrier_expect_bytes(ring.full + 8 * ring.stage, S::SLOT);
    fetch_w();
  }
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < prefetched; i++) fetch_x(i, i);
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.count(); tile += tiles.stride) {
    set_tile(tile);
#pragma unroll 1
    for (; unit < units; unit++) {
      barrier_wait_without_trap(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect_bytes(ring.full + 8 * ring.stage, S::SLOT);
      fetch_x(ring.stage, unit);
      fetch_w();
    }
    unit = 0;
#pragma unroll 1
    for (int part = 0; part < S::WIDTH && EPILOGUE == ADD; part += 128) {  // two panels of both warpgroups per slot
      barrier_wait_without_trap(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      const u32 to = ring.slots + ring.stage * S::SLOT, barrier = ring.full + 8 * ring.stage;
      barrier_expect_bytes(barrier, 2 * GROUPS * PANEL);
      copy_tile(to, residual_map, column + part, row, barrier, policy);
      copy_tile(to + GROUPS * PANEL, residual_map, column + part + 64, row, barrier, policy);
      ring.advance();
    }
  }
}

// -- the consumer warpgroups ------------------------------------------------------------------------------------------

// Computes a tile's sums. The next step's products are issued before the previous slot is released. `signal`: the step
// at which the other warpgroup may start.
template <class S> DEVICE void accumulate_tile(float (&d)[S::WIDTH / 2], Ring& ring, int units, u32 group, int signal) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait_without_trap(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at + group * 8192), w = matrix_descriptor(at + S::X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      if constexpr (S::NUMBERS == BF16) wgmma(d, x + 2 * step, w + 2 * step, step ? 1 : i);
      else wgmma_fp8(d, x + 2 * step, w + 2 * step, step ? 1 : i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (i) release_slot<S>(ring.empty + 8 * last);
    if (i == signal) asm volatile("bar.arrive 3, 256;" ::: "memory");
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  release_slot<S>(ring.empty + 8 * last);
}

// Float8 scales: of the rows of w and x, or of blocks: w [n / 16][units], x [units][x_pitch].
struct Scales {
  const float *w, *x;
  int x_pitch, units;
};
DEVICE float load_past_l1(const float* at) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}

// The same if blocks have scales: the sums of each step are multiplied by them, and added to `total` in float32. `row`:
// the lane's first row of x.
template <class S>
DEVICE void accumulate_blocks(float (&total)[S::WIDTH / 2], Ring& ring, int units, u32 group, int signal,
                              const Scales& scales, int row, int column, int m, int n) {
  constexpr int BLOCKS = S::WIDTH / 16;
  float d[S::WIDTH / 2];
#pragma unroll
  for (int i = 0; i < S::WIDTH / 2; i++) total[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    float of_x[2], of_w[BLOCKS];
#pragma unroll
    for (int r = 0; r < 2; r++) of_x[r] = load_past_l1(scales.x + i64(i) * scales.x_pitch + min(row + 8 * r, m - 1));
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) of_w[b] = scales.w[min(column / 16 + b, n / 16 - 1) * scales.units + i];
    barrier_wait_without_trap(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at + group * 8192), w = matrix_descriptor(at + S::X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_fp8(d, x + 2 * step, w + 2 * step, step ? 1 : 0);
    wgmma_commit();
    wgmma_wait<0>();
    order_after_wait(d);
    release_slot<S>(ring.empty + 8 * ring.stage);
    if (i == signal) asm volatile("bar.arrive 3, 256;" ::: "memory");
    ring.advance();
#pragma unroll
    for (int j = 0; j < S::WIDTH / 2; j++) total[j] += d[j] * (of_x[j / 2 % 2] * of_w[j / 8]);
  }
}

// The same with k in `split` parts. The first part has more than one step, so that `signal` is reached.
template <class S>
DEVICE void accumulate_parts(float (&d)[S::WIDTH / 2], Ring& ring, int units, int split, u32 group, int signal) {
  float total[S::WIDTH / 2];
#pragma unroll
  for (int i = 0; i < S::WIDTH / 2; i++) total[i] = 0.f;
#pragma unroll 1
  for (int part = 0; part < split; part++) {
    const int from = units * part / split, until = units * (part + 1) / split;
    accumulate_tile<S>(d, ring, until - from, group, part ? -1 : min(signal, until - 1));
#pragma unroll
    for (int i = 0; i < S::WIDTH / 2; i++) total[i] += d[i];
  }
#pragma unroll
  for (int i = 0; i < S::WIDTH / 2; i++) d[i] = total[i];
}

DEVICE u32 multiply_pairs(u32 a, u32 b) { asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a; }

DEVICE void store_matrices(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// Stores a tile by TMA; elements outside the tensor are not written.
DEVICE void store_tile(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_until_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void sync_warpgroup(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// Destination of the warpgroup's 64 rows: first row and column of the outputs, and the numbers of rows and columns.
struct Outputs {
  const TensorMap* map;
  u32 panels;  // two panels in shared memory, used alternately
  int row, column, m, n;
  const float* bias;  // added to the sums if FIXED; null for none. Not supported if gated
  Scales scales;      // float8
};

// Applies the epilogue to the sums, 64 columns at a time: rounds them, writes them to a panel in shared memory, and
// stores the panel by TMA. A warp writes four 8 x 8 matrices at once: rows 0 and 8, then the next 8 columns.
template <class S, Epilogue EPILOGUE>
DEVICE void finish(const float (&d)[S::WIDTH / 2], Ring& ring, const Outputs& to, u32 group) {
  constexpr int PANELS = S::WIDTH / (EPILOGUE == GATED ? 128 : 64);
  const bool leader = threadIdx.x % 128 == 0;
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, side = lane / 16;
  constexpr bool SCALED = S::NUMBERS == FP8_ROWS;
  float of_x[2] = {};
  if constexpr (SCALED) {
    const int first = to.row + int(threadIdx.x / 32 % 4 * 16 + lane / 4);
#pragma unroll
    for (int r = 0; r < 2; r++) of_x[r] = load_past_l1(to.scales.x + min(first + 8 * r, to.m - 1));
  }
#pragma unroll
  for (int panel = 0; panel < PANELS; panel++) {
    const u32 at = to.panels + panel % 2 * PANEL;
    const u32 added = ring.slots + ring.stage * S::SLOT + (panel % 2 * GROUPS + group) * PANEL;
    if (leader) wait_until_stores_read<PANELS == 1 ? 0 : 1>();
    sync_warpgroup(group);
    if (EPILOGUE == ADD && panel % 2 == 0) barrier_wait_without_trap(ring.full + 8 * ring.stage, ring.parity);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 v[4], more[4];
      if (EPILOGUE == ADD) load_matrices(more, added + swizzled_offset(row, 2 * s + side));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* const c = d + (EPILOGUE == GATED ? 16 : 8) * (4 * panel + s) + 2 * i;
        float first = c[0], second = c[1], up_first = 0.f, up_second = 0.f;
        if (EPILOGUE == GATED) up_first = c[8], up_second = c[9];
        if constexpr (SCALED) {  // rows of w beyond n have no scale; their outputs are not stored
          constexpr int STEP = EPILOGUE == GATED ? 32 : 16;
          const int of_column = (EPILOGUE == GATED ? 2 : 1) * to.column + STEP * (4 * panel + s) + 8 * (i / 2) +
                                2 * int(lane % 4);
          if (of_column < (EPILOGUE == GATED ? 2 : 1) * to.n) {
            const float2 w = *reinterpret_cast<const float2*>(to.scales.w + of_column);
            first *= of_x[i % 2] * w.x, second *= of_x[i % 2] * w.y;
            if (EPILOGUE == GATED) {
              const float2 up = *reinterpret_cast<const float2*>(to.scales.w + of_column + 16);
              up_first *= of_x[i % 2] * up.x, up_second *= of_x[i % 2] * up.y;
            }
          }
        }
        const int column = to.column + 64 * panel + 16 * s + 8 * (i / 2) + 2 * int(lane % 4);
        if (S::FIXED && EPILOGUE != GATED && to.bias && column < to.n)
          first += to.bias[column], second += to.bias[column + 1];
        if (EPILOGUE == STORE) v[i] = pack(first, second);
        if (EPILOGUE == ADD) v[i] = pack(first + low(more[i]), second + high(more[i]));
        if (EPILOGUE == GATED) {
          const u32 gates = pack(first, second);
          v[i] = multiply_pairs(pack(silu(low(gates)), silu(high(gates))), pack(up_first, up_second));
        }
      }
      store_matrices(at + swizzled_offset(row, 2 * s + side), v);
    }
    if (EPILOGUE == ADD && panel % 2 == 1) {
      release_slot<S>(ring.empty + 8 * ring.stage);
      ring.advance();
    }
    fence_shared_writes();
    sync_warpgroup(group);
    if (leader) {
      if (to.row < to.m && to.column + 64 * panel < to.n) store_tile(to.map, to.column + 64 * panel, to.row, at);
      commit_stores();
    }
  }
}

template <class S, Epilogue EPILOGUE>
DEVICE void compute(Ring ring, const TensorMap* out_map, u32 panels, Tiles tiles, int m, int n, int units, u32 rank,
                    u32 group, int lag, int split, const float* bias, const Scales& scales) {
  float d[S::WIDTH / 2];
  int signal = group == 0 && lag > 0 ? min(lag, units - 1) : -1;
  if (group == 1 && lag > 0) asm volatile("bar.sync 3, 256;" ::: "memory");
  const int half = EPILOGUE == GATED ? 2 : 1;
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.count(); tile += tiles.stride) {
    const int2 at = tiles.position(tile);
    const int row = (at.x * S::CTAS + int(rank)) * ROWS + int(group) * 64;
    if constexpr (S::NUMBERS == FP8_BLOCKS)
      accumulate_blocks<S>(d, ring, units, group, signal, scales, row + int(threadIdx.x / 32 % 4 * 16 +
                             threadIdx.x % 32 / 4), at.y * S::WIDTH, m, n);
    else if (S::CAN_SPLIT && split > 1) accumulate_parts<S>(d, ring, units, split, group, signal);
    else accumulate_tile<S>(d, ring, units, group, signal);
    signal = -1;
    finish<S, EPILOGUE>(d, ring, Outputs{out_map, panels, row, at.y * S::WIDTH / half, m, n / half, bias, scales},
                        group);
  }
  if (threadIdx.x % 128 == 0) wait_for_stores();
}

struct Arguments {
  const TensorMap *x_map, *w_map, *out_map, *residual_map;
  int m, n, k, band, lag, pdl, split;
  const float* bias;
  Scales scales;
};

// 384 threads: one thread of the first warpgroup is the producer, the other two warpgroups are consumers. The grid has
// at most as many clusters as there are tiles. Boxes of the tensor maps: 128 rows of x and of the residual, WIDTH /
// CTAS rows of w, 64 x 64 outputs. `pdl`: launched while the preceding kernel may still run. `split` and `bias` have an
// effect only if FIXED.
template <class S, Epilogue EPILOGUE> DEVICE void run(const Arguments& args) {
  constexpr int CTAS = S::CTAS;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u, barriers = base + S::BARRIERS;
  const u32 group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), rank = blockIdx.x % CTAS;
  const int units = (args.k + S::UNIT_K - 1) / S::UNIT_K;
  const Ring ring{base, barriers, barriers + 8 * S::STAGES, S::STAGES};
  const Tiles tiles{(args.m + ROWS * CTAS - 1) / (ROWS * CTAS), (args.n + S::WIDTH - 1) / S::WIDTH, args.band,
                    int(blockIdx.x) / CTAS, int(gridDim.x) / CTAS};
  if (threadIdx.x == 0) {
    prefetch_map(args.x_map), prefetch_map(args.w_map), prefetch_map(args.out_map);
    if (EPILOGUE == ADD) prefetch_map(args.residual_map);
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
    if (threadIdx.x == 0)
      fetch<S, EPILOGUE>(ring, args.x_map, args.w_map, args.residual_map, tiles, units, rank, args.pdl);
    __syncwarp();
    wait_for_previous_kernel();
    if (CTAS > 1) cluster_sync();  // a CTA must not exit before its peers stop arriving at its barriers
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    wait_for_previous_kernel();
    const u32 panels = base + S::PANELS + (group - 1) * 2 * PANEL;
    compute<S, EPILOGUE>(ring, args.out_map, panels, tiles, args.m, args.n, units, rank, group - 1, args.lag,
                         args.split, args.bias, args.scales);
    __syncwarp();
    if (CTAS > 1) cluster_sync();
  }
}

template <int WIDTH, int CTAS, Epilogue EPILOGUE, bool FIXED = false>
__global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
         const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap residual_map, int m, int n, int k,
         int band, int lag, int pdl, int split, const float* bias) {
  run<Shape<WIDTH, CTAS, FIXED>, EPILOGUE>(
      Arguments{&x_map, &w_map, &out_map, &residual_map, m, n, k, band, lag, pdl, split, bias});
}

template <int WIDTH, int CTAS, Epilogue EPILOGUE, Numbers NUMBERS>
__global__ void __launch_bounds__(384, 1)
    gemm_fp8(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap residual_map, int m, int n,
             int k, int band, int lag, int pdl, const float* w_scales, const float* x_scales, int x_pitch) {
  run<Shape<WIDTH, CTAS, false, NUMBERS>, EPILOGUE>(
      Arguments{&x_map, &w_map, &out_map, &residual_map, m, n, k, band, lag, pdl, 0, nullptr,
                Scales{w_scales, x_scales, x_pitch, (k + 127) / 128}});
}
