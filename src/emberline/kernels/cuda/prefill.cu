// Causal attention of chunks of new tokens over a paged cache, by Hopper's wgmma.
//
// CTAs are persistent. Item i is tile i / q_heads (128 queries of a request) for head i % q_heads. Tiles are sorted,
// longest first, and heads that share keys run at the same time. One producer warp fetches, and two consumer warpgroups
// compute 64 queries each. They process the keys in tiles from the diagonal backwards, so that tiles with masked
// keys come first:
//
//   producer  Q K0 K1 V0 K2 V1 ... Kn Vn-1 Vn, then the next item's Q ...   (a ring of STAGES for K, one for V)
//   consumer  S0 softmax | S1 = Q K1, O += P0 V0, softmax(S1) | S2, O += P1 V1, softmax(S2) | ... | O += Pn Vn, store
//
// The two warpgroups issue products alternately (ping-pong), so that the softmax of one overlaps with the products of
// the other. A tile whose keys are all masked for a row does not change that row, so a query's result does not depend
// on the chunking.
//
// Barriers. *_FULL: one arrival plus the bytes of a copy. *_EMPTY: one arrival of each of the 8 consumer warps. Use u
// of a slot has parity u & 1: consumers wait for FULL with this parity, the producer waits for EMPTY with the opposite,
// which a new barrier has already passed. The barriers of Q also guard the item.
#include "common.cuh"
#include "prefill_products.cuh"

constexpr int STAGES = 2;  // of each ring
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // 128 * 40 + 256 * 232 = 384 * 168, as launched

// Layers with chunks, capped scores or sinks.
struct Kinds {  // mirrored by _Kinds in prefill.py
  const float* sinks;  // [query heads]: scores that join the softmax, or null
  float sink_factor;   // log2(e) over the scale of the arguments
  float cap, factor;   // scores s become cap * tanh(x) with factor * s = 2 x log2(e); a cap of 0 leaves them unchanged
  int chunked;         // whether a query attends to the keys since the last multiple of `window`
};

struct Arguments {
  bf16* out;
  const int2* tiles;  // request, first query in its chunk; padding has request -1
  const int* query_start;
  const int* context;
  const int* tables;
  int* counters;  // items taken from the queue; CTAs that have ended. Zero between launches
  int ctas;       // CTAs that work; the others exit and leave their SMs to decode, which runs at the same time
  int items, width, q_heads, group, block_size, window;
  float scale;  // softmax scale times log2(e)
  Kinds kinds;  // read if KINDS
  // The first key that a query attends to; a negative one stands for 0.
  template <bool KINDS>
  DEVICE int first_key(int position) const {
    return KINDS && kinds.chunked ? position - int(u32(position) % u32(window)) : position + 1 - window;
  }
};

struct alignas(16) Item {
  int position;  // of the first query in its sequence
  int rows;      // number of queries; 0: no more work
  int token;     // row of the first query in qkv and out
  int head;
  template <int D>
  DEVICE int last_tile() const { return (position + rows - 1) / Sizes<D>::KEYS; }
  template <int D, bool KINDS>
  DEVICE int first_tile(const Arguments& args) const {
    return max(args.first_key<KINDS>(position), 0) / Sizes<D>::KEYS;
  }
};

// Byte offsets in shared memory. A tile of Q, K or V has a panel for each 64 columns.
template <int D>
struct Offsets {
  static constexpr u32 Q_TILE = Sizes<D>::PANELS * PANEL, TILE = Sizes<D>::PANELS * Sizes<D>::KV_PANEL;
  static constexpr u32 Q = 0, K = Q_TILE, V = K + STAGES * TILE, BARRIERS = V + STAGES * TILE;
  static constexpr u32 Q_FULL = BARRIERS, Q_EMPTY = Q_FULL + 8;
  static constexpr u32 K_FULL = Q_EMPTY + 8, K_EMPTY = K_FULL + 8 * STAGES;
  static constexpr u32 V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES;
  static constexpr u32 ITEM = BARRIERS + 128;
  static_assert(V_EMPTY + 8 * STAGES <= ITEM, "barriers overlap the item");
};

