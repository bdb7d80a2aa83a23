// y[m, n] = x[m, k] w[n, k]^T for a few rows of x, bound by memory bandwidth: the weights are read exactly once.
//
// Tiles. A CTA computes 16 BLOCKS outputs (rows of w) at a time over all of k, so no sums cross CTAs. Warp i has the
// units i, i + WARPS, .. of 64 k, and a private ring of slots that only it fills and reads. So there is no producer
// warp, and no CTA barrier while weights are streamed. A slot has a tile of x (8 TILES rows) and one of w, 128 bytes
// per row, swizzled. Rows beyond n and units beyond k are read as zero, rows beyond m are not fetched. A slot is
// refilled as soon as its fragments are in registers.
//
// Weights. `PlainRows`: bf16, fetched by TMA through a tensor map. `PackedUnits`: uw12, see uw12.cuh; a slot then has
// BLOCKS units, which are decoded in registers to the same fragments as plain rows, so that both sum the same numbers.
// The headers of a tile's rows are in shared memory beside the rings, together with those of the next tile. `Fp8Rows`
// and `Fp8Blocks`: float8 codes with scales, see fp8.cuh; a unit has 128 k, and two tiles of x.
//
// Order of sums. An output is the sum over warps, in order, of each warp's sum unit by unit. It depends on k and WARPS
// only, not on m, the row of x, BLOCKS, the stages or the grid.
#include "common.cuh"
#include "uw12.cuh"
#include "fp8.cuh"

enum Epilogue { STORE, STORE_F32, ADD, GATED };

// BLOCK_BYTES: bytes of 16 rows of a unit. X_TILES: tiles of 64 k in a unit. SCALED: rows have scales, for the epilogue.
struct PlainRows {
  static constexpr u32 BLOCK_BYTES = 2048;
  static constexpr int X_TILES = 1;
  static constexpr bool SCALED = false;
  TensorMap map;
};
struct PackedUnits {
  static constexpr u32 BLOCK_BYTES = UNIT_BYTES;
  static constexpr int X_TILES = 1;
  static constexpr bool SCALED = false;
  const u8 *planes, *headers;
  u32 stride;  // bytes of a header
  int blocks;  // n / 16
};
struct Fp8Rows {
  static constexpr u32 BLOCK_BYTES = 2048;
  static constexpr int X_TILES = 2;
  static constexpr bool SCALED = true;
  TensorMap map;
  const float* scales;  // [n]
};
struct Fp8Blocks {
  static constexpr u32 BLOCK_BYTES = 2048;
  static constexpr int X_TILES = 2;
  static constexpr bool SCALED = false;  // the scales are applied to the sums of each unit
  TensorMap map;
  const float* scales;  // [n / 16][units]
};

template <class W, int BLOCKS, int TILES, int WARPS> struct Shape {
  static constexpr int ROWS = 16 * BLOCKS;     // rows of w in a tile
  static constexpr int COLUMNS = 8 * TILES;    // rows of x, which are the columns of a product w x^T
  static constexpr int THREADS = 32 * WARPS;
  static constexpr bool SCALED = W::SCALED;
  static constexpr u32 X_TILE_BYTES = 128 * COLUMNS, X_BYTES = W::X_TILES * X_TILE_BYTES, W_BYTES = W::BLOCK_BYTES * BLOCKS;
  static constexpr u32 SLOT = (X_BYTES + W_BYTES + 1023) & ~1023u;  // tiles of x must be aligned to 1024
  // Floats; padded to avoid bank conflicts between lanes that write adjacent columns.
  static constexpr int PITCH = ROWS + 4;
  static constexpr int PARTIAL = COLUMNS * PITCH;
  static_assert(PARTIAL * 4 <= SLOT, "partial sums must fit into a slot");
};

// Loads two bf16 past L1. With PDL this CTA started early, and L1 may hold data from before the preceding kernel's
// writes.
DEVICE u32 load_past_l1(const bf16* at) {
  u32 pair;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(pair) : "l"(at) : "memory");
  return pair;
}

