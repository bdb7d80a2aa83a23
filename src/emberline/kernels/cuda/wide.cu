// y[m, n] = x[m, k] w[n, k]^T for dozens of rows of x and up to 256, by Hopper's wgmma. Reading the weights takes most
// of the time, or not much less than the arithmetic.
//
// Tiles. The product is computed as y^T = w x^T: a CTA has 64 GROUPS rows of w, a warpgroup 64 of them, and all COLUMNS
// rows of x, in steps of 64 k. One producer warp fetches into a ring of slots, each with a tile of x and one of w, 128
// bytes per row, swizzled. Rows beyond n are read as zero, rows beyond m are not fetched. If n is large, a CTA computes
// tile after tile while the ring runs on. If n is small, `split` CTAs share a tile: each sums its part of k, then each
// finishes some of the outputs. They are a cluster, or exchange sums in global memory (global_exchange.cuh).
//
// Shared x. With 256 rows of x, a step's tile of x is twice as large as 128 rows of w, and the L2 would have to deliver
// 48 KiB for 4 MFLOP, more than it can. So `share` CTAs of a cluster with different rows of w fetch a part of x each
// and multicast it.
//
// Packed weights are fetched as the units of a tile's rows, and each warp decodes its own units into registers. Decoded
// to shared memory they would be written and read once more, for which its bandwidth does not suffice beside the
// products.
//
// Order of sums. An output is the sum over the parts of k, in order, of each part's sum step by step. It depends on n,
// k and `split`, not on m, the row of x, GROUPS, `share`, the stages, the grid, or on whether weights are packed.
//
// Barriers. FULL: one arrival plus the bytes of a slot, from any CTA. EMPTY: one arrival of each consumer warp of the
// CTAs that share x, because what a CTA fetches is written to all of them. Use u of a slot has parity u & 1: consumers
// wait for FULL with this parity, the producer waits for EMPTY with the opposite, which a new barrier has already
// passed. Bytes of the next use cannot arrive early: their producer has waited until this CTA's warps released the
// slot.
#include "common.cuh"
#include "wgmma.cuh"
#include "uw12.cuh"
#include "wgmma_products.cuh"
#include "wide.cuh"
#include "global_exchange.cuh"

// -- weights ----------------------------------------------------------------------------------------------------------

DEVICE void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, int u, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "l"(policy) : "memory");
}
DEVICE void prefetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Sources of weights: the bytes of 64 k of a tile, their copy into a slot, and the prefetch of headers.
template <class S> struct PlainRows {
  const TensorMap* map;
  bool gated;
  DEVICE void prefetch() const { prefetch_map(map); }
  DEVICE u32 bytes(int) const { return S::W_BYTES; }
  DEVICE void fetch(u32 to, int tile, int unit, u32 barrier, u64 policy) const {
    const int k = S::UNIT_K * unit;
    if (gated) {  // see Outputs::row
      copy_tile(to, map, k, 0, 0, S::ROWS / 32 * tile, barrier, policy);
      copy_tile(to + S::W_BYTES / 2, map, k, 8, 0, S::ROWS / 32 * tile, barrier, policy);
    } else {
      copy_tile(to, map, k, S::ROWS * tile, barrier, policy);
    }
  }
  DEVICE void prefetch_headers(int) const {}
};
template <class S> struct PackedUnits {
  const u8 *planes, *headers;
  int n, units, stride;  // units: k / 64; stride: bytes of a header
  DEVICE void prefetch() const {}
  DEVICE int groups(int tile) const { return max(0, min(S::GROUPS, n / 64 - S::GROUPS * tile)); }
  DEVICE u32 bytes(int tile) const { return groups(tile) * S::GROUP_BYTES; }
  DEVICE void fetch(u32 to, int tile, int unit, u32 barrier, u64 policy) const {
    const u8* const from = planes + unit_offset(S::WARPS * tile, unit, units);
#pragma unroll 1
    for (int i = 0; i < groups(tile); i++)
      copy_bytes(to + i * S::GROUP_BYTES, from + i64(i) * units * S::GROUP_BYTES, S::GROUP_BYTES, barrier, policy);
  }
  // The header of 16 rows. Warps beyond the last row get the last header; their sums are not used.
  DEVICE const u8* header(int block) const { return headers + i64(min(block, n / 16 - 1)) * stride; }
  DEVICE void prefetch_headers(int tile) const {
    if (groups(tile)) prefetch_to_l2(header(S::WARPS * tile), 4 * groups(tile) * stride);
  }
};

