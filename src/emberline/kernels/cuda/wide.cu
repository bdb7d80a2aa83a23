// y[m, n] = x[m, k] w[n, k]^T for dozens of rows of x and up to 256, by Hopper's warpgroup products: still the weights'
// time, or not much more.
//
// Who owns what. A product is y^T = w x^T: a CTA takes 64 GROUPS rows of w, a warpgroup 64 of them, and all COLUMNS
// rows of x, in steps of 64 k. One warp fetches into a ring of slots, a tile of x and one of w each, 128 bytes a row,
// swizzled; rows past n read as zero, rows past m are left out. Where n is large a CTA goes from tile to tile, and the
// ring with it. Where it is small `split` CTAs share a tile: each sums its part of k, then each finishes some of the
// outputs. They are a cluster, or meet in the L2: apart.cuh has that.
//
// With 256 rows of x a step's tile of x is twice that of 128 rows of w, and the L2 would have to hand out 48 KiB for 4
// MFLOP, more than it can. So `share` CTAs of a cluster stand below each other: each fetches a part of x for all.
//
// Packed weights come as the units of a tile's rows, and each warp decodes its own into registers: as a tile in shared
// memory they would be written and read once more, more than its bandwidth has to give beside the products.
//
// Order of sums. An output is the sum over the parts of k, in order, of what each added up step by step: it depends on
// n, k and `split`, not on m, on the row of x, on GROUPS, `share`, the stages or the grid, nor on whether weights are
// packed.
//
// Barriers. FULL: one arrival, with the bytes of a slot, from whichever CTA they come; EMPTY: one arrival of each
// computing warp of those that share x, as what a CTA fetches is written to all of them. Use u of a slot has parity
// u & 1: a warpgroup waits for FULL with it, the fetcher for EMPTY with the other, which a new barrier has already
// passed. No bytes can come early for the use after: their fetcher has seen this CTA's warps leave the slot.
#include "common.cuh"
#include "wgmma.cuh"
#include "uw12.cuh"
#include "wide.cuh"
#include "global_exchange.cuh"

// -- weights ----------------------------------------------------------------------------------------------------------

DEVICE void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, int u, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "l"(policy) : "memory");
}
DEVICE void copy_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Where weights come from: the bytes of 64 k of a tile, the request for them, and what else to ask for ahead.
template <class S> struct PlainRows {
  const TensorMap* map;
  bool gated;
  DEVICE void prepare() const { prefetch_map(map); }
  DEVICE u32 bytes(int) const { return S::W_BYTES; }
  DEVICE void fetch(u32 to, int tile, int unit, u32 barrier, u64 policy) const {
    const int k = 64 * unit;
    if (gated) {  // see Outputs::row
      copy_tile(to, map, k, 0, 0, S::ROWS / 32 * tile, barrier, policy);
      copy_tile(to + S::W_BYTES / 2, map, k, 8, 0, S::ROWS / 32 * tile, barrier, policy);
    } else {
      copy_tile(to, map, k, S::ROWS * tile, barrier, policy);
    }
  }
  DEVICE void ask_for_headers(int) const {}
};
template <class S> struct PackedUnits {
  const u8 *planes, *headers;
  int n, units, stride;  // 64 k of all; bytes of a header
  DEVICE void prepare() const {}
  DEVICE int groups(int tile) const { return max(0, min(S::GROUPS, n / 64 - S::GROUPS * tile)); }
  DEVICE u32 bytes(int tile) const { return groups(tile) * S::GROUP_BYTES; }
  DEVICE void fetch(u32 to, int tile, int unit, u32 barrier, u64 policy) const {
    const u8* const from = planes + unit_offset(S::WARPS * tile, unit, units);
#pragma unroll 1
    for (int i = 0; i < groups(tile); i++)
      copy_bytes(to + i * S::GROUP_BYTES, from + i64(i) * units * S::GROUP_BYTES, S::GROUP_BYTES, barrier, policy);
  }
  // Of 16 rows; of others where there are none, for warps whose sums nobody wants.
  DEVICE const u8* header(int block) const { return headers + i64(min(block, n / 16 - 1)) * stride; }
  DEVICE void ask_for_headers(int tile) const {
    if (groups(tile)) copy_to_l2(header(S::WARPS * tile), 4 * groups(tile) * stride);
  }
};