// The bytes of a warp's part of a tile of w, and its copy into a slot, by one lane.
template <int BLOCKS>
DEVICE u32 fetch_bytes(const PlainRows&, int, int, int) { return PlainRows::BLOCK_BYTES * BLOCKS; }
template <int BLOCKS>
DEVICE void fetch(const PlainRows& w, u32 to, int tile, int unit, int, u32 barrier, u64 policy) {
  copy_tile(to, &w.map, 64 * unit, 16 * BLOCKS * tile, barrier, policy);
}
template <int BLOCKS>
DEVICE u32 fetch_bytes(const Fp8Rows&, int, int, int) { return Fp8Rows::BLOCK_BYTES * BLOCKS; }
template <int BLOCKS>
DEVICE void fetch(const Fp8Rows& w, u32 to, int tile, int unit, int, u32 barrier, u64 policy) {
  copy_tile(to, &w.map, 128 * unit, 16 * BLOCKS * tile, barrier, policy);
}
template <int BLOCKS>
DEVICE u32 fetch_bytes(const Fp8Blocks&, int, int, int) { return Fp8Blocks::BLOCK_BYTES * BLOCKS; }
template <int BLOCKS>
DEVICE void fetch(const Fp8Blocks& w, u32 to, int tile, int unit, int, u32 barrier, u64 policy) {
  copy_tile(to, &w.map, 128 * unit, 16 * BLOCKS * tile, barrier, policy);
}
// The units of 64 rows are adjacent. Three blocks may belong to two groups of 64 rows, and there may be fewer at the
// end.
template <int BLOCKS>
DEVICE u32 fetch_bytes(const PackedUnits& w, int tile, int unit, int units) {
  if (unit >= units) return 0;
  return UNIT_BYTES * (BLOCKS == 3 ? min(3, w.blocks - 3 * tile) : BLOCKS);
}
template <int BLOCKS>
DEVICE void fetch(const PackedUnits& w, u32 to, int tile, int unit, int units, u32 barrier, u64 policy) {
  if (unit >= units) return;
  const int block = BLOCKS * tile, count = BLOCKS == 3 ? min(3, w.blocks - block) : BLOCKS;
  const int first = BLOCKS == 3 ? min(count, 4 - block % 4) : count;  // blocks in the first group
  copy_bytes(to, w.planes + unit_offset(block, unit, units), first * UNIT_BYTES, barrier, policy);
  if (first < count)
    copy_bytes(to + first * UNIT_BYTES, w.planes + unit_offset(block + first, unit, units),
               (count - first) * UNIT_BYTES,
               barrier, policy);
}

