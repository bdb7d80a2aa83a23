// Units of work of decode.cu: their description, a CTA's shared memory, and the producer warp, which fetches tiles.
#pragma once
#include "attend.cuh"

// New tokens of a sequence, at most, if rows have several queries; MAX_NEW_TOKENS in worklist.py.
constexpr int MAX_NEW_TOKENS = 32;

struct Arguments {  // mirrored by _DecodeArguments in decode.py
  const bf16* qkv;
  bf16* out;
  const int4* items;
  const int* partial_starts;
  const int* count;
  const int* tables;
  const int* context;
  float* partials;  // [partial, kv_heads, slot_rows, head_dim]
  float2* max_and_sum;  // [partial, kv_heads, slot_rows]: largest score, in base 2, and sum of weights
  int* arrivals;    // [row, kv_heads], zero between launches
  int* queue;       // next unit, and number of CTAs that have ended; zero between launches
  int qkv_stride, table_width, block_shift, group, kv_heads, window;
  int pdl, beside_prefill;
  float scale;  // softmax scale times log2(e)
  // Read if SEVERAL. Otherwise the query of row r is token r, and slot_rows is the group.
  int slot_rows;           // largest number of queries of a row, times the group
  const int* query_start;  // [rows + 1]: the queries of row r are the tokens [query_start[r], query_start[r + 1])
  // Read if KINDS.
  const float* sinks;  // [query heads]: scores that join the softmax, or null
  ScoreCap cap;
  int chunked;  // whether a query sees the keys since the last multiple of `window`
  // If not 0, the list is not read: the visible keys of each of `rows` rows are cut into as many parts of equal size,
  // or into single tiles. `query_start` is then read in any case: rows without queries are padding.
  int window_parts, rows;
};

template <bool SEVERAL>
struct RowQueries {};
template <>
struct RowQueries<true> {
  int token, queries, context;  // of the row: first token, number of tokens, number of keys before them
};
template <class S>
struct alignas(16) UnitInfo : RowQueries<S::SEVERAL> {  // what the compute warps need of a unit
  int row, head, low, high;  // keys [low, high) are visible
  int begin, tiles;          // first key of the first tile; at least one tile, even if no key is visible
  int partial, first, parts; // partial results of the row: [first, first + parts); -1 for a row of one item
};

// A fragment row is a head of the group, for one of the queries of a row.
template <class S>
DEVICE int count_rows(const Arguments& args, const UnitInfo<S>& info) {
  if constexpr (S::SEVERAL) return info.queries * args.group;
  return args.group;
}
template <class S>
DEVICE int slot_rows(const Arguments& args) {
  return S::SEVERAL ? args.slot_rows : args.group;
}
// Index of the output of a fragment row in [token, head].
template <class S>
DEVICE i64 output_index(const Arguments& args, const UnitInfo<S>& info, int row) {
  if constexpr (S::SEVERAL) {
    int query = u32(row) / u32(args.group);
    return (i64(info.token + query) * args.kv_heads + info.head) * args.group + (row - query * args.group);
  }
  return (i64(info.row) * args.kv_heads + info.head) * args.group + row;
}

template <class S>
constexpr int INFO_SLOTS = 8 * S::FRAGMENTS;

template <class S>
struct alignas(16) Shared {
  u8 tiles[S::STAGES][2][S::TILE_BYTES];  // first, because the swizzle needs 1024-byte alignment
  float4 sums[S::FRAGMENTS][COMPUTE_WARPS][S::STEPS][32];
  float2 max_and_sum[S::FRAGMENTS][COMPUTE_WARPS][8];
  UnitInfo<S> infos[INFO_SLOTS<S>];
  u64 full[S::STAGES], empty[S::STAGES], info_ready[INFO_SLOTS<S>];
  int last[2];  // whether the unit was the last of its row; double-buffered by iteration
};

