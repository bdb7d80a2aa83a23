// y[m, n] = x[m, k] w[n, k]^T for a few rows of x: the weights are read once, as fast as memory gives them.
//
// Who owns what. A CTA owns 16 BLOCKS outputs (rows of w) at a time and all of k, so nothing is summed across CTAs.
// Warp i owns the units i, i + WARPS, .. of 64 k, and a private ring of slots that only it fills and reads: there is no
// producer, and no CTA barrier while streaming. A slot is a tile of x (8 TILES rows) and one of w, 128 bytes a row,
// swizzled; rows past n and units past k read as zero, rows past m are not fetched. It is refilled once its fragments
// are in registers.
//
// Where weights come from. `Rows`: bf16, through a tensor map. `Units`: packed, see uw12.cuh; a slot then has BLOCKS
// units, which are decoded in registers to the very fragments that rows would give, so that both sum up the same
// numbers. The headers of a tile's rows lie beside the rings, those of the next tile with them.
//
// Order of sums. An output is the sum over warps, in order, of what each added up unit by unit: it depends on k and
// WARPS alone, not on m, on the row of x, on BLOCKS, the stages or the grid.
#include "common.cuh"
#include "uw12.cuh"

enum Epilogue { STORE, STORE_F32, ADD, GATED };

struct PlainRows {
  static constexpr u32 BLOCK_BYTES = 2048;  // 16 rows x 64 k
  TensorMap map;
};
struct PackedUnits {
  static constexpr u32 BLOCK_BYTES = UNIT_BYTES;
  const u8 *planes, *headers;
  u32 stride;  // of headers
  int blocks;  // n / 16
};

template <class W, int BLOCKS, int TILES, int WARPS> struct Shape {
  static constexpr int ROWS = 16 * BLOCKS;     // of w
  static constexpr int COLUMNS = 8 * TILES;    // rows of x, which are the columns of a product w x^T
  static constexpr int THREADS = 32 * WARPS;
  static constexpr u32 X_BYTES = 128 * COLUMNS, W_BYTES = W::BLOCK_BYTES * BLOCKS;
  static constexpr u32 SLOT = (X_BYTES + W_BYTES + 1023) & ~1023u;  // tiles of x lie on multiples of 1024
  static constexpr int PITCH = ROWS + 4;       // floats: lanes that write one column apart meet other banks
  static constexpr int PARTIAL = COLUMNS * PITCH;
  static_assert(PARTIAL * 4 <= SLOT, "partial sums lie in a slot");
};

// The map itself is fetched too; this asks for it early.
DEVICE void prepare(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Two bf16 past the L1: a CTA that started early may find there what was read before the last kernel wrote.
DEVICE u32 load_past_l1(const bf16* at) {
  u32 pair;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(pair) : "l"(at) : "memory");
  return pair;
}

// A warp's share of a tile of w into a slot, and how many bytes that is; by one lane.
template <int BLOCKS>
DEVICE u32 fetch_bytes(const PlainRows&, int, int, int) { return PlainRows::BLOCK_BYTES * BLOCKS; }
template <int BLOCKS>
DEVICE void fetch(const PlainRows& w, u32 to, int tile, int unit, int, u32 barrier, u64 policy) {
  copy_tile(to, &w.map, 64 * unit, 16 * BLOCKS * tile, barrier, policy);
}
// The units of 64 rows lie side by side. Three blocks may be of two such groups, and fewer than three at the end.
template <int BLOCKS>
DEVICE u32 fetch_bytes(const PackedUnits& w, int tile, int unit, int units) {
  if (unit >= units) return 0;
  return UNIT_BYTES * (BLOCKS == 3 ? min(3, w.blocks - 3 * tile) : BLOCKS);
}
template <int BLOCKS>
DEVICE void fetch(const PackedUnits& w, u32 to, int tile, int unit, int units, u32 barrier, u64 policy) {
  if (unit >= units) return;
  const int block = BLOCKS * tile, count = BLOCKS == 3 ? min(3, w.blocks - block) : BLOCKS;
  const int near = BLOCKS == 3 ? min(count, 4 - block % 4) : count;
  copy_bytes(to, w.planes + unit_offset(block, unit, units), near * UNIT_BYTES, barrier, policy);
  if (near < count)
    copy_bytes(to + near * UNIT_BYTES, w.planes + unit_offset(block + near, unit, units), (count - near) * UNIT_BYTES,
               barrier, policy);
}

