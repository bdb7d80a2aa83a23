// Attention of sequences with a few new tokens each over the paged cache. A row is such a sequence, or some of its new
// tokens; all queries of a row share one read of its keys. worklist.py splits the keys of each row into items.
//
// A CTA computes units (item, KV head): the first by its index, the others from an atomic queue. Beside prefill, all
// units come from the queue, because some CTAs start only when prefill's SMs become free. The last warp (producer)
// fetches tiles of 64 keys into a pipeline of stages, ahead into the next units; decode_units.cuh has its code. The
// other warps (consumers) are teams of four. A team computes up to 16 fragment rows; a fragment row is a head of the
// group, for one of the queries. Each warp of a team has its own 16 keys of every tile and its own online softmax. At
// the end of a unit their sums are added in shared memory, in a fixed order. A row of one item is then complete. For a
// row of several items, each unit writes a partial result, and the CTA that arrives last merges them by index.
//
// SEVERAL: rows have any number of queries, and query j sees one key more than query j - 1. Otherwise each row has one.
// KINDS: the layer may have chunks, capped scores or sinks.
// A query's result depends only on its keys and on where the row was cut: it has the same bits if the query is a row of
// its own that is cut at the same keys. attend.cuh says why the queries of a row do not affect each other.
#include "decode_units.cuh"

// -- merging sums ----------------------------------------------------------------------------------------------------

// A lane's four output columns of 16 are two pairs, at `at` and `at + GAP`, in the layout of mma's result.
template <class S>
struct Columns {
  static constexpr int GAP = S::F8 ? 2 : 8;
  DEVICE static int at(int step, int lane) { return 16 * step + lane % 4 * (S::F8 ? 4 : 2); }
  DEVICE static float4 of(const float (&even)[4], const float (&odd)[4], int h) {
    return S::F8 ? float4{even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]}
                 : float4{even[2 * h], even[2 * h + 1], odd[2 * h], odd[2 * h + 1]};
  }
};

// Returns the sink of a fragment row, in base 2; -inf if there is none.
template <class S>
DEVICE float load_sink(const Arguments& args, const UnitInfo<S>& info, int row) {
  if (!S::KINDS || !args.sinks) return minus_infinity();
  return args.sinks[info.head * args.group + u32(row) % u32(args.group)] * 1.4426950408889634f;
}

// Sums over the four warps of a fragment, each of which has a quarter of the columns, and writes the output or the
// unit's partial result.
template <class S, int HALVES>
DEVICE void sum_warps(Shared<S>& shared, State<S, HALVES>& state, const Arguments& args, const UnitInfo<S>& info,
                      int fragment, int warp, int lane) {
  auto& sums = shared.sums[fragment];
  auto& max_and_sum = shared.max_and_sum[fragment];
  UNROLL for (int h = 0; h < HALVES; h++) {
    if (S::SEVERAL && 16 * fragment + 8 * h >= count_rows<S>(args, info)) return;
    if (h) sync_team<S>(fragment);  // all warps have read the first half
    state.sum[h] += __shfl_xor_sync(ALL_LANES, state.sum[h], 1);
    state.sum[h] += __shfl_xor_sync(ALL_LANES, state.sum[h], 2);
    if (lane % 4 == 0) max_and_sum[warp][lane / 4] = float2{state.top[h], state.sum[h]};
    UNROLL for (int k = 0; k < S::STEPS; k++)
      sums[warp][k][lane] = Columns<S>::of(state.out[2 * k], state.out[2 * k + 1], h);
    sync_team<S>(fragment);
    int row = 16 * fragment + lane / 4 + 8 * h;
    if (row >= count_rows<S>(args, info)) continue;
    const bool is_whole_row = info.partial < 0;
    const float sink = is_whole_row ? load_sink(args, info, row) : minus_infinity();
    float top = sink, part[COMPUTE_WARPS];
    UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) top = fmaxf(top, max_and_sum[w][lane / 4].x);
    float base = top == minus_infinity() ? 0.f : top, sum = S::KINDS ? exp2_fast(sink - base) : 0.f;
    UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) {
      float2 one = max_and_sum[w][lane / 4];
      part[w] = exp2_fast(one.x - base);
      sum = fmaf(one.y, part[w], sum);
    }
    float scale = is_whole_row ? 1.f / sum : 1.f;
    i64 slot = (i64(info.partial) * args.kv_heads + info.head) * slot_rows<S>(args) + row;
    if (!is_whole_row && warp == 0 && lane % 4 == 0) args.max_and_sum[slot] = float2{top, sum};
    UNROLL for (int k = warp * (S::STEPS / COMPUTE_WARPS); k < (warp + 1) * (S::STEPS / COMPUTE_WARPS); k++) {
      float4 total = {0.f, 0.f, 0.f, 0.f};
      UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) {
        float4 one = sums[w][k][lane];
        total.x = fmaf(one.x, part[w], total.x), total.y = fmaf(one.y, part[w], total.y);
        total.z = fmaf(one.z, part[w], total.z), total.w = fmaf(one.w, part[w], total.w);
      }
      if (S::WIDTH < S::HEAD_DIM && 16 * k >= S::WIDTH) break;
      int at = Columns<S>::at(k, lane);
      if (is_whole_row) {
        bf16* to = args.out + output_index<S>(args, info, row) * S::WIDTH + at;
        *reinterpret_cast<u32*>(to) = pack(total.x * scale, total.y * scale);
        *reinterpret_cast<u32*>(to + Columns<S>::GAP) = pack(total.z * scale, total.w * scale);
      } else {
        float* to = args.partials + slot * S::WIDTH + at;
        *reinterpret_cast<float2*>(to) = float2{total.x, total.y};
        *reinterpret_cast<float2*>(to + Columns<S>::GAP) = float2{total.z, total.w};
      }
    }
  }
}