// A warp's ring of slots. Step s of the warp (its units in order, tile after tile) is in slot s % stages.
template <class W, class S, int BLOCKS> struct Ring {
  const W* weights;
  const TensorMap* x;
  u32 x_bytes;  // bytes of the m rows of x in a slot
  u32 slots, barriers;
  int stages, warp, units, stride, total_units;  // unit j of the warp is unit warp + j stride of all units of k
  u64 evict_first, evict_last;                       // L2 eviction policies of weights and of x
  int tile, unit, slot, remaining;            // the next step to fetch, and the number of steps left

  DEVICE int unit_of(int j) const { return warp + j * stride; }
  DEVICE void open(int lane) const {
    if (lane == 0) {
      prefetch_map(x);
#pragma unroll 1
      for (int i = 0; i < stages; i++) barrier_init(barriers + 8 * i, 1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  DEVICE void copy_x(u32 to, int unit, u32 barrier) const {
#pragma unroll
    for (int i = 0; i < W::X_TILES; i++)
      copy_tile(to + i * S::X_TILE_BYTES, x, 64 * (W::X_TILES * unit + i), 0, barrier, evict_last);
  }
  // Fetches the next step, if any, into its slot, which must be free.
  DEVICE void fetch(int lane, bool with_x) {
    if (remaining == 0) return;
    if (lane == 0) {
      const u32 at = slots + slot * S::SLOT, barrier = barriers + 8 * slot;
      barrier_expect_bytes(barrier, x_bytes + fetch_bytes<BLOCKS>(*weights, tile, unit_of(unit), total_units));
      if (with_x) copy_x(at, unit_of(unit), barrier);
      ::fetch<BLOCKS>(*weights, at + S::X_BYTES, tile, unit_of(unit), total_units, barrier, evict_first);
    }
    remaining--;
    if (++slot == stages) slot = 0;
    if (++unit == units) {
      unit = 0;
      tile += gridDim.x;
    }
  }
  // Fetches x into the first `count` slots, whose weights were fetched before. Called by one lane.
  DEVICE void fetch_x(int count) const {
#pragma unroll 1
    for (int i = 0, j = 0; i < count; i++) {
      copy_x(slots + i * S::SLOT, unit_of(j), barriers + 8 * i);
      if (++j == units) j = 0;
    }
  }
};

// The headers of the CTA's tile i, double-buffered: half i % 2 of their memory. Plain rows have none.
template <class W, int BLOCKS> struct Headers {
  static DEVICE u32 bytes(const W&) { return 0; }
  DEVICE void open(const W&, u32, u32, int) {}
  DEVICE void sync_open() const {}
  DEVICE void fetch(int, int) const {}
  DEVICE u32 wait(int) const { return 0; }
};
template <int BLOCKS> struct Headers<PackedUnits, BLOCKS> {
  const PackedUnits* weights;
  u32 memory, barriers;
  static DEVICE u32 bytes(const PackedUnits& w) { return 2 * BLOCKS * w.stride; }
  // Initialises the barriers by one thread; all threads then synchronise in `sync_open`.
  DEVICE void open(const PackedUnits& from, u32 at, u32 barriers_at, int count) {
    weights = &from, memory = at, barriers = barriers_at;
    if (threadIdx.x) return;
    barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
    fence_barrier_init();
    fetch(0, count), fetch(1, count);
  }
  DEVICE void sync_open() const { __syncthreads(); }
  // Fetches the headers of tile i, if it exists. Those of tile i - 2 must no longer be in use.
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

// Fragments of w that a warp loads from a slot. Chunk c of a row is k 8c .. 8c + 7; an mma has 16 k.
template <class W, int BLOCKS> struct WeightFragments {
  u32 a[BLOCKS][4][4];
  DEVICE void start_tile(const W&, u32, int, int, int, int, int) {}
  DEVICE void load(u32 tile, int, int lane) {
    // The swizzle is an XOR, so the address of the chunk 2 f further is that of the first ^ 32 f.
    const u32 at = swizzled_offset(lane & 15, lane >> 4);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
#pragma unroll
      for (int f = 0; f < 4; f++) load_matrices(a[r][f], tile + 2048 * r + (at ^ (32 * f)));
  }
  template <int TILES>
  DEVICE void multiply_into(float (&sums)[BLOCKS][TILES][4], const u32 (&b)[TILES][2][4], int, int) {
    ::multiply_into(sums, a, b);
  }
};
template <int BLOCKS> struct WeightFragments<PackedUnits, BLOCKS> {
  u32 a[BLOCKS][4][4];
  Unit packed[BLOCKS];
  u32 scale[BLOCKS][2];
  Escapes escapes[BLOCKS];
  u32 headers, stride;
  int blocks, first, step, units;  // unit j of the warp is unit first + j step of k; the tile has `blocks` blocks

  DEVICE void start_tile(const PackedUnits& w, u32 at, int tile, int warp, int warps, int total_units, int lane) {
    headers = at, stride = w.stride, first = warp, step = warps, units = total_units;
    blocks = BLOCKS == 3 ? min(3, w.blocks - 3 * tile) : BLOCKS;
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      scale[r][0] = load_shared_4(headers + r * stride + lane / 4 * 4);
      scale[r][1] = load_shared_4(headers + r * stride + lane / 4 * 4 + 32);
    }
    read_escape_ranges(0, lane);
  }
  // Reads the ranges of escapes of the 32 units from j on.
  DEVICE void read_escape_ranges(int j, int lane) {
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
    if (j && (j & 31) == 0) read_escape_ranges(j, lane);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      decode_unit(a[r], packed[r], scale[r][0], scale[r][1]);
      if (escapes[r].has(j & 31)) escapes[r].restore(a[r], headers + r * stride + escapes_offset(units), j & 31, lane);
    }
  }
  template <int TILES>
  DEVICE void multiply_into(float (&sums)[BLOCKS][TILES][4], const u32 (&b)[TILES][2][4], int j, int lane) {
    decode(j, lane);
    ::multiply_into(sums, a, b);
  }
};
// Codes are decoded just before they are multiplied: decoded, they take twice as many registers.
template <int BLOCKS> struct CodeFragments {
  u32 codes[BLOCKS][4][4];
  DEVICE void load(u32 tile, int, int lane) {
    const u32 at = swizzled_offset(lane & 15, lane >> 4);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) load_matrices(codes[r][i], tile + 2048 * r + (at ^ (32 * i)));
  }
  // Chunk f of a row is k 16f .. 16f + 15: one mma. The tiles of the upper 64 k are behind those of the lower.
  template <int TILES>
  DEVICE void multiply_codes(float (&sums)[BLOCKS][TILES][4], const u32 (&b)[2 * TILES][2][4]) const {
#pragma unroll
    for (int f = 0; f < 8; f++)
#pragma unroll
      for (int r = 0; r < BLOCKS; r++) {
        u32 a[4];
        decode_codes(a[0], a[2], codes[r][f / 2][2 * (f % 2)]);
        decode_codes(a[1], a[3], codes[r][f / 2][2 * (f % 2) + 1]);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const u32(&x)[4] = b[f / 4 * TILES + t][f % 4 / 2];
          multiply(sums[r][t], a, x[2 * (f % 2)], x[2 * (f % 2) + 1]);
        }
      }
  }
};
template <int BLOCKS> struct WeightFragments<Fp8Rows, BLOCKS> : CodeFragments<BLOCKS> {
  DEVICE void start_tile(const Fp8Rows&, u32, int, int, int, int, int) {}
  template <int TILES>
  DEVICE void multiply_into(float (&sums)[BLOCKS][TILES][4], const u32 (&b)[2 * TILES][2][4], int, int) {
    this->multiply_codes(sums, b);
  }
};
template <int BLOCKS> struct WeightFragments<Fp8Blocks, BLOCKS> : CodeFragments<BLOCKS> {
  const float* from;       // the scales of the tile's first block
  float scale[BLOCKS];     // lane j: the scale of unit j of the warp's current 32
  int first, step, units;  // unit j of the warp is unit first + j step of k

  DEVICE void start_tile(const Fp8Blocks& w, u32, int tile, int warp, int warps, int total_units, int lane) {
    from = w.scales + i64(BLOCKS * tile) * total_units, first = warp, step = warps, units = total_units;
    read_scales(0, lane);
  }
  // Rows beyond n have zero codes; the buffer is padded so that their scales can be read.
  DEVICE void read_scales(int j, int lane) {
    const int unit = first + (j + lane) * step;
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) scale[r] = unit < units ? from[r * units + unit] : 0.f;
  }
  template <int TILES>
  DEVICE void multiply_into(float (&sums)[BLOCKS][TILES][4], const u32 (&b)[2 * TILES][2][4], int j, int lane) {
    if (j && (j & 31) == 0) read_scales(j, lane);
    float unit_sums[BLOCKS][TILES][4] = {};
    this->multiply_codes(unit_sums, b);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      const float factor = __shfl_sync(ALL_LANES, scale[r], j & 31);
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[r][t][i] += factor * unit_sums[r][t][i];
    }
  }
};

