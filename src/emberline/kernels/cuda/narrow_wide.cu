// y = x w^T for matrices of 4-bit codes and dozens of rows of x, by Hopper's wgmma; also for many matrices (experts) with
// as many rows each, sorted by expert.
//
// Tiles. A CTA computes one tile of y^T = w x^T: 64 rows of w in each of GROUPS warpgroups, and COLUMNS rows of x. One
// warp fetches some k of codes and of x at a time into a ring of slots. Each warp decodes 16 rows of w into registers,
// which are an operand of wgmma. If there are few tiles, the CTAs of a cluster share one: each sums a part of k, then
// each finishes some of the outputs.
//
// Order of sums. An output is the sum over the parts of k, in order, of each part's sum. It depends on n, k and the
// number of parts, not on other rows of x.
#include "common.cuh"
#include "wgmma.cuh"
#include "wgmma_products.cuh"
#include "narrow.cuh"

DEVICE float2 load_from_cluster(u32 at, u32 cta) {
  float2 x;
  asm volatile("{ .reg .u32 far;\n mapa.shared::cluster.u32 far, %2, %3;\n ld.shared::cluster.v2.f32 {%0, %1}, [far]; }"
               : "=f"(x.x), "=f"(x.y) : "r"(at), "r"(cta) : "memory");
  return x;
}
template <int THREADS> DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Shared memory: the ring, which the sums overwrite at the end, then barriers. A slot has 128 UNITS k: tiles of x, 64 k
// each with the 128-byte swizzle, then the cells of each warpgroup. An SM starts a copy in about 60 ns, so they must be
// few: all x of a slot is one, the cells of a warpgroup another.
template <class F, int GROUPS_, int WIDTH> struct WideShape {
  static constexpr int GROUPS = GROUPS_, COLUMNS = WIDTH, ROWS = 64 * GROUPS, WARPS = 4 * GROUPS, CONSUMERS = 32 * WARPS;
  static constexpr int UNITS = WIDTH > 32 ? 1 : 2;
  static constexpr u32 X_BYTES = UNITS * 256 * COLUMNS, SLOT = (X_BYTES + GROUPS * UNITS * CELL<F> + 1023) & ~1023u;
  static constexpr int PITCH = ROWS + 4;  // floats from a column's sums to the next column's
};

// The tile of a CTA, and its part of k. `x_rows`: rows of x in a slot.
struct Part {
  int tile, column_tile, expert, rows, x_rows, from, units, total_units, rank;
};

// Fetches all steps of the CTA. Called by one lane. `early`: x is fetched after the preceding kernel has ended.
template <class F, class S>
DEVICE void fetch(const Problem& p, const TensorMap* x_map, const Part& part, u32 slots, u32 full, u32 empty) {
  const u64 evict_first = l2_evict_first(), evict_last = l2_evict_last();
  const int first_group = part.column_tile * S::GROUPS, groups = min(S::GROUPS, p.blocks / 4 - first_group);
  const u8* const codes =
      p.codes + part.expert * p.expert_bytes + (i64(first_group) * part.total_units + part.from) * CELL<F>;
  const auto fetch_codes = [&](int i, int stage) {
    const u32 at = slots + stage * S::SLOT + S::X_BYTES, barrier = full + 8 * stage;
    const u32 bytes = min(S::UNITS, part.units - S::UNITS * i) * CELL<F>;
    barrier_expect_bytes(barrier, S::UNITS * 256 * part.x_rows + groups * bytes);
    for (int g = 0; g < groups; g++)
      copy_bytes(at + g * S::UNITS * CELL<F>, codes + (i64(g) * part.total_units + S::UNITS * i) * CELL<F>, bytes, barrier,
                 evict_first);
  };
  const auto fetch_x = [&](int i, int stage) {
    copy_tile(slots + stage * S::SLOT, x_map, 0, part.tile * p.tile_rows, 2 * (part.from + S::UNITS * i), full + 8 * stage,
              evict_last);
  };
  const int steps = (part.units + S::UNITS - 1) / S::UNITS, prefetched = min(p.stages, steps);
#pragma unroll 1
  for (int i = 0; i < prefetched; i++) fetch_codes(i, i);
  if (p.early) wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < prefetched; i++) fetch_x(i, i);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = prefetched; i < steps; i++) {
    barrier_wait(empty + 8 * stage, parity);
    fetch_codes(i, stage);
    fetch_x(i, stage);
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
}

// A lane's codes and scales of a unit.
template <class F> struct UnitCodes {
  F format;
  u32 words[8];
  DEVICE void load(u32 unit, int lane) {
    format.load(unit + CODE_BYTES, lane);
    const uint4 first = load_shared_16(unit + 16 * lane), second = load_shared_16(unit + 512 + 16 * lane);
    words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
    words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
  }
};

