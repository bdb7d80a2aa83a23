// Attention of rows with one new token each over the paged cache. worklist.py cuts the keys of each row into items.
//
// A CTA works on units (item, kv head): the first by its index, the others off a queue; beside another kernel, whose
// multiprocessors some CTAs get later, all off the queue. Its last warp brings tiles of 64 keys through a ring of
// stages, running ahead into the next units; the other four each take their own 16 keys of every tile, with a running
// softmax of their own, and are added up in shared memory, in fixed order, when the unit ends. A row of one item is
// then done. Of a row cut up, each unit leaves a partial, and the last one to arrive merges them by index, so that the
// result depends on the cuts and on nothing else.
#include "attend.cuh"

constexpr int THREADS = 32 * (WORKERS + 1), NOTES = 8;

struct Call {  // decode.py has its mirror
  const bf16* qkv;
  bf16* out;
  const int4* items;
  const int* row_parts;
  const int* count;
  const int* tables;
  const int* context;
  float* partials;  // [partial, kv_heads, group, head_dim]
  float2* tops;     // [partial, kv_heads, group]: greatest score, in base 2, and sum of weights
  int* arrivals;    // [row, kv_heads], zero between launches
  int* queue;       // next unit, CTAs that have ended: zero between launches
  int qkv_stride, table_width, block_shift, group, kv_heads, window;
  int early, beside;
  float scale;  // times log2(e)
};

struct alignas(16) Note {  // what the workers must know of a unit
  int row, head, low, high;  // keys [low, high) count
  int begin, tiles;          // key of the first tile; at least one tile, even if no key counts
  int partial, first, parts; // partials of the row: [first, first + parts); -1 for a row of one item
};

template <class S>
struct alignas(16) Shared {
  u8 tiles[S::STAGES][2][S::TILE_BYTES];  // first, for the swizzle wants them on 1024 bytes
  float4 sums[WORKERS][S::STEPS][32];
  float2 tops[WORKERS][8];
  Note notes[NOTES];
  u64 full[S::STAGES], empty[S::STAGES], told[NOTES];
  int last[2];  // by the turn's last bit
};

template <class S>
struct Ring {
  u32 stage = 0, phase = 0;
  DEVICE void advance() {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE void workers_meet() {
  __syncwarp();
  asm volatile("bar.sync 1, 128;" ::: "memory");
}
static_assert(WORKERS * 32 == 128);
// What this thread has seen written is seen by whoever counts after it; and what they had, by this one.
DEVICE int count_up(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
// From L2, where other CTAs' partials are.
DEVICE float2 load_l2(const float2* at) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at));
  return v;
}

// -- the warp that brings tiles --------------------------------------------------------------------------------------

struct Maps {  // of a layer's keys and values: boxes of 64 keys, or of a block if that is smaller; and of 16 keys
  const TensorMap *keys, *values, *few_keys, *few_values;
};

// Copies of one tile: a box per block (or 64 keys of one) and 128 bytes of a row, K then V; of the last tile of a row
// only as many groups of 16 keys as count. Lane i's `block` is entry i of the table, from `entry` on; all lanes take
// part.
template <class S>
DEVICE void bring(Shared<S>& shared, const Maps& maps, u32 stage, int head, int shift, int key, int high, int entry,
                  int block, int lane, u64 policy) {
  int groups = min(max((high - key + KEYS - 1) / KEYS, 1), WORKERS), rows = min(TILE, 1 << shift);
  const TensorMap *keys = maps.keys, *values = maps.values;
  if (groups < WORKERS) rows = KEYS, keys = maps.few_keys, values = maps.few_values;
  u32 full = shared_address(&shared.full[stage]), to = shared_address(shared.tiles[stage]);
  if (lane == 0) barrier_expect(full, 2 * S::TILE_BYTES / WORKERS * groups);
  for (int at = 0; at < groups * KEYS; at += rows) {
    int z = __shfl_sync(ALL, block, (key + at >> shift) - entry);
    int y = (head << shift) + (key + at & (1 << shift) - 1);
    if (lane) continue;
    UNROLL for (int x = 0; x < S::ROW_BYTES / S::LINE; x++) {
      u32 box = to + (x * TILE + at) * S::LINE;
      copy_tile(box, keys, x * S::BOX, y, z, full, policy);
      copy_tile(box + S::TILE_BYTES, values, x * S::BOX, y, z, full, policy);
    }
  }
}