// A warp's slots. Step s of the warp (its units in order, tile after tile) is in slot s % stages.
template <class W, class S, int BLOCKS> struct Ring {
  const W* weights;
  const TensorMap* x;
  u32 x_bytes;  // of the rows there are: what lies beyond them nobody asks for
  u32 slots, barriers;
  int stages, warp, units, stride, all;  // unit j of the warp is unit warp + j stride of k, which has `all`
  u64 once, often;                       // how long the cache should hold what is read
  int tile, unit, slot, left;            // to be fetched next, and how many steps are yet to be

  DEVICE int unit_of(int j) const { return warp + j * stride; }
  DEVICE void open(int lane) const {
    if (lane == 0) {
      prepare(x);
#pragma unroll 1
      for (int i = 0; i < stages; i++) barrier_init(barriers + 8 * i, 1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  // The next step, if there is one, into its slot, which is free.
  DEVICE void fetch(int lane, bool with_x) {
    if (left == 0) return;
    if (lane == 0) {
      const u32 at = slots + slot * S::SLOT, barrier = barriers + 8 * slot;
      barrier_expect_bytes(barrier, x_bytes + fetch_bytes<BLOCKS>(*weights, tile, unit_of(unit), all));
      if (with_x) copy_tile(at, x, 64 * unit_of(unit), 0, barrier, often);
      ::fetch<BLOCKS>(*weights, at + S::X_BYTES, tile, unit_of(unit), all, barrier, once);
    }
    left--;
    if (++slot == stages) slot = 0;
    if (++unit == units) {
      unit = 0;
      tile += gridDim.x;
    }
  }
  // The tiles of x that belong to the first `count` slots, which were fetched without. By one lane.
  DEVICE void fetch_x(int count) const {
#pragma unroll 1
    for (int i = 0, j = 0; i < count; i++) {
      copy_tile(slots + i * S::SLOT, x, 64 * unit_of(j), 0, barriers + 8 * i, often);
      if (++j == units) j = 0;
    }
  }
};

// The headers of the CTA's tile i, in half i % 2 of their memory. Rows have none.
template <class W, int BLOCKS> struct Headers {
  static DEVICE u32 bytes(const W&) { return 0; }
  DEVICE void open(const W&, u32, u32, int) {}
  DEVICE void are_open() const {}
  DEVICE void fetch(int, int) const {}
  DEVICE u32 wait(int) const { return 0; }
};
template <int BLOCKS> struct Headers<PackedUnits, BLOCKS> {
  const PackedUnits* weights;
  u32 memory, barriers;
  static DEVICE u32 bytes(const PackedUnits& w) { return 2 * BLOCKS * w.stride; }
  // By one thread. Then all threads meet in `are_open`.
  DEVICE void open(const PackedUnits& from, u32 at, u32 barriers_at, int count) {
    weights = &from, memory = at, barriers = barriers_at;
    if (threadIdx.x) return;
    barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
    fence_barrier_init();
    fetch(0, count), fetch(1, count);
  }
  DEVICE void are_open() const { __syncthreads(); }
  // Of tile i, if there is one, when nobody needs those of tile i - 2.
  DEVICE void fetch(int i, int count) const {
    if (threadIdx.x || i >= count) return;
    const int block = BLOCKS * (blockIdx.x + i * gridDim.x);
    const u32 bytes = weights->stride * (BLOCKS == 3 ? min(3, weights->blocks - block) : BLOCKS);
    const u32 barrier = barriers + 8 * (i & 1);
    barrier_expect_bytes(barrier, bytes);
    copy_bytes(memory + (i & 1) * BLOCKS * weights->stride, weights->headers + i64(block) * weights->stride, bytes,
               barrier, l2_evict_first());
  }
  DEVICE u32 wait(int i) const {
    barrier_wait(barriers + 8 * (i & 1), i >> 1 & 1);
    return memory + (i & 1) * BLOCKS * weights->stride;
  }
};

// What a warp takes out of a slot: fragments of w. Chunk c of a row is k 8c .. 8c + 7; a product takes 16 k.
template <class W, int BLOCKS> struct Operand {
  u32 a[BLOCKS][4][4];
  DEVICE void begin(const W&, u32, int, int, int, int, int) {}
  DEVICE void load(u32 tile, int, int lane) {
    // Later chunks differ from the first in bits that the swizzle only flips: 2 f chunks on is ^ 32 f.
    const u32 at = swizzled_offset(lane & 15, lane >> 4);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
#pragma unroll
      for (int f = 0; f < 4; f++) load_matrices(a[r][f], tile + 2048 * r + (at ^ (32 * f)));
  }
  DEVICE void decode(int, int) {}
};
template <int BLOCKS> struct Operand<PackedUnits, BLOCKS> {
  u32 a[BLOCKS][4][4];
  Unit packed[BLOCKS];
  u32 scale[BLOCKS][2];
  Escapes escapes[BLOCKS];
  u32 headers, stride;
  int blocks, first, step, units;  // unit j of the warp is unit first + j step of k; `blocks` of the tile exist

  DEVICE void begin(const PackedUnits& w, u32 at, int tile, int warp, int warps, int all, int lane) {
    headers = at, stride = w.stride, first = warp, step = warps, units = all;
    blocks = BLOCKS == 3 ? min(3, w.blocks - 3 * tile) : BLOCKS;
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      scale[r][0] = load_shared_4(headers + r * stride + lane / 4 * 4);
      scale[r][1] = load_shared_4(headers + r * stride + lane / 4 * 4 + 32);
    }
    look(0, lane);
  }
  // At the escapes of the 32 units from j on.
  DEVICE void look(int j, int lane) {
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
      if (r < blocks) escapes[r].read_ranges(headers + r * stride, first + j * step, step, units, lane);
  }
  DEVICE void load(u32 tile, int j, int lane) {
    const bool inside = first + j * step < units;
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      packed[r] = Unit{};
      if (inside) packed[r].load_shared(tile + UNIT_BYTES * r, lane);
    }
  }
  DEVICE void decode(int j, int lane) {
    if (j && (j & 31) == 0) look(j, lane);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      decode_unit(a[r], packed[r], scale[r][0], scale[r][1]);
      if (escapes[r].has(j & 31)) escapes[r].restore(a[r], headers + r * stride + escapes_offset(units), j & 31, lane);
    }
  }
};

