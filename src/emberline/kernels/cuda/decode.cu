// Attention of rows with one new token each over the paged cache. worklist.py splits the keys of each row into items.
//
// A CTA computes units (item, KV head): the first by its index, the others from an atomic queue. Beside prefill, all
// units come from the queue, because some CTAs start only when prefill's SMs become free. The last warp (producer)
// fetches tiles of 64 keys into a pipeline of stages, ahead into the next units. Each of the other four warps
// (consumers) has its own 16 keys of every tile and its own online softmax. At the end of a unit their sums are added
// in shared memory, in a fixed order. A row of one item is then complete. For a row of several items, each unit writes
// a partial result, and the CTA that arrives last merges them by index. So the result depends only on where the row was
// cut.
#include "attend.cuh"

constexpr int THREADS = 32 * (COMPUTE_WARPS + 1), INFO_SLOTS = 8;

struct Arguments {  // mirrored by _Arguments in decode.py
  const bf16* qkv;
  bf16* out;
  const int4* items;
  const int* partial_starts;
  const int* count;
  const int* tables;
  const int* context;
  float* partials;  // [partial, kv_heads, group, head_dim]
  float2* max_and_sum;  // [partial, kv_heads, group]: largest score, in base 2, and sum of weights
  int* arrivals;    // [row, kv_heads], zero between launches
  int* queue;       // next unit, and number of CTAs that have ended; zero between launches
  int qkv_stride, table_width, block_shift, group, kv_heads, window;
  int pdl, beside_prefill;
  float scale;  // softmax scale times log2(e)
};

struct alignas(16) UnitInfo {  // what the compute warps need of a unit
  int row, head, low, high;  // keys [low, high) are visible
  int begin, tiles;          // first key of the first tile; at least one tile, even if no key is visible
  int partial, first, parts; // partial results of the row: [first, first + parts); -1 for a row of one item
};

template <class S>
struct alignas(16) Shared {
  u8 tiles[S::STAGES][2][S::TILE_BYTES];  // first, because the swizzle needs 1024-byte alignment
  float4 sums[COMPUTE_WARPS][S::STEPS][32];
  float2 max_and_sum[COMPUTE_WARPS][8];
  UnitInfo infos[INFO_SLOTS];
  u64 full[S::STAGES], empty[S::STAGES], info_ready[INFO_SLOTS];
  int last[2];  // whether the unit was the last of its row; double-buffered by iteration
};

template <class S>
struct Ring {
  u32 stage = 0, phase = 0;
  DEVICE void advance() {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE void sync_compute_warps() {
  __syncwarp();
  asm volatile("bar.sync 1, 128;" ::: "memory");
}
static_assert(COMPUTE_WARPS * 32 == 128);
// Increments a counter with acquire-release order at GPU scope: writes that this thread has observed before become
// visible to threads that increment later, and theirs from before to this thread.
DEVICE int atomic_increment(int* counter) {
  int previous;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(previous) : "l"(counter) : "memory");
  return previous;
}
// Loads from L2, where partial results of other CTAs are.
DEVICE float2 load_l2(const float2* at) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at));
  return v;
}

// -- the producer warp -----------------------------------------------------------------------------------------------

// Tensor maps of a layer's keys and values: boxes of 64 keys, or a block if smaller; and boxes of 16 keys.
struct Maps {
  const TensorMap *keys, *values, *group_keys, *group_values;
};