template <class S>
struct Ring {
  u32 stage = 0, phase = 0;
  DEVICE void advance() {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
};

template <class S>
DEVICE void sync_compute_warps() {
  __syncwarp();
  if constexpr (S::FRAGMENTS == 1)
    asm volatile("bar.sync 1, 128;" ::: "memory");
  else
    asm volatile("bar.sync 1, 256;" ::: "memory");
}
// Waits for the four warps of a fragment.
template <class S>
DEVICE void sync_team(int fragment) {
  if constexpr (S::FRAGMENTS == 1) return sync_compute_warps<S>();
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(2 + fragment) : "memory");
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

// Returns the first key that a query sees in a layer with a window; a negative one stands for 0.
template <class S>
DEVICE int first_key(const Arguments& args, int position) {
  if (S::KINDS && args.chunked) return position - u32(position) % u32(args.window);
  return position + 1 - args.window;
}

// Cuts the visible keys of a row into parts: sets the range of keys in `item`, its partial result, and the row's.
// Returns whether the row has this part.
template <class S>
DEVICE bool cut_window(const Arguments& args, int4& item, UnitInfo<S>& info) {
  const int row = item.x / args.window_parts, part = item.x - row * args.window_parts, context = args.context[row];
  const int queries = args.query_start[row + 1] - args.query_start[row];
  const int base = max(first_key<S>(args, context), 0) / TILE;
  const int tiles = (context + queries + TILE - 1) / TILE - base, parts = min(tiles, args.window_parts);
  if (queries <= 0 || part >= parts) return false;
  item.x = row, item.y = (base + part * tiles / parts) * TILE, item.z = (base + (part + 1) * tiles / parts) * TILE;
  info.first = row * args.window_parts, info.parts = parts > 1 ? parts : 0;
  item.w = parts > 1 ? info.first + part : -1;
  return true;
}

// Finds the unit's range of keys, limited to the row's length and the window. Returns false if there is no such unit.
template <class S>
DEVICE bool make_info(const Arguments& args, int unit, int& length, UnitInfo<S>& info) {
  const bool has_parts = S::KINDS && args.window_parts;
  int4 item = {unit / args.kv_heads, 0, 0, 0};
  if (!has_parts)
    item = args.items[item.x];
  else if (!cut_window(args, item, info))
    return false;
  info.row = item.x, info.head = unit % args.kv_heads, info.partial = item.w;
  length = args.context[info.row] + 1;
  int first_length = length;  // number of keys of the first query
  if constexpr (S::SEVERAL) {
    info.token = args.query_start[info.row], info.queries = args.query_start[info.row + 1] - info.token;
    info.context = length - 1, length = info.context + info.queries;
  }
  if (!has_parts)
    info.first = args.partial_starts[info.row], info.parts = args.partial_starts[info.row + 1] - info.first;
  info.low = args.window ? max(item.y, first_key<S>(args, first_length - 1)) : item.y;
  info.high = min(item.z, length);
  info.begin = info.low & -TILE;
  info.tiles = max(1, (info.high - info.begin + TILE - 1) / TILE);
  return true;
}

// With PDL this may run before the preceding kernel has ended. Until then it reads only the work list, tables, lengths,
// and tiles without the newest keys, none of which that kernel writes. If SEVERAL, other rows may have queries of the
// same sequence, so the newest MAX_NEW_TOKENS keys of a row may be new. `beside_prefill`: the preceding kernel is
// prefill, which writes nothing that is read here, and which triggers this launch only after all kernels before it have
// ended. So this kernel waits only at its end, which must not come before the end of prefill.
template <class S>
DEVICE void fetch_units(Shared<S>& shared, const Maps& maps, const Arguments& args, int lane) {
  u64 policy = l2_evict_first();
  Ring<S> ring;
  bool waited = !args.pdl || args.beside_prefill;
  if (!args.pdl && !args.beside_prefill) wait_for_previous_kernel();
  const int items = S::KINDS && args.window_parts ? args.rows * args.window_parts : *args.count;
  int total = items * args.kv_heads, grid = gridDim.x, iteration = 0;
  int preassigned = args.beside_prefill ? 0 : grid;  // units that are assigned to CTAs without the queue
  const auto take_unit = [&] {
    return total > preassigned && lane == 0 ? preassigned + atomicAdd(args.queue, 1) : total;
  };
  for (int unit = preassigned ? blockIdx.x : __shfl_sync(ALL_LANES, take_unit(), 0); unit < total; iteration++) {
    int next = waited ? take_unit() : total, length;
    bool requested = waited;
    UnitInfo<S> info;
    const bool exists = make_info(args, unit, length, info);
    if (exists && lane == 0) {
      shared.infos[iteration % INFO_SLOTS<S>] = info;
      barrier_arrive(shared_address(&shared.info_ready[iteration % INFO_SLOTS<S>]));
    }
    if (!exists) info.row = info.tiles = info.low = length = 0, iteration--;
    const int* table = args.tables + i64(info.row) * args.table_width;
    // Entries before the first visible key may name any block, whose values may not be finite.
    int oldest = info.low >> args.block_shift, newest = length - 1 >> args.block_shift, entry = 0, block = 0;
    for (int i = 0; i < info.tiles; i++, ring.advance()) {
      int key = info.begin + i * TILE, needed = key + TILE - 1 >> args.block_shift;
      if (i == 0 || needed - entry >= 32) {
        entry = key >> args.block_shift;
        block = table[min(max(entry + lane, oldest), newest)];
      }
      barrier_wait(shared_address(&shared.empty[ring.stage]), ring.phase ^ 1);
      if (!waited && key + TILE >= length - (S::SEVERAL ? MAX_NEW_TOKENS - 1 : 0))
        wait_for_previous_kernel(), waited = true;
      fetch_tile(shared, maps, ring.stage, info.head, args.block_shift, key, info.high, entry, block, lane, policy);
    }
    if (!waited) wait_for_previous_kernel(), waited = true;
    if (!requested) next = take_unit();
    unit = __shfl_sync(ALL_LANES, next, 0);
  }
  if (!waited) wait_for_previous_kernel();
  if (lane == 0) {
    shared.infos[iteration % INFO_SLOTS<S>].row = -1, shared.infos[iteration % INFO_SLOTS<S>].parts = 0;
    barrier_arrive(shared_address(&shared.info_ready[iteration % INFO_SLOTS<S>]));
    if (total > preassigned) {  // then every CTA used the queue, and the last to end resets it
      if (atomic_increment(args.queue + 1) == grid - 1) args.queue[0] = 0, args.queue[1] = 0;
    }
  }
  if (args.beside_prefill) wait_for_previous_kernel();
}