struct Ring {
  u32 stage = 0, parity = 0;
  DEVICE void advance() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// As barrier_wait, but a hang ends with a store to a null address. If a kernel contains a trap, the compiler ignores
// setmaxnreg and does not use the registers that a warpgroup takes over from another.
DEVICE void barrier_wait_without_trap(u32 barrier, u32 parity) {
#pragma unroll 1
  for (u32 tries = 0; !barrier_passed(barrier, parity); tries++)
    if (tries > (1u << 22)) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
}

// -- the producer warp ------------------------------------------------------------------------------------------------

DEVICE u64 l2_evict_normal() { u64 p; asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }

// Fetches one tile of keys or values, in pieces of `size` keys. Lane i has the block of piece i, and `row` is the first
// row of each piece in its block. `barriers`: FULL of every stage, then EMPTY.
template <int D>
DEVICE void fetch_tile(const TensorMap* map, u32 to, u32 barriers, Ring& ring, int block, int row, int size) {
  const u32 lane = threadIdx.x % 32, at = to + ring.stage * Offsets<D>::TILE, barrier = barriers + 8 * ring.stage;
  barrier_wait_without_trap(barrier + 8 * STAGES, ring.parity ^ 1);
  if (lane == 0) barrier_expect_bytes(barrier, Offsets<D>::TILE);
  const u64 policy = l2_evict_normal();
  for (int piece = 0; piece * size < Sizes<D>::KEYS; piece++) {
    const int from = __shfl_sync(ALL_LANES, block, piece);
    if (lane) continue;
#pragma unroll
    for (int panel = 0; panel < Sizes<D>::PANELS; panel++)
      copy_tile(at + panel * Sizes<D>::KV_PANEL + piece * size * 128, map, panel * 64, row, from, barrier, policy);
  }
  ring.advance();
}

template <int D, bool KINDS>
DEVICE void fetch(u32 base, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                  const Arguments& args) {
  constexpr int KEYS = Sizes<D>::KEYS;
  const int lane = threadIdx.x % 32, size = args.block_size;
  const int piece = min(size, KEYS), pieces = KEYS / piece;  // keys of a copy, and copies of a tile
  Item* const shared_item = reinterpret_cast<Item*>(__cvta_shared_to_generic(base + Offsets<D>::ITEM));
  Ring k, v;
  u32 q_parity = 1;
  for (int index = blockIdx.x; index < args.items; q_parity ^= 1) {
    int next = 0;
    // Not used until this item is fetched, which hides the latency.
    if (lane == 0) next = args.ctas + atomicAdd(args.counters, 1);
    const int2 tile = args.tiles[index / args.q_heads];
    if (tile.x < 0) break;  // the rest of the list is padding
    const int begin = args.query_start[tile.x], count = args.query_start[tile.x + 1] - begin;
    const Item item = {args.context[tile.x] + tile.y, min(count - tile.y, ROWS), begin + tile.y, index % args.q_heads};
    const int kv_head = item.head / args.group, final_block = (item.position + item.rows - 1) / size;
    const int* const table = args.tables + i64(tile.x) * args.width;

    barrier_wait_without_trap(base + Offsets<D>::Q_EMPTY, q_parity);
    if (lane == 0) {
      *shared_item = item;
      const u32 barrier = base + Offsets<D>::Q_FULL;
      barrier_expect_bytes(barrier, Offsets<D>::Q_TILE);
#pragma unroll
      for (int panel = 0, x = item.head * D; panel < Sizes<D>::PANELS; panel++)
        copy_tile(base + Offsets<D>::Q + panel * PANEL, q_map, x + panel * 64, item.token, barrier, l2_evict_first());
    }
    const int last = item.last_tile<D>(), first = item.first_tile<D, KINDS>(args);
    const int first_block = max(args.first_key<KINDS>(item.position), 0) / size;
    // A block may have several tiles.
    const auto first_row = [&](int n) { return kv_head * size + (KEYS < 128 ? n * KEYS & size - 1 : 0); };
    int previous_block = 0;
    for (int n = last; n >= first; n--) {
      // Beyond the last key the last block is read again, and before the window its first block: those keys are
      // masked, and the values of the request's own blocks are finite. Other entries may name any block.
      const int entry = KEYS < 128 ? (n * pieces + lane) * piece / size : n * pieces + lane;
      const int block = lane < pieces ? table[min(max(entry, first_block), final_block)] : 0;
      fetch_tile<D>(k_map, base + Offsets<D>::K, base + Offsets<D>::K_FULL, k, block, first_row(n), piece);
      if (n < last) fetch_tile<D>(v_map, base + Offsets<D>::V, base + Offsets<D>::V_FULL, v, previous_block,
                                  first_row(n + 1), piece);
      previous_block = block;
    }
    fetch_tile<D>(v_map, base + Offsets<D>::V, base + Offsets<D>::V_FULL, v, previous_block, first_row(first), piece);
    index = __shfl_sync(ALL_LANES, next, 0);
  }
  barrier_wait_without_trap(base + Offsets<D>::Q_EMPTY, q_parity);
  if (lane == 0) {
    shared_item->rows = 0;
    barrier_arrive(base + Offsets<D>::Q_FULL);
    __threadfence();
    if (atomicAdd(args.counters + 1, 1) == args.ctas - 1) args.counters[0] = args.counters[1] = 0;
  }
}

// -- the consumer warpgroups ------------------------------------------------------------------------------------------

DEVICE float exp2_approx(float x) { asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
// A division compiles to a call, and setmaxnreg has no effect in a kernel with calls.
DEVICE float reciprocal_approx(float x) { asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }

// The warpgroups issue products alternately: named barrier 1 + g holds warpgroup g until the other has issued its
// products.
DEVICE void scheduler_barrier_sync(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
DEVICE void scheduler_barrier_arrive(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

// Releases a slot. Every warp arrives itself, because wgmma_wait covers the warp's own products only.
DEVICE void release_slot(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Masks scores. reach[r]: the position of row r relative to this lane's first key of the tile; older[r]: how many keys
// before its own position it attends to.
template <int N>
DEVICE void mask_scores(float (&s)[N], const int (&reach)[2], const int (&older)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int key = i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (key > reach[r] || key < reach[r] - older[r]) s[i] = -__int_as_float(0x7f800000);
  }
}

template <int N>
DEVICE void cap_scores(float (&s)[N], const Kinds& kinds) {
#pragma unroll
  for (int i = 0; i < N; i++)
    s[i] = __fmaf_rn(-2.f * kinds.cap, reciprocal_approx(exp2_approx(s[i] * kinds.factor) + 1.f), kinds.cap);
}

// Turns scores into powers of 2 (online softmax). `row_max` is the largest score of a row so far, `sum` this lane's
// part of the sum of powers. Sums relative to the former `row_max` must be multiplied by `rescale`. `row_max` starts
// finite, so that a row with only masked keys so far gets zeros, not NaN.
template <int N>
DEVICE void update_softmax(float (&s)[N], float (&row_max)[2], float (&sum)[2], float (&rescale)[2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = row_max[r];
#pragma unroll
    for (int j = 0; j < N / 4; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    rescale[r] = exp2_approx((row_max[r] - top) * scale);
    row_max[r] = top;
  }
  float part[2] = {0.f, 0.f};
  const float shift[2] = {row_max[0] * scale, row_max[1] * scale};
#pragma unroll
  for (int i = 0; i < N; i++) {
    s[i] = exp2_approx(__fmaf_rn(s[i], scale, -shift[i / 2 % 2]));
    part[i / 2 % 2] += s[i];
  }
  sum[0] = __fmaf_rn(sum[0], rescale[0], part[0]);
  sum[1] = __fmaf_rn(sum[1], rescale[1], part[1]);
}

template <int N>
DEVICE void round_pairs(u32 (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

template <int D>
DEVICE void store(const float (&o)[Sizes<D>::COLUMNS / 2], float (&sum)[2], const Item& item, u32 row,
                  const Arguments& args) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
    sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
    const float inverse_sum = reciprocal_approx(sum[r]);
    bf16* const to = args.out + (i64(item.token + row + 8 * r) * args.q_heads + item.head) * D + threadIdx.x % 4 * 8;
#pragma unroll
    for (int part = 0; part < (D + 31) / 32; part++) {
      u32 x[4];
#pragma unroll
      for (int i = 0, at = 16 * part + 2 * r; i < 4; i++, at += 4)
        x[i] = pack(o[at] * inverse_sum, o[at + 1] * inverse_sum);
      transpose_quad(x);
      const bool is_column = D % 32 == 0 || 32 * part + int(threadIdx.x % 4 * 8) < D;
      if (is_column && int(row) + 8 * r < item.rows)
        *reinterpret_cast<uint4*>(to + 32 * part) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

template <int D, bool KINDS>
DEVICE void compute_item(u32 base, u32 group, const Item& item, Ring& k, Ring& v, const Arguments& args) {
  constexpr int KEYS = Sizes<D>::KEYS;
  // Row in the tile; the other is + 8.
  const u32 lane = threadIdx.x % 32, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const u64 q_matrix = matrix_descriptor(base + Offsets<D>::Q + group * 64 * 128, 16);
  const u64 k_matrix = matrix_descriptor(base + Offsets<D>::K, 16);
  const u64 v_matrix = matrix_descriptor(base + Offsets<D>::V, Sizes<D>::KV_PANEL);
  const int top = item.position + group * 64;  // position of the warpgroup's first row
  const int last = item.last_tile<D>(), first = item.first_tile<D, KINDS>(args);
  float s[KEYS / 2], o[Sizes<D>::COLUMNS / 2], row_max[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f}, rescale[2];
  u32 p[KEYS / 4];
  if (KINDS && args.kinds.sinks) {
    row_max[0] = row_max[1] = args.kinds.sinks[item.head] * args.kinds.sink_factor;
    sum[0] = sum[1] = lane % 4 ? 0.f : 1.f;  // the sums of four lanes are added at the end
  }
  const auto mask_tile = [&](int n) {
    if (KINDS && args.kinds.cap != 0.f) cap_scores(s, args.kinds);
    if (n * KEYS + KEYS - 1 <= top && n * KEYS >= args.first_key<KINDS>(top + 63)) return;
    const int position = item.position + int(row), from = position - n * KEYS - int(lane % 4 * 2);
    const int older[2] = {position - args.first_key<KINDS>(position),
                          position + 8 - args.first_key<KINDS>(position + 8)};
    mask_scores(s, {from, from + 8}, older);
  };

  barrier_wait_without_trap(base + Offsets<D>::K_FULL + 8 * k.stage, k.parity);
  score<D>(s, q_matrix, k_matrix + (k.stage * Offsets<D>::TILE >> 4));
  wgmma_wait<0>();
  order_after_wait(s);
  release_slot(base + Offsets<D>::K_EMPTY + 8 * k.stage);
  k.advance();
  mask_tile(last);
  update_softmax(s, row_max, sum, rescale, args.scale);
  round_pairs(p, s);
#pragma unroll
  for (int i = 0; i < Sizes<D>::COLUMNS / 2; i++) o[i] = 0.f;
  if (first < last) barrier_wait_without_trap(base + Offsets<D>::K_FULL + 8 * k.stage, k.parity);

#pragma unroll 1
  for (int n = last - 1; n >= first; n--) {
    scheduler_barrier_sync(group);
    score<D>(s, q_matrix, k_matrix + (k.stage * Offsets<D>::TILE >> 4));
    barrier_wait_without_trap(base + Offsets<D>::V_FULL + 8 * v.stage, v.parity);
    add_values<D>(o, p, v_matrix + (v.stage * Offsets<D>::TILE >> 4));
    scheduler_barrier_arrive(group);
    wgmma_wait<1>();
    order_after_wait(s);
    release_slot(base + Offsets<D>::K_EMPTY + 8 * k.stage);
    k.advance();
    mask_tile(n);
    update_softmax(s, row_max, sum, rescale, args.scale);
    // Wait for the next iteration's keys here: this loop keeps the assembler from moving the wait below above the
    // softmax.
    if (first < n) barrier_wait_without_trap(base + Offsets<D>::K_FULL + 8 * k.stage, k.parity);
    wgmma_wait<0>();
    order_after_wait(o), order_after_wait(s);  // the products have read p, so it may be overwritten
    release_slot(base + Offsets<D>::V_EMPTY + 8 * v.stage);
    v.advance();
    round_pairs(p, s);
    // After a row's largest score was processed, the factor is exactly 1.
    if (__any_sync(ALL_LANES, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < Sizes<D>::COLUMNS / 2; i++) o[i] *= rescale[i / 2 % 2];
    }
  }
  release_slot(base + Offsets<D>::Q_EMPTY);
  barrier_wait_without_trap(base + Offsets<D>::V_FULL + 8 * v.stage, v.parity);
  add_values<D>(o, p, v_matrix + (v.stage * Offsets<D>::TILE >> 4));
  wgmma_wait<0>();
  order_after_wait(o);
  release_slot(base + Offsets<D>::V_EMPTY + 8 * v.stage);
  v.advance();
  store<D>(o, sum, item, row, args);
}

template <int D, bool KINDS>
DEVICE void compute(u32 base, u32 group, const Arguments& args) {
  const volatile Item* const shared_item = reinterpret_cast<const Item*>(__cvta_shared_to_generic(base + Offsets<D>::ITEM));
  Ring k, v;
  if (group == 1) scheduler_barrier_arrive(group);  // warpgroup 0 is first
  for (u32 parity = 0;; parity ^= 1) {
    barrier_wait_without_trap(base + Offsets<D>::Q_FULL, parity);
    const Item item = {shared_item->position, shared_item->rows, shared_item->token, shared_item->head};
    if (item.rows == 0) break;
    compute_item<D, KINDS>(base, group, item, k, v, args);
  }
  if (group == 0) scheduler_barrier_sync(group);  // consumes the last arrival, so that the barrier is balanced
}

// 384 threads: one warp of the first warpgroup is the producer, the other two warpgroups are consumers. `window`: 1 <<
// 30 for none. `max_ctas`: how many CTAs work; null for all. The next kernel is triggered only after the preceding one
// has ended: decode.cu, which runs at the same time as this kernel, relies on it.
template <int D, bool KINDS>
__global__ void __launch_bounds__(384, 1)
prefill(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
        const __grid_constant__ TensorMap v_map, bf16* out, const int2* tiles, int items, const int* query_start,
        const int* context, const int* tables, int width, int q_heads, int group, int block_size, int window,
        float scale, int* counters, const int* max_ctas, const __grid_constant__ Kinds kinds) {
  const int ctas = max_ctas ? max(1, min(*max_ctas, int(gridDim.x))) : gridDim.x;
  if (blockIdx.x >= ctas) return;
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Arguments args = {out,   tiles,   query_start, context,    tables, counters, ctas,
                     items, width,   q_heads,     group,      block_size, window, scale, kinds};
  if (threadIdx.x == 0) {
    prefetch_map(&q_map), prefetch_map(&k_map), prefetch_map(&v_map);
    barrier_init(base + Offsets<D>::Q_FULL, 1), barrier_init(base + Offsets<D>::Q_EMPTY, CONSUMER_WARPS);
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(base + Offsets<D>::K_FULL + 8 * stage, 1), barrier_init(base + Offsets<D>::V_FULL + 8 * stage, 1);
      barrier_init(base + Offsets<D>::K_EMPTY + 8 * stage, CONSUMER_WARPS);
      barrier_init(base + Offsets<D>::V_EMPTY + 8 * stage, CONSUMER_WARPS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const u32 warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < 32) fetch<D, KINDS>(base, &q_map, &k_map, &v_map, args);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    compute<D, KINDS>(base, warpgroup - 1, args);
  }
}