// Fragments of x.
template <int TILES> struct InputFragments {
  u32 b[TILES][2][4];
  DEVICE void load(u32 tile, int lane) {
    const u32 at = swizzled_offset(lane & 7, lane >> 3);  // the address 4 chunks further is ^ 64
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      load_matrices(b[t][0], tile + 1024 * t + at);
      load_matrices(b[t][1], tile + 1024 * t + (at ^ 64));
    }
  }
};

// Stores a warp's sums as [column][row].
template <class S, int BLOCKS, int TILES>
DEVICE void store_partial(float* partial, const float (&sums)[BLOCKS][TILES][4], int lane) {
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

// silu(gate) * up, rounded as in torch: gate and up to bf16, then silu, then the product.
DEVICE float gated(float gate, float up) {
  gate = to_float(to_bf16(gate));
  const float silu = gate / (1.f + expf(-gate));
  return to_float(to_bf16(silu)) * to_float(to_bf16(up));
}

template <class W> DEVICE const float* scales_of(const W& weights) {
  if constexpr (W::SCALED) return weights.scales;
  else return nullptr;
}

// The epilogue. The CTA's threads share a tile's outputs in pairs: item i is pair i % PAIRS of column i / PAIRS.
// Residual and bias are loaded before the weights are streamed, which hides their latency.
template <class S, int WARPS, Epilogue EPILOGUE> struct Outputs {
  static constexpr int PAIRS = EPILOGUE == GATED ? S::ROWS / 4 : S::ROWS / 2;
  static constexpr int ITEMS = (S::COLUMNS * PAIRS + S::THREADS - 1) / S::THREADS;
  void* out;
  const bf16* residual;
  const float* bias;
  const float* scales;  // of the rows of w; null if not SCALED
  int n, m, width;      // width: columns of out
  u32 added[ITEMS];
  float2 shift[ITEMS], scale[ITEMS];

  static DEVICE int column(int i) { return (threadIdx.x + S::THREADS * i) / PAIRS; }
  static DEVICE int pair(int i) { return (threadIdx.x + S::THREADS * i) % PAIRS; }
  // The pair's first row of w within the tile. Gated: 16 rows of gates, then their 16 rows of ups.
  static DEVICE int row(int i) { return EPILOGUE == GATED ? 32 * (pair(i) / 8) + 2 * (pair(i) % 8) : 2 * pair(i); }
  DEVICE bool is_inside(int i, int tile) const { return column(i) < m && S::ROWS * tile + row(i) < n; }
  DEVICE i64 offset(int i, int tile) const { return i64(column(i)) * width + tile * (2 * PAIRS) + 2 * pair(i); }

  DEVICE void load_addends(int tile) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      added[i] = 0;
      shift[i] = make_float2(0.f, 0.f);
      if (!is_inside(i, tile)) continue;
      if (S::SCALED) scale[i] = *reinterpret_cast<const float2*>(scales + S::ROWS * tile + row(i));
      if (EPILOGUE == ADD) added[i] = load_past_l1(residual + offset(i, tile));
      if (EPILOGUE != GATED && bias) shift[i] = *reinterpret_cast<const float2*>(bias + S::ROWS * tile + row(i));
    }
  }
  DEVICE void finish(int tile, const float* partials, int pitch) const {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      if (!is_inside(i, tile)) continue;
      const float* at = partials + column(i) * S::PITCH + row(i);
      float2 y = sum_partials<WARPS>(at, pitch);
      if (S::SCALED) y = make_float2(y.x * scale[i].x, y.y * scale[i].y);
      if (EPILOGUE == GATED) {
        float2 up = sum_partials<WARPS>(at + 16, pitch);
        if (S::SCALED) {
          const float* from = scales + S::ROWS * tile + row(i) + 16;
          up = make_float2(up.x * from[0], up.y * from[1]);
        }
        if (bias) {
          const float* from = bias + S::ROWS * tile + row(i);
          y = make_float2(y.x + from[0], y.y + from[1]);
          up = make_float2(up.x + from[16], up.y + from[17]);
        }
        y = make_float2(gated(y.x, up.x), gated(y.y, up.y));
      } else {
        y = make_float2(y.x + shift[i].x, y.y + shift[i].y);
      }
      if (EPILOGUE == ADD) y = make_float2(low(added[i]) + y.x, high(added[i]) + y.y);
      if (EPILOGUE == STORE_F32) *reinterpret_cast<float2*>(static_cast<float*>(out) + offset(i, tile)) = y;
      else *reinterpret_cast<u32*>(static_cast<bf16*>(out) + offset(i, tile)) = pack(y.x, y.y);
    }
  }
};