// A warp's state of its 16 rows' header: the scales, and the escapes of its part of k in order. It is read from global
// memory, because shared memory is needed for the ring: the end indices of 64 units at a time, and 32 escapes at a time
// while the next 32 are being loaded.
struct Header {
  const u8* at;
  int from, units, total_units;  // first unit and number of units of the part; k / 64
  u32 scale, scale8;
  u32 ends;         // lane j: end indices of the escapes of units j and 32 + j of 64
  u32 has_escapes[2];      // masks of the units that have escapes
  u32 current, following;  // lane j: escape j of the current 32, and of the next 32
  u32 next, last;   // index of the next escape, and the end of the part's escapes

  DEVICE u32 start(int unit) const {
    return reinterpret_cast<const u16*>(at + STARTS_OFFSET)[u32(from + min(unit, units))];
  }
  DEVICE u32 escape(u32 i) const { return i < last ? reinterpret_cast<const u32*>(at + escapes_offset(total_units))[i] : 0; }
  DEVICE void read_ends(int unit, int lane) {
    const u32 end = start(unit + lane + 1), end32 = start(unit + 32 + lane + 1);
    ends = end | end32 << 16;
    has_escapes[0] = __ballot_sync(ALL_LANES, start(unit + lane) != end);
    has_escapes[1] = __ballot_sync(ALL_LANES, start(unit + 32 + lane) != end32);
  }
  DEVICE void open(const u8* header, int lane) {
    at = header;
    scale = reinterpret_cast<const u32*>(at)[lane / 4];
    scale8 = reinterpret_cast<const u32*>(at)[lane / 4 + 8];
    read_ends(0, lane);
    next = start(0), last = start(units);
    current = escape((next & ~31u) + lane);
    following = escape((next & ~31u) + 32 + lane);
  }
  // Returns the end index of the escapes of unit i. Called by the whole warp, after read_ends for the 64 units around
  // it.
  DEVICE u32 end(int i) const {
    const u32 two = __shfl_sync(ALL_LANES, ends, i % 32);
    return i & 32 ? two >> 16 : two & 0xffff;
  }
  // Restores the escapes up to `end` in a decoded unit. There must be at least one, and units must be processed in
  // order.
  DEVICE void restore_escapes(u32 (&a)[4][4], u32 end, int lane) {
#pragma unroll 1
    do {
      restore_escape(a, __shfl_sync(ALL_LANES, current, next % 32), lane);
      if (++next % 32 == 0) current = following, following = escape(next + 32 + lane);
    } while (next < end);
  }
};

// -- the ring ---------------------------------------------------------------------------------------------------------

// The steps of a CTA: `units` steps for each of its tiles, which are `stride` apart.
struct Steps {
  int tile, stride, tiles;
  int from, units;  // first unit and number of units of the part of k
  DEVICE int count() const { return (tiles - tile + stride - 1) / stride * units; }
};