// The unit's part of its row, cut to what the row and the window really hold.
DEVICE Note note_of(const Call& call, int unit, int& length) {
  int4 item = call.items[unit / call.kv_heads];
  Note note;
  note.row = item.x, note.head = unit % call.kv_heads, note.partial = item.w;
  length = call.context[note.row] + 1;
  note.first = call.row_parts[note.row], note.parts = call.row_parts[note.row + 1] - note.first;
  note.low = call.window ? max(item.y, length - call.window) : item.y;
  note.high = min(item.z, length);
  note.begin = note.low & -TILE;
  note.tiles = max(1, (note.high - note.begin + TILE - 1) / TILE);
  return note;
}

// May run before the kernel before it has ended: until then it only reads the work list, tables, lengths, and tiles
// without the newest key, none of which that kernel writes. `beside`: the kernel before is prefill's, which writes
// nothing that is read here, and lets this one start only when all who do have ended. So there is no wait but at the
// end, which must not come before its.
template <class S>
DEVICE void bring_all(Shared<S>& shared, const Maps& maps, const Call& call, int lane) {
  u64 policy = drop_from_l2();
  Ring<S> ring;
  bool waited = !call.early || call.beside;
  if (!call.early && !call.beside) wait_for_previous_kernel();
  int total = *call.count * call.kv_heads, grid = gridDim.x, turn = 0;
  int given = call.beside ? 0 : grid;  // units that belong to a CTA from the start
  const auto take = [&] { return total > given && lane == 0 ? given + atomicAdd(call.queue, 1) : total; };
  for (int unit = given ? blockIdx.x : __shfl_sync(ALL, take(), 0); unit < total; turn++) {
    int next = waited ? take() : total, length;
    bool asked = waited;
    Note note = note_of(call, unit, length);
    if (lane == 0) {
      shared.notes[turn % NOTES] = note;
      barrier_arrive(shared_address(&shared.told[turn % NOTES]));
    }
    const int* table = call.tables + i64(note.row) * call.table_width;
    int newest = length - 1 >> call.block_shift, entry = 0, block = 0;
    for (int i = 0; i < note.tiles; i++, ring.advance()) {
      int key = note.begin + i * TILE, needed = key + TILE - 1 >> call.block_shift;
      if (i == 0 || needed - entry >= 32) {
        entry = key >> call.block_shift;
        block = table[min(entry + lane, newest)];
      }
      barrier_wait(shared_address(&shared.empty[ring.stage]), ring.phase ^ 1);
      if (!waited && key + TILE >= length) wait_for_previous_kernel(), waited = true;
      bring(shared, maps, ring.stage, note.head, call.block_shift, key, note.high, entry, block, lane, policy);
    }
    if (!waited) wait_for_previous_kernel(), waited = true;
    if (!asked) next = take();
    unit = __shfl_sync(ALL, next, 0);
  }
  if (!waited) wait_for_previous_kernel();
  if (lane == 0) {
    shared.notes[turn % NOTES].row = -1, shared.notes[turn % NOTES].parts = 0;
    barrier_arrive(shared_address(&shared.told[turn % NOTES]));
    if (total > given) {  // then every CTA asked the queue, and the last to end leaves it as it was
      if (count_up(call.queue + 1) == grid - 1) call.queue[0] = 0, call.queue[1] = 0;
    }
  }
  if (call.beside) wait_for_previous_kernel();
}

// -- the end of a unit -----------------------------------------------------------------------------------------------

// A lane's four output columns of 16 are two pairs, at `at` and `at + GAP`: as products leave them.
template <class S>
struct Columns {
  static constexpr int GAP = S::F8 ? 2 : 8;
  DEVICE static int at(int step, int lane) { return 16 * step + lane % 4 * (S::F8 ? 4 : 2); }
  DEVICE static float4 of(const float (&even)[4], const float (&odd)[4], int h) {
    return S::F8 ? float4{even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]}
                 : float4{even[2 * h], even[2 * h + 1], odd[2 * h], odd[2 * h + 1]};
  }
};