// What a warp needs of its 16 rows' header: the scales, and the escapes of its part of k one after the other. It reads
// them from global memory, 32 escapes and where those of 64 units end at a time, and the next 32 escapes are on their
// way: shared memory is for the ring.
struct Header {
  const u8* at;
  int from, units, all;  // the part of k, and k / 64
  u32 scale, scale8;
  u32 ends;         // lane j: where the escapes of units j and 32 + j of 64 end
  u32 some[2];      // which of these units have any
  u32 held, later;  // lane j: escape j of the 32 at hand, and of the next
  u32 next, last;

  DEVICE u32 start(int unit) const {
    return reinterpret_cast<const u16*>(at + STARTS_OFFSET)[u32(from + min(unit, units))];
  }
  DEVICE u32 escape(u32 i) const { return i < last ? reinterpret_cast<const u32*>(at + escapes_offset(all))[i] : 0; }
  DEVICE void look(int unit, int lane) {
    const u32 end = start(unit + lane + 1), end32 = start(unit + 32 + lane + 1);
    ends = end | end32 << 16;
    some[0] = __ballot_sync(ALL_LANES, start(unit + lane) != end);
    some[1] = __ballot_sync(ALL_LANES, start(unit + 32 + lane) != end32);
  }
  DEVICE void open(const u8* header, int lane) {
    at = header;
    scale = reinterpret_cast<const u32*>(at)[lane / 4];
    scale8 = reinterpret_cast<const u32*>(at)[lane / 4 + 8];
    look(0, lane);
    next = start(0), last = start(units);
    held = escape((next & ~31u) + lane);
    later = escape((next & ~31u) + 32 + lane);
  }
  // Where the escapes of unit i of the part end. By the whole warp, which has looked at the 64 units around it.
  DEVICE u32 end(int i) const {
    const u32 two = __shfl_sync(ALL_LANES, ends, i % 32);
    return i & 32 ? two >> 16 : two & 0xffff;
  }
  // Into a decoded unit, those before `end` that were not put yet: there are some, and units come one after the other.
  DEVICE void put(u32 (&a)[4][4], u32 end, int lane) {
#pragma unroll 1
    do {
      restore_escape(a, __shfl_sync(ALL_LANES, held, next % 32), lane);
      if (++next % 32 == 0) held = later, later = escape(next + 32 + lane);
    } while (next < end);
  }
};

// -- the ring ---------------------------------------------------------------------------------------------------------

// The steps of a CTA: `units` of each of its tiles, which lie `stride` apart.
struct Steps {
  int tile, stride, tiles;
  int from, units;  // the part of k
  DEVICE int count() const { return (tiles - tile + stride - 1) / stride * units; }
};

// Step after step into the ring; by a warp, whose `leader` asks. `early`: weights are asked for at once, x when the
// kernel before ended.
template <class S, class Weights>
DEVICE void fetch(Ring ring, const Weights& weights, const TensorMap* x_map, Steps steps, bool pdl, bool leader) {
  const u64 once = l2_evict_first(), often = l2_evict_last();
  const int count = steps.count(), ahead = pdl ? min(ring.stages, count) : 0;
  int tile = steps.tile, unit = 0;
  const auto fetch_x = [&](int stage, int unit) {
    const u32 at = ring.slots + stage * S::SLOT, barrier = ring.full + 8 * stage;
    const int k = 64 * (steps.from + unit);
    if (S::LARGE && ring.sharing.some()) {
      const int row = ring.sharing.rows * ring.sharing.mine;
      copy_tile_multicast(at + 128 * row, x_map, k, row, barrier, often, ring.sharing);
    } else {
      copy_tile(at, x_map, k, 0, barrier, often);
    }
  };
  const auto fetch_w = [&] {
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES, barrier = ring.full + 8 * ring.stage;
    weights.fetch(at, tile, steps.from + unit, barrier, once);
    ring.advance();
    if (++unit < steps.units) return;
    unit = 0, tile += steps.stride;
    if (tile < steps.tiles) weights.ask_for_headers(tile);
  };
#pragma unroll 1
  for (int i = 0; leader && i < ahead; i++) {
    barrier_expect_bytes(ring.full + 8 * ring.stage, ring.sharing.bytes() + weights.bytes(tile));
    fetch_w();
  }
  __syncwarp();
  if (S::LARGE && ring.sharing.some()) see_all();
  wait_for_previous_kernel();
  if (!leader) return;
#pragma unroll 1
  for (int stage = 0, j = 0; stage < ahead; stage++) {
    fetch_x(stage, j);
    if (++j == steps.units) j = 0;
  }
#pragma unroll 1
  for (int i = ahead; i < count; i++) {
    barrier_wait_without_trap<S>(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    barrier_expect_bytes(ring.full + 8 * ring.stage, ring.sharing.bytes() + weights.bytes(tile));
    fetch_x(ring.stage, unit);
    fetch_w();
  }
}

// A tile's sums. The next step's products are issued before the last one's slot is given back: it takes two slots. The
// tile's last slot is still held at the end.
template <class S>
DEVICE int add_up(float (&d)[S::COLUMNS / 2], Ring& ring, int units, int warp, int lane) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix_descriptor(at), w = matrix_descriptor(at + S::X_BYTES + warp / 4 * 8192);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, w + 2 * step, x + 2 * step, step ? 1 : i);
    wgmma_commit();
    wgmma_wait<1>();
    if (i) ring.give_back<S>(last, lane);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  order_after_wait(d);
  return last;
}