// Fetches step after step into the ring. Called by a warp, whose `leader` issues the copies. `pdl`: weights are fetched
// at once, x after the preceding kernel has ended.
template <class S, class Weights>
DEVICE void fetch(Ring ring, const Weights& weights, const TensorMap* x_map, Steps steps, bool pdl, bool leader) {
  const u64 evict_first = l2_evict_first(), evict_last = l2_evict_last();
  const int count = steps.count(), prefetched = pdl ? min(ring.stages, count) : 0;
  int tile = steps.tile, unit = 0;
  const auto fetch_x = [&](int stage, int unit) {
    const u32 at = ring.slots + stage * S::SLOT, barrier = ring.full + 8 * stage;
    const int k = S::UNIT_K * (steps.from + unit);
    if (S::LARGE && ring.sharing.is_shared()) {
      const int row = ring.sharing.rows * ring.sharing.index;
      copy_tile_multicast(at + 128 * row, x_map, k, row, barrier, evict_last, ring.sharing);
    } else {
      copy_tile(at, x_map, k, 0, barrier, evict_last);
    }
  };
  const auto fetch_w = [&] {
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES, barrier = ring.full + 8 * ring.stage;
    weights.fetch(at, tile, steps.from + unit, barrier, evict_first);
    ring.advance();
    if (++unit < steps.units) return;
    unit = 0, tile += steps.stride;
    if (tile < steps.tiles) weights.prefetch_headers(tile);
  };
#pragma unroll 1
  for (int i = 0; leader && i < prefetched; i++) {
    barrier_expect_bytes(ring.full + 8 * ring.stage, ring.sharing.bytes() + weights.bytes(tile));
    fetch_w();
  }
  __syncwarp();
  if (S::LARGE && ring.sharing.is_shared()) cluster_wait();
  wait_for_previous_kernel();
  if (!leader) return;
#pragma unroll 1
  for (int stage = 0, j = 0; stage < prefetched; stage++) {
    fetch_x(stage, j);
    if (++j == steps.units) j = 0;
  }
#pragma unroll 1
  for (int i = prefetched; i < count; i++) {
    barrier_wait_without_trap<S>(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    barrier_expect_bytes(ring.full + 8 * ring.stage, ring.sharing.bytes() + weights.bytes(tile));
    fetch_x(ring.stage, unit);
    fetch_w();
  }
}

// Computes a tile's sums. The next step's products are issued before the previous slot is released, which needs two
// slots. The tile's last slot is not yet released at the end; its index is returned.
template <class S>
DEVICE int accumulate_tile(float (&d)[S::COLUMNS / 2], Ring& ring, int units, int warp, int lane) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at), w = matrix_descriptor(at + S::X_BYTES + warp / 4 * 8192);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      if constexpr (S::FP8) wgmma_fp8(d, w + 2 * step, x + 2 * step, step ? 1 : i);
      else wgmma(d, w + 2 * step, x + 2 * step, step ? 1 : i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (i) ring.release_slot<S>(last, lane);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  return last;
}

// Scales of float8 codes.
struct Fp8Scales {
  const float *w, *x;  // BLOCKS_SCALED: [n / 16][units] and [units][x_pitch], otherwise [n] and [m]
  int x_pitch, units;
};

// The factors of the sums of one step: the scale of its block of w, for each half of a fragment's rows, and those of its
// columns.
template <class S> struct StepScales {
  float w[2];
  float2 x[S::BLOCKS];
  // `rows`: offsets of the halves' blocks in the scales of w.
  DEVICE void load(const Fp8Scales& from, const int (&rows)[2], int unit, int lane) {
    w[0] = from.w[rows[0] + unit], w[1] = from.w[rows[1] + unit];
#pragma unroll
    for (int j = 0; j < S::BLOCKS; j++) {
      const float* const at = from.x + i64(unit) * from.x_pitch + 8 * j + 2 * (lane % 4);
      asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x[j].x), "=f"(x[j].y) : "l"(at) : "memory");
    }
  }
};