// Sums over the four warps: each warp takes a quarter of the columns. To the output, or to the unit's partial.
template <class S, int HALVES>
DEVICE void add_up(Shared<S>& shared, State<S, HALVES>& state, const Call& call, const Note& note, int warp, int lane) {
  UNROLL for (int h = 0; h < HALVES; h++) {
    if (h) workers_meet();  // the first half has been read
    state.sum[h] += __shfl_xor_sync(ALL, state.sum[h], 1);
    state.sum[h] += __shfl_xor_sync(ALL, state.sum[h], 2);
    if (lane % 4 == 0) shared.tops[warp][lane / 4] = float2{state.top[h], state.sum[h]};
    UNROLL for (int k = 0; k < S::STEPS; k++)
      shared.sums[warp][k][lane] = Columns<S>::of(state.out[2 * k], state.out[2 * k + 1], h);
    workers_meet();
    int row = lane / 4 + 8 * h;
    if (row >= call.group) continue;
    float top = minus_infinity(), sum = 0.f, part[WORKERS];
    UNROLL for (int w = 0; w < WORKERS; w++) top = fmaxf(top, shared.tops[w][lane / 4].x);
    float base = top == minus_infinity() ? 0.f : top;
    UNROLL for (int w = 0; w < WORKERS; w++) {
      float2 one = shared.tops[w][lane / 4];
      part[w] = exp2_fast(one.x - base);
      sum = fmaf(one.y, part[w], sum);
    }
    bool whole = note.partial < 0;
    float scale = whole ? 1.f / sum : 1.f;
    i64 slot = (i64(note.partial) * call.kv_heads + note.head) * call.group + row;
    if (!whole && warp == 0 && lane % 4 == 0) call.tops[slot] = float2{top, sum};
    UNROLL for (int k = warp * (S::STEPS / WORKERS); k < (warp + 1) * (S::STEPS / WORKERS); k++) {
      float4 total = {0.f, 0.f, 0.f, 0.f};
      UNROLL for (int w = 0; w < WORKERS; w++) {
        float4 one = shared.sums[w][k][lane];
        total.x = fmaf(one.x, part[w], total.x), total.y = fmaf(one.y, part[w], total.y);
        total.z = fmaf(one.z, part[w], total.z), total.w = fmaf(one.w, part[w], total.w);
      }
      int at = Columns<S>::at(k, lane);
      if (whole) {
        bf16* to = call.out + ((i64(note.row) * call.kv_heads + note.head) * call.group + row) * S::HEAD_DIM + at;
        *reinterpret_cast<u32*>(to) = pack(total.x * scale, total.y * scale);
        *reinterpret_cast<u32*>(to + Columns<S>::GAP) = pack(total.z * scale, total.w * scale);
      } else {
        float* to = call.partials + slot * S::HEAD_DIM + at;
        *reinterpret_cast<float2*>(to) = float2{total.x, total.y};
        *reinterpret_cast<float2*>(to + Columns<S>::GAP) = float2{total.z, total.w};
      }
    }
  }
}

// After every partial of the row has been written: a thread has 4 columns of a head at a time.
template <class S>
DEVICE void merge(const Call& call, const Note& note, int thread) {
  constexpr int QUADS = S::HEAD_DIM / 4, BATCH = 8;
  i64 step = i64(call.kv_heads) * call.group;
  for (int e = thread; e < call.group * QUADS; e += 32 * WORKERS) {
    int row = e / QUADS, quad = e % QUADS;
    i64 slot = note.first * step + note.head * call.group + row;
    float top = minus_infinity(), sum = 0.f;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    for (int i = 0; i < note.parts; i += BATCH) {
      float2 one[BATCH];
      float4 part[BATCH];
      UNROLL for (int j = 0; j < BATCH; j++) {  // past the end, the last one again: without weight
        i64 at = slot + min(i + j, note.parts - 1) * step;
        one[j] = load_l2(call.tops + at);
        part[j] = load_l2(reinterpret_cast<const float4*>(call.partials) + at * QUADS + quad);
      }
      float most = top;
      UNROLL for (int j = 0; j < BATCH; j++) most = fmaxf(most, one[j].x);
      float base = most == minus_infinity() ? 0.f : most, shrink = exp2_fast(top - base);
      top = most, sum *= shrink;
      total.x *= shrink, total.y *= shrink, total.z *= shrink, total.w *= shrink;
      UNROLL for (int j = 0; j < BATCH; j++) {
        float weight = i + j < note.parts ? exp2_fast(one[j].x - base) : 0.f;
        sum = fmaf(one[j].y, weight, sum);
        total.x = fmaf(part[j].x, weight, total.x), total.y = fmaf(part[j].y, weight, total.y);
        total.z = fmaf(part[j].z, weight, total.z), total.w = fmaf(part[j].w, weight, total.w);
      }
    }
    float scale = 1.f / sum;
    i64 to = ((i64(note.row) * call.kv_heads + note.head) * call.group + row) * S::HEAD_DIM + quad * 4;
    *reinterpret_cast<uint2*>(call.out + to) =
        uint2{pack(total.x * scale, total.y * scale), pack(total.z * scale, total.w * scale)};
  }
}