// The same of packed weights. All warps of a group come to the same products in the same order, whatever each has to
// patch. Large tiles have two sets of registers: a unit is decoded while the products of the one before run. Others
// have one, and decode after them: other groups' run meanwhile.
template <class S>
DEVICE int add_up(float (&d)[S::COLUMNS / 2], Ring& ring, Header& header, int units, int warp, int lane) {
  int last = 0;
  u32 sets[S::SETS][4][4], mine = S::X_BYTES + warp * UNIT_BYTES + 16 * lane;
  asm volatile("" : "+r"(mine));  // kept, not computed again for every unit
  const auto step = [&](u32 (&a)[4][4], int i, bool patched) {
    barrier_wait_without_trap<S>(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    Unit unit;
    unit.load_shared(at + mine, 0);
    if (S::SETS == 1) {
      wgmma_wait<0>();
      if (i) ring.give_back<S>(last, lane);
    }
    decode_unit(a, unit, header.scale, header.scale8);
    if (patched) header.put(a, header.end(i), lane);
    const u64 x = matrix_descriptor(at);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma(d, a[step], x + 2 * step, step ? 1 : i);
    wgmma_commit();
    if (S::SETS == 2) {
      wgmma_wait<1>();
      if (i) ring.give_back<S>(last, lane);
    }
    last = ring.stage;
    ring.advance();
  };
#pragma unroll 1
  for (int first = 0; first < units; first += 32) {
    if (first && first % 64 == 0) header.look(first, lane);
    const int until = min(first + 32, units);
    u32 some = first & 32 ? header.some[1] : header.some[0];
#pragma unroll 1
    for (int i = first; i < until; i += S::SETS, some >>= S::SETS) {
      step(sets[0], i, some & 1);
      if (S::SETS == 2 && i + 1 < until) step(sets[S::SETS - 1], i + 1, some & 2);
    }
  }
  wgmma_wait<0>();
  order_after_wait(d);
  return last;
}

// -- the kernel -------------------------------------------------------------------------------------------------------

struct Call {
  void* out;
  const bf16* residual;
  const float* bias;
  int n, k, m, stages, split, share, end, pdl;
  Table table;  // null: parts are clusters
  DEVICE bool apart() const { return table.sums; }
};

// Tile after tile, by a warp that computes.
template <class S, class Weights>
DEVICE void compute(Ring ring, const Weights& weights, const Steps& steps, const Call& call, int index, int warp,
                    int lane) {
  const int split = call.split, end = call.end;
  Header header{nullptr, steps.from, steps.units, call.k / 64};
  if constexpr (S::PACKED) header.open(weights.header(S::WARPS * steps.tile + warp), lane);
  if (S::LARGE && ring.sharing.some()) see_all();
  wait_for_previous_kernel();
  float d[S::COLUMNS / 2];
#pragma unroll 1
  for (int tile = steps.tile; tile < steps.tiles; tile += steps.stride) {
    int last, warp_ = warp, lane_ = lane;
    if constexpr (S::PACKED) {
      asm volatile("" : "+r"(warp_), "+r"(lane_));  // what follows from them takes no registers from tile to tile
      if (tile != steps.tile) header.open(weights.header(S::WARPS * tile + warp), lane_);
      last = add_up<S>(d, ring, header, steps.units, warp, lane_);
    } else {
      last = add_up<S>(d, ring, steps.units, warp, lane_);
    }
    const auto with_outputs = [&](auto then) {
      if (end == STORE) then(Outputs<S, STORE>{call.out, call.residual, call.bias, call.n, call.m});
      else if (end == STORE_F32) then(Outputs<S, STORE_F32>{call.out, call.residual, call.bias, call.n, call.m});
      else if (end == ADD) then(Outputs<S, ADD>{call.out, call.residual, call.bias, call.n, call.m});
      else then(Outputs<S, GATED>{call.out, call.residual, call.bias, call.n, call.m});
    };
    if constexpr (S::PACKED) {  // for plain weights clusters are faster
      if (call.apart()) {
        const int fragment = tile * S::WARPS + warp_;
        finish_apart<S>(d, call.table, fragment, index, split, call.m, lane_, [&](float (&c)[16], int quad) {
          with_outputs([&](auto outputs) {
            if constexpr (outputs.END == GATED) return;  // warps would have to trade before
            outputs.ask(outputs.row(tile, warp_), quad, lane_);
            outputs.finish(c, outputs.row(tile, warp_), quad, lane_);
          });
        });
        return;  // there is no other tile
      }
    }
    with_outputs([&](auto outputs) {
      if constexpr (S::PACKED && outputs.END == GATED) {
        if (split == 1) return finish_in_pairs(d, outputs, ring, last, tile, warp_, lane_);
      }
      ring.give_back<S>(last, lane_);
      if (split > 1) finish_together(d, outputs, Part{index, split, ring.slots, ring.sharing}, tile, warp_, lane_);
      else if constexpr (!(S::PACKED && outputs.END == GATED)) finish_alone(d, outputs, tile, warp_, lane_);
    });
  }
}

// Shared memory: the ring, then its barriers. The grid: `split` CTAs for each tile; where that is 1, a CTA for some. A
// cluster: those of `share` tiles, one below the other; none of parts that are apart. `early`: launched while the
// kernel before may still run.
template <class S, class Weights> DEVICE void run(const Weights& weights, const TensorMap* x_map, const Call& call) {
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int stages = call.stages, split = call.split, share = S::LARGE ? call.share : 1;
  const int cluster = blockIdx.x / (split * share), rank = blockIdx.x % (split * share);
  const int index = rank / share, units = call.k / 64, from = units * index / split;
  const Sharing sharing{share, rank % share, call.apart() ? 0 : index * share, (call.m + 8 * share - 1) / (8 * share) * 8};
  const Ring ring{base, base + stages * S::SLOT, base + stages * (S::SLOT + 8), stages, sharing};
  const int tiles = (call.n + S::ROWS * share - 1) / (S::ROWS * share) * share;  // as many for each
  const Steps steps{cluster * share + sharing.mine, int(gridDim.x) / split, tiles, from,
                    units * (index + 1) / split - from};
  if (threadIdx.x == 32 * S::WARPS) {
    weights.prepare(), prefetch_map(x_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, S::WARPS * share);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (S::LARGE && sharing.some()) be_seen();
  if (warp >= S::WARPS) {
    if (S::TRADES) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    if (warp == S::WARPS) fetch<S>(ring, weights, x_map, steps, call.pdl, lane == 0);
    else if (S::LARGE && sharing.some()) see_all();
    __syncwarp();
    wait_for_previous_kernel();
    if (split > 1 && !call.apart()) cluster_sync(), cluster_sync();
    else if (S::LARGE && sharing.some()) cluster_sync();  // a CTA that has ended can be told nothing
  } else {
    if (S::TRADES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    compute<S>(ring, weights, steps, call, index, warp, lane);
    __syncwarp();
    if (S::LARGE && sharing.some() && split == 1) cluster_sync();
  }
}

template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(threads_of(GROUPS, COLUMNS), 1)
    wide(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, void* out,
         const bf16* residual, const float* bias, int n, int k, int m, int stages, int split, int share, int end,
         int pdl) {
  using S = Shape<GROUPS, COLUMNS, false>;
  run<S>(PlainRows<S>{&w_map, end == GATED}, &x_map, Call{out, residual, bias, n, k, m, stages, split, share, end, pdl});
}

// With few registers, two CTAs share a multiprocessor where shared memory lets them.
constexpr int packed_ctas(int groups, int columns) { return groups <= 2 && groups * columns <= 128 ? 2 : 1; }

template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(threads_of(GROUPS, COLUMNS), packed_ctas(GROUPS, COLUMNS))
    wide_packed(const u8* planes, const u8* headers, int stride, const __grid_constant__ TensorMap x_map, void* out,
                const bf16* residual, const float* bias, int n, int k, int m, int stages, int split, int share,
                int end, int pdl, float4* sums, u32* words, int looks) {
  using S = Shape<GROUPS, COLUMNS, true>;
  run<S>(PackedUnits<S>{planes, headers, n, k / 64, stride}, &x_map,
         Call{out, residual, bias, n, k, m, stages, split, share, end, pdl, Table{sums, words, looks}});
}