constexpr int HALF = 4;  // products of half a unit, of 16 k each

// Codes of half a unit as operands of products.
struct Fragments {
  u32 a[HALF][4];
  // Called when the products that read the registers have ended. The compiler does not know that they run until then.
  DEVICE void end_use() {
#pragma unroll
    for (int s = 0; s < HALF; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[s][i])::"memory");
  }
  template <class F> DEVICE void decode(const UnitCodes<F>& codes, int start) {
#pragma unroll
    for (int s = 0; s < HALF; s++)
      codes.format.decode(a[s], codes.words[start + s], (start + s) * F::GROUP_COUNT / 8);
  }
};

// Multiplies a warp's unit by the slot's x. All warps of a warpgroup issue the same instructions. The products of half a
// unit run while the next half is decoded, also that of the next unit. `release`: called when earlier units' products,
// which read the slots before, have ended; so a ring needs two slots. The unit's own have ended after `end_products`.
template <class F, int COLUMNS, class Release>
DEVICE void multiply_unit(float (&sums)[COLUMNS / 2], Fragments (&fragments)[2], const UnitCodes<F>& codes, u32 x,
                          u32 tile_bytes, const Release& release) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    wgmma_wait<1>();
    if (half == 1) release();
    Fragments& own = fragments[half];
    own.end_use();
    own.decode(codes, half * HALF);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < HALF; s++) wgmma(sums, own.a[s], matrix_descriptor(x + half * tile_bytes) + 2 * s, 1);
    wgmma_commit();
  }
}
template <int N> DEVICE void end_products(float (&sums)[N], Fragments (&fragments)[2]) {
  wgmma_wait<0>();
  fragments[0].end_use(), fragments[1].end_use();
  order_after_wait(sums);
}

// The same for formats whose scales multiply sums, which must have ended for each group.
template <class F, int COLUMNS>
DEVICE void multiply_groups(float (&sums)[COLUMNS / 2], const UnitCodes<F>& codes, u32 x, u32 tile_bytes) {
  constexpr int STEPS = 8 / F::GROUP_COUNT;
  const F& format = codes.format;
  const u64 tiles[2] = {matrix_descriptor(x), matrix_descriptor(x + tile_bytes)};
#pragma unroll
  for (int start = 0; start < 8; start += STEPS) {
    float group_sums[COLUMNS / 2];
    // Half of the products run while the codes of the other half are decoded.
    constexpr int PART = STEPS > 2 ? STEPS / 2 : STEPS;
#pragma unroll
    for (int part = start; part < start + STEPS; part += PART) {
      u32 a[PART][4];
#pragma unroll
      for (int s = 0; s < PART; s++) format.decode(a[s], codes.words[part + s], (part + s) * F::GROUP_COUNT / 8);
      wgmma_fence();
#pragma unroll
      for (int s = part; s < part + PART; s++)
        wgmma(group_sums, a[s - part], tiles[s / 4] + 2 * (s % 4), s > start ? 1 : 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
    order_after_wait(group_sums);
    const int group = start * F::GROUP_COUNT / 8;
    const float scale[2] = {format.scale(0, group), format.scale(1, group)};
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] += scale[i / 2 % 2] * group_sums[i];
  }
}

// Multiplies a warp's rows of w by the first COLUMNS rows of x, and stores the sums over the ring.
template <class F, class S, int COLUMNS>
DEVICE void multiply_part(const Problem& p, const Part& part, u32 base, u32 full, u32 empty, int warp, int lane) {
  const u32 own = S::X_BYTES + warp / 4 * S::UNITS * CELL<F> + warp % 4 * UNIT<F>, tile_bytes = 128 * part.x_rows;
  float sums[COLUMNS / 2] = {};
  Fragments fragments[2] = {};  // of formats whose scales multiply codes
  int stage = 0, parity = 0, previous = -1;
#pragma unroll 1
  for (int left = part.units; left > 0; left -= S::UNITS) {
    barrier_wait(full + 8 * stage, parity);
    const u32 at = base + stage * S::SLOT;
    UnitCodes<F> codes[2];
    codes[0].load(at + own, lane);
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
      if (u + 1 < S::UNITS) codes[(u + 1) % 2].load(at + own + (u + 1) * CELL<F>, lane);  // while u is multiplied
      if (u >= left) continue;
      const u32 x = at + 2 * u * tile_bytes;
      const auto release = [&] {
        if (u == 0 && lane == 0 && previous >= 0) barrier_arrive(empty + 8 * previous);
      };
      if constexpr (F::SCALES_SUMS) multiply_groups<F, COLUMNS>(sums, codes[u % 2], x, tile_bytes);
      else multiply_unit<F, COLUMNS>(sums, fragments, codes[u % 2], x, tile_bytes, release);
    }
    if (F::SCALES_SUMS && lane == 0) barrier_arrive(empty + 8 * stage);
    previous = stage;
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
  if constexpr (!F::SCALES_SUMS) end_products(sums, fragments);
  if (p.early) wait_for_previous_kernel();  // before outputs are written, which that kernel may read
  sync_consumers<S::CONSUMERS>();           // all warps have read the ring, which the sums overwrite
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2, row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + 4 * (column * S::PITCH + row)), "f"(sums[i]) : "memory");
  }
}