// The same of x.
template <int TILES> struct Columns {
  u32 b[TILES][2][4];
  DEVICE void load(u32 tile, int lane) {
    const u32 at = swizzled_offset(lane & 7, lane >> 3);  // 4 chunks on is ^ 64
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      load_matrices(b[t][0], tile + 1024 * t + at);
      load_matrices(b[t][1], tile + 1024 * t + (at ^ 64));
    }
  }
};

template <int BLOCKS, int TILES>
DEVICE void multiply_into(float (&sums)[BLOCKS][TILES][4], const u32 (&a)[BLOCKS][4][4], const u32 (&b)[TILES][2][4]) {
#pragma unroll
  for (int f = 0; f < 4; f++)
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        multiply(sums[r][t], a[r][f], b[t][f / 2][2 * (f % 2)], b[t][f / 2][2 * (f % 2) + 1]);
}

// A warp's sums, laid out [column][row].
template <class S, int BLOCKS, int TILES>
DEVICE void put_partial(float* partial, const float (&sums)[BLOCKS][TILES][4], int lane) {
#pragma unroll
  for (int r = 0; r < BLOCKS; r++)
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float* at = partial + (8 * t + 2 * (lane % 4)) * S::PITCH + 16 * r + lane / 4;
      at[0] = sums[r][t][0];
      at[S::PITCH] = sums[r][t][1];
      at[8] = sums[r][t][2];
      at[S::PITCH + 8] = sums[r][t][3];
    }
}