// Shared memory: the rings of the warps, then `buffers` sets of partial sums, two sets of headers, and the barriers.
// With two sets of sums, a warp writes one while slower warps read the other; with one, a CTA barrier separates them.
// With none, a warp's partial sums are in the slot that it read last, which is refilled after they have been summed.
//
// `pdl`: launched while the preceding kernel may still run. Weights are fetched at once, x after that kernel has ended.
template <class W, int BLOCKS, int TILES, int WARPS, Epilogue EPILOGUE>
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
  // Units of k, and of each warp; those beyond k are read as zero.
  constexpr int UNIT_K = 64 * W::X_TILES;
  const int total_units = (k + UNIT_K - 1) / UNIT_K, units = (total_units + WARPS - 1) / WARPS;
  Headers<W, BLOCKS> headers;
  headers.open(weights, headers_at, barriers + 8 * WARPS * stages, count);
  Ring<W, S, BLOCKS> ring{&weights, &x, 128u * m * W::X_TILES, base + warp * ring_bytes, barriers + 8 * warp * stages, stages, warp,
                          units, WARPS, total_units, l2_evict_first(), l2_evict_last(), int(blockIdx.x), 0, 0,
                          count * units};
  const int prefetched = min(stages, ring.remaining);
  ring.open(lane);