// Finishes this CTA's share of the tile's outputs: pairs of columns of out.
template <class S> DEVICE void finish(const Problem& p, const Part& part, u32 partials) {
  const int pairs = S::ROWS / (p.gated ? 4 : 2);
#pragma unroll 1
  for (int i = threadIdx.x + part.rank * S::CONSUMERS; i < part.rows * pairs; i += S::CONSUMERS * p.parts) {
    const int row = i / pairs, pair = i % pairs, column = 2 * (part.column_tile * pairs + pair);
    if (column >= p.width) continue;
    const int local = p.gated ? pair / 4 * 16 + 2 * (pair % 4) : 2 * pair, place = part.tile * p.tile_rows + row;
    const int assignment = p.order ? load_int(p.order + place) : place;
    const auto sum = [&](int at) {
      float2 total = load_from_cluster(partials + 4 * (row * S::PITCH + at), 0);
      for (int from = 1; from < p.parts; from++) {
        const float2 more = load_from_cluster(partials + 4 * (row * S::PITCH + at), from);
        total.x += more.x, total.y += more.y;
      }
      return total;
    };
    const float2 first = sum(local), up = p.gated ? sum(local + 8) : first;
    finish_pair(p, part.expert, column, p.keeps_order ? place : assignment, assignment, first, up);
  }
}

// CTAs that fit on an SM, if shared memory allows. More of them hide more latency: a warpgroup decodes, multiplies and
// scales in turn.
constexpr int wide_ctas(int groups, int columns) { return columns > 64 ? 1 : groups == 2 ? 2 : columns == 64 ? 3 : 4; }

template <class F, int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(128 * GROUPS + 32, wide_ctas(GROUPS, COLUMNS))
    narrow_wide(const __grid_constant__ Problem p, const __grid_constant__ TensorMap x_map,
                const __grid_constant__ TensorMap half_x_map) {
  using S = WideShape<F, GROUPS, COLUMNS>;
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const u32 full = base + p.stages * S::SLOT, empty = full + 8 * p.stages;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&x_map), prefetch_map(&half_x_map);
    for (int i = 0; i < p.stages; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, S::WARPS);
    fence_barrier_init();
  }
  __syncthreads();
  if (!p.triggers_late) let_next_kernel_start();
  if (!p.early) wait_for_previous_kernel();
  if (p.triggers_late) let_next_kernel_start();
  const int item = blockIdx.x / p.parts;
  const int row_tiles = p.order ? load_int(p.num_tiles) : (p.rows + p.tile_rows - 1) / p.tile_rows;
  if (row_tiles == 0) return wait_for_previous_kernel();  // no row selected an expert of this rank
  Part part{item % row_tiles, item / row_tiles};
  if (part.column_tile * (p.gated ? S::ROWS / 2 : S::ROWS) >= p.width) return;  // the same for the whole cluster
  part.expert = p.order ? load_int(p.tile_experts + part.tile) : 0;
  part.rows = p.order ? load_int(p.tile_counts + part.tile) : min(p.tile_rows, p.rows - part.tile * p.tile_rows);
  const bool is_half = part.rows <= COLUMNS / 2;  // many experts have far fewer rows than a tile
  part.x_rows = is_half ? min(p.x_rows, COLUMNS / 2) : p.x_rows;
  part.rank = blockIdx.x % p.parts, part.total_units = (p.k + 127) / 128;
  part.from = part.total_units * part.rank / p.parts;
  part.units = part.total_units * (part.rank + 1) / p.parts - part.from;

  if (warp == S::WARPS) {
    if (lane == 0) fetch<F, S>(p, is_half ? &half_x_map : &x_map, part, base, full, empty);
    __syncwarp();
    if (p.parts > 1) cluster_sync(), cluster_sync();
    return;
  }
  if constexpr (!F::SCALES_SUMS && COLUMNS > 32) {
    if (is_half) multiply_part<F, S, COLUMNS / 2>(p, part, base, full, empty, warp, lane);
    else multiply_part<F, S, COLUMNS>(p, part, base, full, empty, warp, lane);
  } else {
    multiply_part<F, S, COLUMNS>(p, part, base, full, empty, warp, lane);
  }
  sync_consumers<S::CONSUMERS>();
  if (p.parts > 1) cluster_sync();
  finish<S>(p, part, base);
  if (p.parts > 1) cluster_sync();  // a CTA must not exit before its peers have read its sums
}