// Starts the copies of one tile: a box per block (or 64 keys of one) and 128 bytes of a row, K then V. In the last tile
// of a row, only groups of 16 keys with a visible key are copied. Lane i's `block` is entry `entry` + i of the block
// table; all lanes must call this, because of the shuffles.
template <class S>
DEVICE void fetch_tile(Shared<S>& shared, const Maps& maps, u32 stage, int head, int shift, int key, int high,
                       int entry, int block, int lane, u64 policy) {
  int groups = min(max((high - key + WARP_KEYS - 1) / WARP_KEYS, 1), COMPUTE_WARPS), rows = min(TILE, 1 << shift);
  const TensorMap *keys = maps.keys, *values = maps.values;
  if (groups < COMPUTE_WARPS) rows = WARP_KEYS, keys = maps.group_keys, values = maps.group_values;
  u32 full = shared_address(&shared.full[stage]), to = shared_address(shared.tiles[stage]);
  if (lane == 0) barrier_expect_bytes(full, 2 * S::TILE_BYTES / COMPUTE_WARPS * groups);
  for (int at = 0; at < groups * WARP_KEYS; at += rows) {
    int z = __shfl_sync(ALL_LANES, block, (key + at >> shift) - entry);
    int y = (head << shift) + (key + at & (1 << shift) - 1);
    if (lane) continue;
    UNROLL for (int x = 0; x < S::ROW_BYTES / S::LINE; x++) {
      u32 box = to + (x * TILE + at) * S::LINE;
      copy_tile(box, keys, x * S::BOX, y, z, full, policy);
      copy_tile(box + S::TILE_BYTES, values, x * S::BOX, y, z, full, policy);
    }
  }
}

// Returns the unit's range of keys, limited to the row's length and the window.
DEVICE UnitInfo make_info(const Arguments& args, int unit, int& length) {
  int4 item = args.items[unit / args.kv_heads];
  UnitInfo info;
  info.row = item.x, info.head = unit % args.kv_heads, info.partial = item.w;
  length = args.context[info.row] + 1;
  info.first = args.partial_starts[info.row], info.parts = args.partial_starts[info.row + 1] - info.first;
  info.low = args.window ? max(item.y, length - args.window) : item.y;
  info.high = min(item.z, length);
  info.begin = info.low & -TILE;
  info.tiles = max(1, (info.high - info.begin + TILE - 1) / TILE);
  return info;
}

// With PDL this may run before the preceding kernel has ended. Until then it reads only the work list, tables, lengths,
// and tiles without the newest key, none of which that kernel writes. `beside_prefill`: the preceding kernel is
// prefill, which writes nothing that is read here, and which triggers this launch only after all kernels before it have
// ended. So this kernel waits only at its end, which must not come before the end of prefill.
template <class S>
DEVICE void fetch_units(Shared<S>& shared, const Maps& maps, const Arguments& args, int lane) {
  u64 policy = l2_evict_first();
  Ring<S> ring;
  bool waited = !args.pdl || args.beside_prefill;
  if (!args.pdl && !args.beside_prefill) wait_for_previous_kernel();
  int total = *args.count * args.kv_heads, grid = gridDim.x, iteration = 0;
  int preassigned = args.beside_prefill ? 0 : grid;  // units that are assigned to CTAs without the queue
  const auto take_unit = [&] {
    return total > preassigned && lane == 0 ? preassigned + atomicAdd(args.queue, 1) : total;
  };
  for (int unit = preassigned ? blockIdx.x : __shfl_sync(ALL_LANES, take_unit(), 0); unit < total; iteration++) {
    int next = waited ? take_unit() : total, length;
    bool requested = waited;
    UnitInfo info = make_info(args, unit, length);
    if (lane == 0) {
      shared.infos[iteration % INFO_SLOTS] = info;
      barrier_arrive(shared_address(&shared.info_ready[iteration % INFO_SLOTS]));
    }
    const int* table = args.tables + i64(info.row) * args.table_width;
    int newest = length - 1 >> args.block_shift, entry = 0, block = 0;
    for (int i = 0; i < info.tiles; i++, ring.advance()) {
      int key = info.begin + i * TILE, needed = key + TILE - 1 >> args.block_shift;
      if (i == 0 || needed - entry >= 32) {
        entry = key >> args.block_shift;
        block = table[min(entry + lane, newest)];
      }
      barrier_wait(shared_address(&shared.empty[ring.stage]), ring.phase ^ 1);
      if (!waited && key + TILE >= length) wait_for_previous_kernel(), waited = true;
      fetch_tile(shared, maps, ring.stage, info.head, args.block_shift, key, info.high, entry, block, lane, policy);
    }
    if (!waited) wait_for_previous_kernel(), waited = true;
    if (!requested) next = take_unit();
    unit = __shfl_sync(ALL_LANES, next, 0);
  }
  if (!waited) wait_for_previous_kernel();
  if (lane == 0) {
    shared.infos[iteration % INFO_SLOTS].row = -1, shared.infos[iteration % INFO_SLOTS].parts = 0;
    barrier_arrive(shared_address(&shared.info_ready[iteration % INFO_SLOTS]));
    if (total > preassigned) {  // then every CTA used the queue, and the last to end resets it
      if (atomic_increment(args.queue + 1) == grid - 1) args.queue[0] = 0, args.queue[1] = 0;
    }
  }
  if (args.beside_prefill) wait_for_previous_kernel();
}

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