// Merges the partial results of a row after all of them were written. A thread has 4 columns of a head at a time.
template <class S>
DEVICE void merge(const Arguments& args, const UnitInfo<S>& info, int thread) {
  constexpr int QUADS = S::WIDTH / 4, BATCH = 8;
  i64 step = i64(args.kv_heads) * slot_rows<S>(args);
  for (int e = thread; e < count_rows<S>(args, info) * QUADS; e += 32 * COMPUTE_WARPS * S::FRAGMENTS) {
    int row = e / QUADS, quad = e % QUADS;
    i64 slot = info.first * step + info.head * slot_rows<S>(args) + row;
    float top = load_sink(args, info, row), sum = top == minus_infinity() ? 0.f : 1.f;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    for (int i = 0; i < info.parts; i += BATCH) {
      float2 one[BATCH];
      float4 part[BATCH];
      UNROLL for (int j = 0; j < BATCH; j++) {  // beyond the end, the last one again with weight 0
        i64 at = slot + min(i + j, info.parts - 1) * step;
        one[j] = load_l2(args.max_and_sum + at);
        part[j] = load_l2(reinterpret_cast<const float4*>(args.partials) + at * QUADS + quad);
      }
      float new_top = top;
      UNROLL for (int j = 0; j < BATCH; j++) new_top = fmaxf(new_top, one[j].x);
      float base = new_top == minus_infinity() ? 0.f : new_top, rescale = exp2_fast(top - base);
      top = new_top, sum *= rescale;
      total.x *= rescale, total.y *= rescale, total.z *= rescale, total.w *= rescale;
      UNROLL for (int j = 0; j < BATCH; j++) {
        float weight = i + j < info.parts ? exp2_fast(one[j].x - base) : 0.f;
        sum = fmaf(one[j].y, weight, sum);
        total.x = fmaf(part[j].x, weight, total.x), total.y = fmaf(part[j].y, weight, total.y);
        total.z = fmaf(part[j].z, weight, total.z), total.w = fmaf(part[j].w, weight, total.w);
      }
    }
    float scale = 1.f / sum;
    i64 to = output_index<S>(args, info, row) * S::WIDTH + quad * 4;
    *reinterpret_cast<uint2*>(args.out + to) =
        uint2{pack(total.x * scale, total.y * scale), pack(total.z * scale, total.w * scale)};
  }
}

// Returns whether this partial result, which all compute warps have written, was the last of its row.
template <class S>
DEVICE bool arrive_last(const Arguments& args, const UnitInfo<S>& info) {
  int* arrivals = args.arrivals + info.row * args.kv_heads + info.head;
  bool last = atomic_increment(arrivals) == info.parts - 1;
  if (last) *arrivals = 0;
  return last;
}

// -- the compute warps -----------------------------------------------------------------------------------------------

// Returns what the lane's rows see. If that differs, the info's range becomes the keys that all rows of the unit see.
template <class S, int HALVES>
DEVICE auto limit_rows(const Arguments& args, UnitInfo<S>& info, int first_row, int lane) {
  if constexpr (S::SEVERAL) {
    info.low = args.window ? first_key<S>(args, info.context + info.queries - 1) : 0, info.high = info.context + 1;
    RowWindows<HALVES, (S::KINDS ? HALVES : 1)> rows;
    rows.window[0] = args.window ? args.window : 0x7fffffff;
    UNROLL for (int h = 0; h < HALVES; h++)
      rows.newest[h] = info.context + u32(first_row + lane / 4 + 8 * h) / u32(args.group);
    if constexpr (S::KINDS)
      UNROLL for (int h = 0; h < HALVES; h++)
        rows.window[h] = args.window ? rows.newest[h] - first_key<S>(args, rows.newest[h]) + 1 : 0x7fffffff;
    return rows;
  } else {
    return SameForAllRows{};
  }
}