template <int WARPS> DEVICE float2 sum_partials(const float* partials, int pitch) {
  float2 sum = *reinterpret_cast<const float2*>(partials);
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    const float2 more = *reinterpret_cast<const float2*>(partials + w * pitch);
    sum.x += more.x;
    sum.y += more.y;
  }
  return sum;
}

// As torch does it in bf16: gate and up are rounded, then silu, then the product.
DEVICE float gated(float gate, float up) {
  gate = to_float(to_bf16(gate));
  const float silu = gate / (1.f + expf(-gate));
  return to_float(to_bf16(silu)) * to_float(to_bf16(up));
}

// The CTA's threads divide a tile's outputs among them, two neighbours at a time: item i is pair i % PAIRS of column
// i / PAIRS. What is added to an output is asked for before the weights are streamed, and is there after.
template <class S, int WARPS, Epilogue END> struct Outputs {
  static constexpr int PAIRS = END == GATED ? S::ROWS / 4 : S::ROWS / 2;
  static constexpr int ITEMS = (S::COLUMNS * PAIRS + S::THREADS - 1) / S::THREADS;
  void* out;
  const bf16* residual;
  const float* bias;
  int n, m, width;  // width: of a row of out
  u32 added[ITEMS];
  float2 shift[ITEMS];

  static DEVICE int column(int i) { return (threadIdx.x + S::THREADS * i) / PAIRS; }
  static DEVICE int pair(int i) { return (threadIdx.x + S::THREADS * i) % PAIRS; }
  // The pair's first row of w within the tile. Gated: 16 rows of gates, then the 16 of up that belong to them.
  static DEVICE int row(int i) { return END == GATED ? 32 * (pair(i) / 8) + 2 * (pair(i) % 8) : 2 * pair(i); }
  DEVICE bool ours(int i, int tile) const { return column(i) < m && S::ROWS * tile + row(i) < n; }
  DEVICE i64 place(int i, int tile) const { return i64(column(i)) * width + tile * (2 * PAIRS) + 2 * pair(i); }

  DEVICE void ask(int tile) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      added[i] = 0;
      shift[i] = make_float2(0.f, 0.f);
      if (!ours(i, tile)) continue;
      if (END == ADD) added[i] = load_past_l1(residual + place(i, tile));
      if (END != GATED && bias) shift[i] = *reinterpret_cast<const float2*>(bias + S::ROWS * tile + row(i));
    }
  }
  DEVICE void finish(int tile, const float* partials, int pitch) const {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      if (!ours(i, tile)) continue;
      const float* at = partials + column(i) * S::PITCH + row(i);
      float2 y = sum_partials<WARPS>(at, pitch);
      if (END == GATED) {
        float2 up = sum_partials<WARPS>(at + 16, pitch);
        if (bias) {
          const float* from = bias + S::ROWS * tile + row(i);
          y = make_float2(y.x + from[0], y.y + from[1]);
          up = make_float2(up.x + from[16], up.y + from[17]);
        }
        y = make_float2(gated(y.x, up.x), gated(y.y, up.y));
      } else {
        y = make_float2(y.x + shift[i].x, y.y + shift[i].y);
      }
      if (END == ADD) y = make_float2(low(added[i]) + y.x, high(added[i]) + y.y);
      if (END == STORE_F32) *reinterpret_cast<float2*>(static_cast<float*>(out) + place(i, tile)) = y;
      else *reinterpret_cast<u32*>(static_cast<bf16*>(out) + place(i, tile)) = pack(y.x, y.y);
    }
  }
};