// The same if blocks have scales: the sums of each step are multiplied by them, and added to others in float32.
template <class S>
DEVICE int accumulate_blocks(float (&total)[S::COLUMNS / 2], Ring& ring, const Fp8Scales& scales, const int (&rows)[2],
                             int from, int units, int warp, int lane) {
  float d[S::COLUMNS / 2];
  int last = 0;
#pragma unroll
  for (int i = 0; i < S::COLUMNS / 2; i++) total[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    StepScales<S> factors;
    factors.load(scales, rows, from + i, lane);
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at), w = matrix_descriptor(at + S::X_BYTES + warp / 4 * 8192);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_fp8(d, w + 2 * step, x + 2 * step, step ? 1 : 0);
    wgmma_commit();
    wgmma_wait<0>();
    order_after_wait(d);
    last = ring.stage;
    if (i + 1 < units) ring.release_slot<S>(last, lane);
    ring.advance();
#pragma unroll
    for (int j = 0; j < S::COLUMNS / 2; j++)
      total[j] += d[j] * (factors.w[j / 2 % 2] * (j % 2 ? factors.x[j / 4].y : factors.x[j / 4].x));
  }
  return last;
}

// The same for packed weights. All warps of a warpgroup issue the same products in the same order, whatever escapes
// each has. Large tiles have two sets of registers: a unit is decoded while the products of the previous one run.
// Others have one set and decode after the products, while those of other warpgroups run.
template <class S>
DEVICE int accumulate_tile(float (&d)[S::COLUMNS / 2], Ring& ring, Header& header, int units, int warp, int lane) {
  int last = 0;
  u32 sets[S::DECODE_SETS][4][4], unit_address = S::X_BYTES + warp * UNIT_BYTES + 16 * lane;
  asm volatile("" : "+r"(unit_address));  // keeps the value in a register instead of recomputing it for every unit
  const auto step = [&](u32 (&a)[4][4], int i, bool restores) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    Unit unit;
    unit.load_shared(at + unit_address, 0);
    if (S::DECODE_SETS == 1) {
      wgmma_wait<0>();
      if (i) ring.release_slot<S>(last, lane);
    }
    decode_unit(a, unit, header.scale, header.scale8);
    if (restores) header.restore_escapes(a, header.end(i), lane);
    const u64 x = matrix_descriptor(at);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, a[step], x + 2 * step, step ? 1 : i);
    wgmma_commit();
    if (S::DECODE_SETS == 2) {
      wgmma_wait<1>();
      if (i) ring.release_slot<S>(last, lane);
    }
    last = ring.stage;
    ring.advance();
  };
#pragma unroll 1
  for (int first = 0; first < units; first += 32) {
    if (first && first % 64 == 0) header.read_ends(first, lane);
    const int until = min(first + 32, units);
    u32 mask = first & 32 ? header.has_escapes[1] : header.has_escapes[0];
#pragma unroll 1
    for (int i = first; i < until; i += S::DECODE_SETS, mask >>= S::DECODE_SETS) {
      step(sets[0], i, mask & 1);
      if (S::DECODE_SETS == 2 && i + 1 < until) step(sets[S::DECODE_SETS - 1], i + 1, mask & 2);
    }
  }
  wgmma_wait<0>();
  order_after_wait(d);
  return last;
}

// -- the kernel -------------------------------------------------------------------------------------------------------

struct Arguments {
  void* out;
  const bf16* residual;
  const float* bias;
  int n, k, m, stages, split, share, epilogue, pdl;
  Exchange exchange;  // null: the parts of k are a cluster
  Fp8Scales scales;
  DEVICE bool is_unclustered() const { return exchange.sums; }
};