// Sums over the four warps, each of which has a quarter of the columns, and writes the output or the unit's partial
// result.
template <class S, int HALVES>
DEVICE void sum_warps(Shared<S>& shared, State<S, HALVES>& state, const Arguments& args, const UnitInfo& info,
                      int warp, int lane) {
  UNROLL for (int h = 0; h < HALVES; h++) {
    if (h) sync_compute_warps();  // all warps have read the first half
    state.sum[h] += __shfl_xor_sync(ALL_LANES, state.sum[h], 1);
    state.sum[h] += __shfl_xor_sync(ALL_LANES, state.sum[h], 2);
    if (lane % 4 == 0) shared.max_and_sum[warp][lane / 4] = float2{state.top[h], state.sum[h]};
    UNROLL for (int k = 0; k < S::STEPS; k++)
      shared.sums[warp][k][lane] = Columns<S>::of(state.out[2 * k], state.out[2 * k + 1], h);
    sync_compute_warps();
    int row = lane / 4 + 8 * h;
    if (row >= args.group) continue;
    float top = minus_infinity(), sum = 0.f, part[COMPUTE_WARPS];
    UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) top = fmaxf(top, shared.max_and_sum[w][lane / 4].x);
    float base = top == minus_infinity() ? 0.f : top;
    UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) {
      float2 one = shared.max_and_sum[w][lane / 4];
      part[w] = exp2_fast(one.x - base);
      sum = fmaf(one.y, part[w], sum);
    }
    bool is_whole_row = info.partial < 0;
    float scale = is_whole_row ? 1.f / sum : 1.f;
    i64 slot = (i64(info.partial) * args.kv_heads + info.head) * args.group + row;
    if (!is_whole_row && warp == 0 && lane % 4 == 0) args.max_and_sum[slot] = float2{top, sum};
    UNROLL for (int k = warp * (S::STEPS / COMPUTE_WARPS); k < (warp + 1) * (S::STEPS / COMPUTE_WARPS); k++) {
      float4 total = {0.f, 0.f, 0.f, 0.f};
      UNROLL for (int w = 0; w < COMPUTE_WARPS; w++) {
        float4 one = shared.sums[w][k][lane];
        total.x = fmaf(one.x, part[w], total.x), total.y = fmaf(one.y, part[w], total.y);
        total.z = fmaf(one.z, part[w], total.z), total.w = fmaf(one.w, part[w], total.w);
      }
      int at = Columns<S>::at(k, lane);
      if (is_whole_row) {
        bf16* to = args.out + ((i64(info.row) * args.kv_heads + info.head) * args.group + row) * S::HEAD_DIM + at;
        *reinterpret_cast<u32*>(to) = pack(total.x * scale, total.y * scale);
        *reinterpret_cast<u32*>(to + Columns<S>::GAP) = pack(total.z * scale, total.w * scale);
      } else {
        float* to = args.partials + slot * S::HEAD_DIM + at;
        *reinterpret_cast<float2*>(to) = float2{total.x, total.y};
        *reinterpret_cast<float2*>(to + Columns<S>::GAP) = float2{total.z, total.w};
      }
    }
  }
}