#pragma unroll 1
  for (int i = 0; i < prefetched; i++) ring.fetch(lane, !pdl);
  wait_for_previous_kernel();
  if (pdl && lane == 0) ring.fetch_x(prefetched);
  headers.sync_open();

  Outputs<S, WARPS, EPILOGUE> outputs{out, residual, bias, scales_of(weights), n, m, EPILOGUE == GATED ? n / 2 : n};
  u32 parity = 0;
#pragma unroll 1
  for (int i = 0, slot = 0; i < count; i++) {
    const int tile = blockIdx.x + i * gridDim.x;
    outputs.load_addends(tile);
    WeightFragments<W, BLOCKS> rows;
    rows.start_tile(weights, headers.wait(i), tile, warp, WARPS, total_units, lane);
    float sums[BLOCKS][TILES][4] = {};
    int last = slot;
#pragma unroll 1
    for (int j = 0; j < units; j++) {
      barrier_wait(ring.barriers + 8 * slot, parity);
      const u32 at = ring.slots + slot * S::SLOT;
      InputFragments<W::X_TILES * TILES> columns;
      columns.load(at, lane);
      rows.load(at + S::X_BYTES, j, lane);
      __syncwarp();  // all lanes have read the slot
      if (buffers || j + 1 < units) ring.fetch(lane, true);
      rows.multiply_into(sums, columns.b, j, lane);
      last = slot;
      if (++slot == stages) slot = 0, parity ^= 1;
    }
    if (buffers == 1 && i) __syncthreads();  // all threads have read the previous tile's partial sums
    const int pitch = buffers ? S::PARTIAL : ring_bytes / 4;
    float* set = shared + last * (S::SLOT / 4);
    if (buffers) set = shared + rings_bytes / 4 + (buffers == 2 && i % 2 ? WARPS * S::PARTIAL : 0);
    store_partial<S>(set + warp * pitch, sums, lane);
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