// Computes tile after tile. Called by consumer warps.
template <class S, class Weights>
DEVICE void compute(Ring ring, const Weights& weights, const Steps& steps, const Arguments& args, int index, int warp,
                    int lane) {
  const int split = args.split, epilogue = args.epilogue;
  Header header{nullptr, steps.from, steps.units, args.k / 64};
  if constexpr (S::PACKED) header.open(weights.header(S::WARPS * steps.tile + warp), lane);
  if (S::LARGE && ring.sharing.is_shared()) cluster_wait();
  wait_for_previous_kernel();
  float d[S::COLUMNS / 2];
#pragma unroll 1
  for (int tile = steps.tile; tile < steps.tiles; tile += steps.stride) {
    int last, warp_ = warp, lane_ = lane;
    if constexpr (S::PACKED) {
      asm volatile("" : "+r"(warp_), "+r"(lane_));  // keeps derived values from occupying registers across tiles
      if (tile != steps.tile) header.open(weights.header(S::WARPS * tile + warp), lane_);
      last = accumulate_tile<S>(d, ring, header, steps.units, warp, lane_);
    } else if constexpr (S::BLOCKS_SCALED) {
      const bool gated = epilogue == GATED;
      const int row = gated ? Outputs<S, GATED>::row(tile, warp) : Outputs<S, STORE>::row(tile, warp);
      const int blocks = args.n / 16 - 1, units = args.scales.units;  // sums beyond the last row are not used
      const int rows[2] = {min(row / 16, blocks) * units, min(row / 16 + gated, blocks) * units};
      last = accumulate_blocks<S>(d, ring, args.scales, rows, steps.from, steps.units, warp, lane_);
    } else {
      last = accumulate_tile<S>(d, ring, steps.units, warp, lane_);
    }
    const float* const w_scales = S::BLOCKS_SCALED ? nullptr : args.scales.w;
    const float* const x_scales = args.scales.x;
    const auto with_outputs = [&](auto then) {
      if (epilogue == STORE) then(Outputs<S, STORE>{args.out, args.residual, args.bias, args.n, args.m, w_scales, x_scales});
      else if (epilogue == STORE_F32) then(Outputs<S, STORE_F32>{args.out, args.residual, args.bias, args.n, args.m, w_scales, x_scales});
      else if (epilogue == ADD) then(Outputs<S, ADD>{args.out, args.residual, args.bias, args.n, args.m, w_scales, x_scales});
      else then(Outputs<S, GATED>{args.out, args.residual, args.bias, args.n, args.m, w_scales, x_scales});
    };
    if constexpr (S::PACKED || S::FP8) {  // plain weights always use clusters, which are faster
      if (args.is_unclustered()) {
        const int fragment = tile * S::WARPS + warp_;
        finish_by_exchange<S>(d, args.exchange, fragment, index, split, args.m, lane_, [&](float (&c)[16], int quad) {
          with_outputs([&](auto outputs) {
            // Not supported: warps would have to exchange gates and ups first.
            if constexpr (outputs.EPILOGUE == GATED) return;
            outputs.load_residual(outputs.row(tile, warp_), quad, lane_);
            outputs.finish(c, outputs.row(tile, warp_), quad, lane_);
          });
        });
        return;  // with a split, a CTA has one tile
      }
    }
    with_outputs([&](auto outputs) {
      if constexpr (S::PACKED && outputs.EPILOGUE == GATED) {
        if (split == 1) return finish_in_pairs(d, outputs, ring, last, tile, warp_, lane_);
      }
      ring.release_slot<S>(last, lane_);
      if (split > 1) finish_in_cluster(d, outputs, ClusterPart{index, split, ring.slots, ring.sharing}, tile, warp_,
                                       lane_);
      else if constexpr (!(S::PACKED && outputs.EPILOGUE == GATED)) finish_alone(d, outputs, tile, warp_, lane_);
    });
  }
}