// Merges the partial results of a row after all of them were written. A thread has 4 columns of a head at a time.
template <class S>
DEVICE void merge(const Arguments& args, const UnitInfo& info, int thread) {
  constexpr int QUADS = S::HEAD_DIM / 4, BATCH = 8;
  i64 step = i64(args.kv_heads) * args.group;
  for (int e = thread; e < args.group * QUADS; e += 32 * COMPUTE_WARPS) {
    int row = e / QUADS, quad = e % QUADS;
    i64 slot = info.first * step + info.head * args.group + row;
    float top = minus_infinity(), sum = 0.f;
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
    i64 to = ((i64(info.row) * args.kv_heads + info.head) * args.group + row) * S::HEAD_DIM + quad * 4;
    *reinterpret_cast<uint2*>(args.out + to) =
        uint2{pack(total.x * scale, total.y * scale), pack(total.z * scale, total.w * scale)};
  }
}

// Returns whether this partial result, which all compute warps have written, was the last of its row.
DEVICE bool arrive_last(const Arguments& args, const UnitInfo& info) {
  int* arrivals = args.arrivals + info.row * args.kv_heads + info.head;
  bool last = atomic_increment(arrivals) == info.parts - 1;
  if (last) *arrivals = 0;
  return last;
}

template <class S, int HALVES>
DEVICE void compute_units(Shared<S>& shared, const Arguments& args, int warp, int lane) {
  Ring<S> ring;
  // The previous unit. Whether this CTA must merge its row is determined one iteration later, to hide the atomic's
  // latency.
  UnitInfo previous;
  previous.parts = 0;
  if (!args.beside_prefill) wait_for_previous_kernel();
  for (int iteration = 0;; iteration++) {
    barrier_wait(shared_address(&shared.info_ready[iteration % INFO_SLOTS]), iteration / INFO_SLOTS & 1);
    UnitInfo info = shared.infos[iteration % INFO_SLOTS];
    if (info.row >= 0) {
      u32 q[S::STEPS][4];
      const bf16* heads = args.qkv + i64(info.row) * args.qkv_stride + info.head * args.group * S::HEAD_DIM;
      load_queries<S, HALVES>(q, heads, args.group, lane);
      State<S, HALVES> state;
      state.clear();
      for (int i = 0; i < info.tiles; i++, ring.advance()) {
        u32 tile = shared_address(shared.tiles[ring.stage]);
        int key = info.begin + i * TILE + warp * WARP_KEYS;
        barrier_wait(shared_address(&shared.full[ring.stage]), ring.phase);
        if (key < info.high)  // otherwise these keys were not copied
          attend(state, q, tile, tile + S::TILE_BYTES, key, info.low, info.high, args.scale, warp, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[ring.stage]));
      }
      sum_warps<S, HALVES>(shared, state, args, info, warp, lane);
    }
    sync_compute_warps();  // all sums are read, the partial result is written, and `last` of the previous unit is set
    bool must_merge = previous.parts && shared.last[iteration & 1 ^ 1];
    if (info.parts && threadIdx.x == 0) shared.last[iteration & 1] = arrive_last(args, info);
    if (must_merge) merge<S>(args, previous, threadIdx.x);
    if (info.row < 0) return;
    previous = info;
  }
}

template <int HEAD_DIM, int BYTES, int HALVES>
__global__ void __launch_bounds__(THREADS, 2)
decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
       const __grid_constant__ TensorMap group_keys, const __grid_constant__ TensorMap group_values,
       const __grid_constant__ Arguments args) {
  using S = Shape<HEAD_DIM, BYTES>;
  extern __shared__ __align__(1024) u8 memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
  // See shared_bytes in decode.py.
  static_assert(sizeof(Shared<S>) <= sizeof(shared.tiles) + sizeof(shared.sums) + 896);
  // The producer is at most STAGES units ahead, so a slot is read before it is reused.
  static_assert(INFO_SLOTS > S::STAGES);
  let_next_kernel_start();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024) __trap();
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), COMPUTE_WARPS);
    }
    for (int i = 0; i < INFO_SLOTS; i++) barrier_init(shared_address(&shared.info_ready[i]), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp == COMPUTE_WARPS)
    fetch_units<S>(shared, {&keys, &values, &group_keys, &group_values}, args, lane);
  else
    compute_units<S, HALVES>(shared, args, warp, lane);
}