// Whether this partial, written by all workers, was the last of its row to come.
DEVICE bool arrive(const Call& call, const Note& note) {
  int* arrivals = call.arrivals + note.row * call.kv_heads + note.head;
  bool last = count_up(arrivals) == note.parts - 1;
  if (last) *arrivals = 0;
  return last;
}

template <class S, int HALVES>
DEVICE void work(Shared<S>& shared, const Call& call, int warp, int lane) {
  Ring<S> ring;
  Note before;  // the unit before this one: whether it is up to us to merge its row is asked then and answered later
  before.parts = 0;
  if (!call.beside) wait_for_previous_kernel();
  for (int turn = 0;; turn++) {
    barrier_wait(shared_address(&shared.told[turn % NOTES]), turn / NOTES & 1);
    Note note = shared.notes[turn % NOTES];
    if (note.row >= 0) {
      u32 q[S::STEPS][4];
      const bf16* heads = call.qkv + i64(note.row) * call.qkv_stride + note.head * call.group * S::HEAD_DIM;
      load_queries<S, HALVES>(q, heads, call.group, lane);
      State<S, HALVES> state;
      state.clear();
      for (int i = 0; i < note.tiles; i++, ring.advance()) {
        u32 tile = shared_address(shared.tiles[ring.stage]);
        int key = note.begin + i * TILE + warp * KEYS;
        barrier_wait(shared_address(&shared.full[ring.stage]), ring.phase);
        if (key < note.high)  // else these keys were not brought
          attend(state, q, tile, tile + S::TILE_BYTES, key, note.low, note.high, call.scale, warp, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[ring.stage]));
      }
      add_up<S, HALVES>(shared, state, call, note, warp, lane);
    }
    workers_meet();  // all sums are read, the whole partial is written, and the answer for `before` is there
    bool left = before.parts && shared.last[turn & 1 ^ 1];
    if (note.parts && threadIdx.x == 0) shared.last[turn & 1] = arrive(call, note);
    if (left) merge<S>(call, before, threadIdx.x);
    if (note.row < 0) return;
    before = note;
  }
}

template <int HEAD_DIM, int BYTES, int HALVES>
__global__ void __launch_bounds__(THREADS, 2)
decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
       const __grid_constant__ TensorMap few_keys, const __grid_constant__ TensorMap few_values,
       const __grid_constant__ Call call) {
  using S = Shape<HEAD_DIM, BYTES>;
  extern __shared__ __align__(1024) u8 memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
  static_assert(sizeof(Shared<S>) <= sizeof(shared.tiles) + sizeof(shared.sums) + 896);  // what decode.py asks for
  static_assert(NOTES > S::STAGES);  // a note outlives its reading: the ring lets no unit run further ahead
  let_next_kernel_start();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024) __trap();
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), WORKERS);
    }
    for (int i = 0; i < NOTES; i++) barrier_init(shared_address(&shared.told[i]), 1);
    barriers_are_set();
  }
  __syncthreads();
  if (warp == WORKERS)
    bring_all<S>(shared, {&keys, &values, &few_keys, &few_values}, call, lane);
  else
    work<S, HALVES>(shared, call, warp, lane);
}