// Shared memory: the ring, then its barriers. The grid has `split` CTAs for each tile; if `split` is 1, a CTA has
// several tiles. A cluster consists of the CTAs of `share` tiles with consecutive rows of w; unclustered parts have
// none. `pdl`: launched while the preceding kernel may still run.
template <class S, class Weights> DEVICE void run(const Weights& weights, const TensorMap* x_map,
                                                  const Arguments& args) {
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int stages = args.stages, split = args.split, share = S::LARGE ? args.share : 1;
  const int cluster = blockIdx.x / (split * share), rank = blockIdx.x % (split * share);
  const int index = rank / share, units = (args.k + S::UNIT_K - 1) / S::UNIT_K, from = units * index / split;
  const SharedX sharing{share, rank % share, args.is_unclustered() ? 0 : index * share,
                        (args.m + 8 * share - 1) / (8 * share) * 8};
  const Ring ring{base, base + stages * S::SLOT, base + stages * (S::SLOT + 8), stages, sharing};
  const int tiles = (args.n + S::ROWS * share - 1) / (S::ROWS * share) * share;  // padded to a multiple of `share`
  const Steps steps{cluster * share + sharing.index, int(gridDim.x) / split, tiles, from,
                    units * (index + 1) / split - from};
  if (threadIdx.x == 32 * S::WARPS) {
    weights.prefetch(), prefetch_map(x_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, S::WARPS * share);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (S::LARGE && sharing.is_shared()) cluster_arrive();
  if (warp >= S::WARPS) {
    if (S::TRADES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    if (warp == S::WARPS) fetch<S>(ring, weights, x_map, steps, args.pdl, lane == 0);
    else if (S::LARGE && sharing.is_shared()) cluster_wait();
    __syncwarp();
    wait_for_previous_kernel();
    if (split > 1 && !args.is_unclustered()) cluster_sync(), cluster_sync();
    // A CTA must not exit before its peers stop arriving at its barriers.
    else if (S::LARGE && sharing.is_shared()) cluster_sync();
  } else {
    if (S::TRADES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    compute<S>(ring, weights, steps, args, index, warp, lane);
    __syncwarp();
    if (S::LARGE && sharing.is_shared() && split == 1) cluster_sync();
  }
}

template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(count_threads(GROUPS, COLUMNS), 1)
    wide(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, void* out,
         const bf16* residual, const float* bias, int n, int k, int m, int stages, int split, int share,
         int epilogue, int pdl) {
  using S = Shape<GROUPS, COLUMNS, false>;
  run<S>(PlainRows<S>{&w_map, epilogue == GATED}, &x_map,
         Arguments{out, residual, bias, n, k, m, stages, split, share, epilogue, pdl});
}

// With few registers, two CTAs fit on an SM if shared memory allows.
constexpr int packed_ctas(int groups, int columns) { return groups <= 2 && groups * columns <= 128 ? 2 : 1; }

template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(count_threads(GROUPS, COLUMNS), packed_ctas(GROUPS, COLUMNS))
    wide_packed(const u8* planes, const u8* headers, int stride, const __grid_constant__ TensorMap x_map, void* out,
                const bf16* residual, const float* bias, int n, int k, int m, int stages, int split, int share,
                int epilogue, int pdl, float4* sums, u32* words, int polls) {
  using S = Shape<GROUPS, COLUMNS, true>;
  run<S>(PackedUnits<S>{planes, headers, n, k / 64, stride}, &x_map,
         Arguments{out, residual, bias, n, k, m, stages, split, share, epilogue, pdl, Exchange{sums, words, polls}});
}

// Both operands are float8. `x_map`: the codes of x. Scales: see Fp8Scales.
template <int GROUPS, int COLUMNS, bool BLOCKS_SCALED>
__global__ void __launch_bounds__(count_threads(GROUPS, COLUMNS), 1)
    wide_fp8(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* w_scales,
             const float* x_scales, int x_pitch, void* out, const bf16* residual, const float* bias, int n, int k, int m,
             int stages, int split, int share, int epilogue, int pdl, float4* sums, u32* words, int polls) {
  using S = Shape<GROUPS, COLUMNS, false, true, BLOCKS_SCALED>;
  run<S>(PlainRows<S>{&w_map, epilogue == GATED}, &x_map,
         Arguments{out, residual, bias, n, k, m, stages, split, share, epilogue, pdl, Exchange{sums, words, polls},
                   Fp8Scales{w_scales, x_scales, x_pitch, (k + 127) / 128}});
}