// Shared memory: the rings of the warps, then `buffers` sets of partial sums, two sets of headers, and the barriers.
// With two sets of sums a warp writes one while slower warps read the other; with one, a barrier keeps them apart. With
// none, a warp's partial sums lie in the slot that it read last, which is refilled once they have been added up.
//
// `early`: launched while the kernel before may still run. Weights are asked for at once, x after it has ended.
template <class W, int BLOCKS, int TILES, int WARPS, Epilogue END>
__global__ void __launch_bounds__(32 * WARPS, 1)
    linear(const __grid_constant__ W weights, const __grid_constant__ TensorMap x, void* out, const bf16* residual,
           const float* bias, int n, int k, int m, int stages, int buffers, int pdl) {
  using S = Shape<W, BLOCKS, TILES, WARPS>;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  float* const shared = reinterpret_cast<float*>(unaligned + (base - shared_address(unaligned)));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 ring_bytes = stages * S::SLOT, rings_bytes = WARPS * ring_bytes;
  const u32 headers_at = base + rings_bytes + buffers * WARPS * S::PARTIAL * 4;
  const u32 barriers = headers_at + Headers<W, BLOCKS>::bytes(weights);

  const int tiles = (n + S::ROWS - 1) / S::ROWS, count = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const int all = k / 64, units = (all + WARPS - 1) / WARPS;  // of k, and of each warp; those past k read as zero
  Headers<W, BLOCKS> headers;
  headers.open(weights, headers_at, barriers + 8 * WARPS * stages, count);
  Ring<W, S, BLOCKS> ring{&weights, &x, 128u * m, base + warp * ring_bytes, barriers + 8 * warp * stages, stages, warp,
                          units, WARPS, all, l2_evict_first(), l2_evict_last(), int(blockIdx.x), 0, 0, count * units};
  const int ahead = min(stages, ring.left);
  ring.open(lane);
#pragma unroll 1
  for (int i = 0; i < ahead; i++) ring.fetch(lane, !pdl);
  wait_for_previous_kernel();
  if (pdl && lane == 0) ring.fetch_x(ahead);
  headers.are_open();

  Outputs<S, WARPS, END> outputs{out, residual, bias, n, m, END == GATED ? n / 2 : n};
  u32 parity = 0;
#pragma unroll 1
  for (int i = 0, slot = 0; i < count; i++) {
    const int tile = blockIdx.x + i * gridDim.x;
    outputs.ask(tile);
    Operand<W, BLOCKS> rows;
    rows.begin(weights, headers.wait(i), tile, warp, WARPS, all, lane);
    float sums[BLOCKS][TILES][4] = {};
    int last = slot;
#pragma unroll 1
    for (int j = 0; j < units; j++) {
      barrier_wait(ring.barriers + 8 * slot, parity);
      const u32 at = ring.slots + slot * S::SLOT;
      Columns<TILES> columns;
      columns.load(at, lane);
      rows.load(at + S::X_BYTES, j, lane);
      __syncwarp();  // every lane has read the slot
      if (buffers || j + 1 < units) ring.fetch(lane, true);
      rows.decode(j, lane);
      multiply_into(sums, rows.a, columns.b);
      last = slot;
      if (++slot == stages) slot = 0, parity ^= 1;
    }
    if (buffers == 1 && i) __syncthreads();  // the last tile's partial sums have been read
    const int pitch = buffers ? S::PARTIAL : ring_bytes / 4;
    float* set = shared + last * (S::SLOT / 4);
    if (buffers) set = shared + rings_bytes / 4 + (buffers == 2 && i % 2 ? WARPS * S::PARTIAL : 0);
    put_partial<S>(set + warp * pitch, sums, lane);
    __syncthreads();
    headers.fetch(i + 2, count);
    outputs.finish(tile, set, pitch);
    if (!buffers && i + 1 < count) {
      fence_shared_writes();
      __syncthreads();
      ring.fetch(lane, true);
    }
  }
}