// Loads the team's rows of the queries.
template <class S, int HALVES>
DEVICE void load_queries(u32 (&q)[S::STEPS][4], const Arguments& args, const UnitInfo<S>& info, int first_row,
                         int lane) {
  if constexpr (S::SEVERAL) {
    const bf16* heads = args.qkv + i64(info.token) * args.qkv_stride + info.head * args.group * S::WIDTH;
    UNROLL for (int h = 0; h < 2; h++) {
      int row = first_row + lane / 4 + 8 * h, query = u32(row) / u32(args.group);
      const bool is_head = h < HALVES && query < info.queries;
      load_row<S>(q, h, heads + i64(query) * args.qkv_stride, row - query * args.group, is_head, lane);
    }
  } else {
    const bf16* heads = args.qkv + i64(info.row) * args.qkv_stride + info.head * args.group * S::WIDTH;
    UNROLL for (int h = 0; h < 2; h++) {
      int row = lane / 4 + 8 * h;
      load_row<S>(q, h, heads, row, h < HALVES && row < args.group, lane);
    }
  }
}

// `warp` is the index in the team of `fragment`.
template <class S, int HALVES>
DEVICE void compute_units(Shared<S>& shared, const Arguments& args, int fragment, int warp, int lane) {
  Ring<S> ring;
  // The previous unit. Whether this CTA must merge its row is determined one iteration later, to hide the atomic's
  // latency.
  UnitInfo<S> previous;
  previous.parts = 0;
  if (!args.beside_prefill) wait_for_previous_kernel();
  for (int iteration = 0;; iteration++) {
    barrier_wait(shared_address(&shared.info_ready[iteration % INFO_SLOTS<S>]), iteration / INFO_SLOTS<S> & 1);
    UnitInfo<S> info = shared.infos[iteration % INFO_SLOTS<S>];
    if (info.row >= 0) {
      u32 q[S::STEPS][4];
      load_queries<S, HALVES>(q, args, info, 16 * fragment, lane);
      int end = info.high;  // keys from here on were not copied
      if constexpr (S::FRAGMENTS > 1)
        if (16 * fragment >= count_rows<S>(args, info)) end = 0;  // the team has no rows
      const auto rows = limit_rows<S, HALVES>(args, info, 16 * fragment, lane);
      State<S, HALVES> state;
      state.clear();
      for (int i = 0; i < info.tiles; i++, ring.advance()) {
        u32 tile = shared_address(shared.tiles[ring.stage]);
        int key = info.begin + i * TILE + warp * WARP_KEYS;
        barrier_wait(shared_address(&shared.full[ring.stage]), ring.phase);
        if (key < end)
          attend(state, q, tile, tile + S::TILE_BYTES, key, info.low, info.high, rows, args.scale, args.cap, warp,
                 lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[ring.stage]));
      }
      // Read again, because the tiles need all registers.
      if constexpr (S::SEVERAL) info = shared.infos[iteration % INFO_SLOTS<S>];
      sum_warps<S, HALVES>(shared, state, args, info, fragment, warp, lane);
    }
    // All sums are read, the partial result is written, and `last` of the previous unit is set.
    sync_compute_warps<S>();
    bool must_merge = previous.parts && shared.last[iteration & 1 ^ 1];
    if (info.parts && threadIdx.x == 0) shared.last[iteration & 1] = arrive_last(args, info);
    if (must_merge) merge<S>(args, previous, threadIdx.x);
    if (info.row < 0) return;
    previous = info;
  }
}

// ROWS: fragment rows of a unit, at most. The sums of 32 rows do not fit into the 168 registers that a thread has with
// two CTAs of five warps on an SM. So 32 rows take two teams of warps, each of which reads all keys from shared memory,
// and one CTA per SM with a pipeline of twice the size. An SM then has as many computing warps and as many bytes in
// flight as with two CTAs.
template <int WIDTH, int BYTES, int ROWS, bool SEVERAL, bool KINDS>
__global__ void __launch_bounds__(32 * (COMPUTE_WARPS * (ROWS > 16 ? 2 : 1) + 1), ROWS > 16 || WIDTH > 128 ? 1 : 2)
decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
       const __grid_constant__ TensorMap group_keys, const __grid_constant__ TensorMap group_values,
       const __grid_constant__ Arguments args) {
  constexpr int HALVES = ROWS > 8 ? 2 : 1;
  using S = Shape<WIDTH, BYTES, (ROWS > 16 ? 2 : 1), SEVERAL, KINDS>;
  extern __shared__ __align__(1024) u8 memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
  // See shared_bytes in decode.py.
  static_assert(sizeof(Shared<S>) <= sizeof(shared.tiles) + sizeof(shared.sums) + 896 * S::FRAGMENTS);
  // The producer is at most STAGES + 1 units ahead of a unit whose tiles are all read, so a slot is reused only after
  // its unit.
  static_assert(INFO_SLOTS<S> >= S::STAGES + 2);
  let_next_kernel_start();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024) __trap();
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), COMPUTE_WARPS * S::FRAGMENTS);
    }
    for (int i = 0; i < INFO_SLOTS<S>; i++) barrier_init(shared_address(&shared.info_ready[i]), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp == COMPUTE_WARPS * S::FRAGMENTS)
    fetch_units<S>(shared, {&keys, &values, &group_keys, &group_values}, args, lane);
  else if constexpr (S::FRAGMENTS == 1)
    compute_units<S, HALVES>(shared, args, 0, warp, lane);
  else
    compute_units<S, HALVES>(shared, args, warp / COMPUTE_WARPS, warp % COMPUTE_WARPS, lane);
}
