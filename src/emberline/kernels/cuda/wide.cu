// y[m, n] = x[m, k] w[n, k]^T for some dozens of rows of x, by Hopper's warpgroup products: still the weights' time.
//
// Who owns what. A product is y^T = w x^T: a CTA takes 64 GROUPS rows of w, a warpgroup 64 of them, and all COLUMNS
// rows of x, in steps of 64 k. One warp fetches into a ring of slots, a tile of x and one of w each, 128 bytes a row,
// swizzled; rows past m and n read as zero. Where n is large a CTA goes from tile to tile, and the ring with it. Where
// it is small a cluster of `split` CTAs shares a tile: each sums its part of k, then each finishes some of the outputs.
//
// Order of sums. An output is the sum over the parts of k, in order, of what each added up step by step: it depends on
// n, k and `split`, not on m, on the row of x, on GROUPS, the stages or the grid.
//
// Barriers. FULL: one arrival, with the bytes of a slot; EMPTY: one arrival of each computing warp. Use u of a slot has
// parity u & 1: a warpgroup waits for FULL with it, the fetcher for EMPTY with the other, which a new barrier has
// already passed.
//
// Fragments. Warp i of the CTA has 16 rows of a tile of w: lane l holds in d[4 j + 2 r + e] row l / 4 + 8 r and column
// 8 j + 2 (l % 4) + e. Four j at once are a `quad`: 32 columns.
#include "common.cuh"
#include "products.cuh"

enum Epilogue { STORE, STORE_F32, ADD, GATED };

template <int GROUPS, int WIDTH> struct Shape {
  static constexpr int ROWS = 64 * GROUPS, WARPS = 4 * GROUPS, THREADS = 32 * WARPS + 32;
  static constexpr int COLUMNS = WIDTH, BLOCKS = COLUMNS / 8, QUADS = COLUMNS / 32;
  static constexpr u32 X_BYTES = 128 * COLUMNS, W_BYTES = 128 * ROWS, SLOT = X_BYTES + W_BYTES;
};

// -- warpgroup products -----------------------------------------------------------------------------------------------

// Rows of 64 k for wgmma: address and offset from 8 rows to the next 8 in units of 16 bytes, 128-byte swizzle. The next
// 16 k are 32 bytes on.
DEVICE u64 matrix(u32 address) { return u64(address >> 4) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62; }


// d = w x^T, or more of it, over 16 k.
DEVICE void multiply_group(float (&d)[32], u64 w, u64 x, int more) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0) : "l"(w), "l"(x), "r"(more));
}
DEVICE void multiply_group(float (&d)[64], u64 w, u64 x, int more) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 0; }"
      : FLOATS_32(d, 0), FLOATS_32(d, 32) : "l"(w), "l"(x), "r"(more));
}

// -- the ring ---------------------------------------------------------------------------------------------------------

DEVICE void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, int u, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "l"(policy) : "memory");
}

struct Ring {
  u32 slots, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

// The steps of a CTA: `units` of each of its tiles, which lie `stride` apart.
struct Steps {
  int tile, stride, tiles;
  int from, units;  // the part of k
  DEVICE int count() const { return (tiles - tile + stride - 1) / stride * units; }
};

// Step after step into the ring; by one thread. `early`: weights are asked for at once, x when the kernel before ended.
template <class S>
DEVICE void fetch(Ring ring, const TensorMap* w_map, const TensorMap* x_map, Steps steps, bool gated, bool early) {
  const u64 once = drop_from_l2(), often = keep_in_l2();
  const int count = steps.count(), ahead = early ? min(ring.stages, count) : 0;
  int tile = steps.tile, unit = 0;
  const auto fetch_x = [&](int stage, int unit) {
    copy_tile(ring.slots + stage * S::SLOT, x_map, 64 * (steps.from + unit), 0, ring.full + 8 * stage, often);
  };
  const auto fetch_w = [&] {
    const u32 at = ring.slots + ring.stage * S::SLOT + S::X_BYTES, barrier = ring.full + 8 * ring.stage;
    const int k = 64 * (steps.from + unit);
    if (gated) {  // see Outputs::row
      copy_tile(at, w_map, k, 0, 0, S::ROWS / 32 * tile, barrier, once);
      copy_tile(at + S::W_BYTES / 2, w_map, k, 8, 0, S::ROWS / 32 * tile, barrier, once);
    } else {
      copy_tile(at, w_map, k, S::ROWS * tile, barrier, once);
    }
    ring.advance();
    if (++unit == steps.units) unit = 0, tile += steps.stride;
  };
#pragma unroll 1
  for (int i = 0; i < ahead; i++) {
    barrier_expect(ring.full + 8 * ring.stage, S::SLOT);
    fetch_w();
  }
  wait_for_previous_kernel();
#pragma unroll 1
  for (int stage = 0, j = 0; stage < ahead; stage++) {
    fetch_x(stage, j);
    if (++j == steps.units) j = 0;
  }
#pragma unroll 1
  for (int i = ahead; i < count; i++) {
    barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    barrier_expect(ring.full + 8 * ring.stage, S::SLOT);
    fetch_x(ring.stage, unit);
    fetch_w();
  }
}

// A tile's sums. The next step's products are issued before the last one's slot is given back: it takes two slots.
template <class S> DEVICE void add_up(float (&d)[S::COLUMNS / 2], Ring& ring, int units, int warp, int lane) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    barrier_wait(ring.full + 8 * ring.stage, ring.parity);
    const u32 at = ring.slots + ring.stage * S::SLOT;
    const u64 x = matrix(at), w = matrix(at + S::X_BYTES + warp / 4 * 8192);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_group(d, w + 2 * step, x + 2 * step, step ? 1 : i);
    products_end();
    products_wait<1>();
    if (i && lane == 0) barrier_arrive(ring.empty + 8 * last);
    last = ring.stage;
    ring.advance();
  }
  products_wait<0>();
  ready(d);
  if (lane == 0) barrier_arrive(ring.empty + 8 * last);
}

// -- outputs ----------------------------------------------------------------------------------------------------------

// Of an 8x8 matrix lane l holds row l / 4, columns 2 (l % 4) and the next; then the same of its transpose.
DEVICE u32 transposed(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}
// x[i] of lane q of four becomes x[q] of lane i.
DEVICE void transpose_quad(u32 (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const auto swap = [](bool first, u32& a, u32& b, int distance) {
    const u32 other = __shfl_xor_sync(ALL, first ? a : b, distance);
    (first ? a : b) = other;
  };
  swap(odd, x[0], x[1], 1), swap(odd, x[2], x[3], 1);
  swap(upper, x[0], x[2], 2), swap(upper, x[1], x[3], 2);
}
// Past the L1: a CTA that started early may find there what was read before the last kernel wrote.
DEVICE void load_fresh(u32 (&x)[4], const bf16* at) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at) : "memory");
}

// As torch does it in bf16: gate and up are rounded, then silu, then the product.
DEVICE float gated(float gate, float up) {
  gate = to_float(to_bf16(gate));
  const float silu = gate / (1.f + expf(-gate));
  return to_float(to_bf16(silu)) * to_float(to_bf16(up));
}

// Where a fragment of a tile goes, a quad at a time. Lanes trade what they have until each has 8 neighbours of a row.
template <class S, Epilogue END> struct Outputs {
  void* out;
  const bf16* residual;
  const float* bias;
  int n, m;
  u32 added[2][4];  // of the residual, as stored

  // A fragment's first row of w. Gated: the tile's groups of 32 rows are 16 gates and their 16 ups; fragments of the
  // first half of the tile have 8 gates and their 8 ups each, those of the second half the other 8 of each.
  static DEVICE int row(int tile, int fragment) {
    if (END != GATED) return S::ROWS * tile + 16 * fragment;
    return S::ROWS * tile + 32 * (fragment % (S::WARPS / 2)) + 8 * (fragment / (S::WARPS / 2));
  }
  // What lane l stores of columns 32 quad + 16 pair ..: row of x, and the first of 8 outputs.
  DEVICE i64 place(int row, int column, int lane) const { return i64(column) * n + row + 8 * (lane % 2); }
  static DEVICE int column(int quad, int pair, int lane) { return 32 * quad + 16 * pair + lane % 4 / 2 * 8 + lane / 4; }

  DEVICE void ask(int row, int quad, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2 && END == ADD; pair++) {
      const int column = this->column(quad, pair, lane);
      added[pair][0] = added[pair][1] = added[pair][2] = added[pair][3] = 0;
      if (column < m && row < n) load_fresh(added[pair], residual + place(row, column, lane));
    }
  }
  DEVICE void finish(float (&c)[16], int row, int quad, int lane) {
    if (row >= n || 32 * quad >= m) return;  // of the whole warp
    if (bias) {
      const float shift[2] = {bias[row + lane / 4], bias[row + lane / 4 + (END == GATED ? 16 : 8)]};
#pragma unroll
      for (int i = 0; i < 16; i++) c[i] += shift[i / 2 % 2];
    }
    if (END == STORE_F32) store_floats(c, row, quad, lane);
    else if (END == GATED) store_gated(c, row, quad, lane);
    else store(c, row, quad, lane);
  }
  DEVICE void store(float (&c)[16], int row, int quad, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      u32 x[4];
      if (END == ADD) transpose_quad(added[pair]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &low_c = c[8 * pair + 2 * i], &high_c = c[8 * pair + 2 * i + 1];
        if (END == ADD) {
          const u32 more = transposed(added[pair][i]);
          low_c += low(more), high_c += high(more);
        }
        x[i] = transposed(pack(low_c, high_c));
      }
      transpose_quad(x);
      const int column = this->column(quad, pair, lane);
      bf16* const to = static_cast<bf16*>(out) + place(row, column, lane);
      if (column < m) *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  DEVICE void store_gated(float (&c)[16], int row, int quad, int lane) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[i] = transposed(pack(gated(c[4 * i], c[4 * i + 2]), gated(c[4 * i + 1], c[4 * i + 3])));
    transpose_quad(x);
    const int column = 32 * quad + lane % 4 * 8 + lane / 4;
    bf16* const to = static_cast<bf16*>(out) + i64(column) * (n / 2) + row / 32 * 16 + row % 32;
    if (column < m) *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  }
  // Floats cross as their halves.
  DEVICE void store_floats(float (&c)[16], int row, int quad, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 a = __float_as_uint(c[2 * i]), b = __float_as_uint(c[2 * i + 1]);
      const u32 lows = transposed(__byte_perm(a, b, 0x5410)), highs = transposed(__byte_perm(a, b, 0x7632));
      const int column = 32 * quad + i / 2 * 8 + lane / 4;
      u32* const to = static_cast<u32*>(out) + i64(column) * n + row + i % 2 * 8 + lane % 4 * 2;
      const uint2 both = make_uint2(__byte_perm(lows, highs, 0x5410), __byte_perm(lows, highs, 0x7632));
      if (column < m) *reinterpret_cast<uint2*>(to) = both;
    }
  }
};

// -- the parts of k ---------------------------------------------------------------------------------------------------

// All threads of the cluster; what they wrote to each other's shared memory is there after.
DEVICE void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void push(u32 to, u32 cta, float a, float b, float c, float d) {
  asm volatile("{ .reg .u32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
               "st.shared::cluster.v4.f32 [far], {%2, %3, %4, %5}; }"
               ::"r"(to), "r"(cta), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

struct Part {
  int index, split;
  u32 memory;  // where the rings were: [fragment / split][part][block] of 512 bytes
  DEVICE u32 place(int fragment, int part, int blocks, int block, int lane) const {
    return memory + ((fragment / split * split + part) * blocks + block) * 512 + lane * 16;
  }
};

// Fragment f goes to CTA f % split of the cluster, whose warps divide the quads of its fragments among them.
template <class S, Epilogue END>
DEVICE void finish_together(const float (&d)[S::COLUMNS / 2], Outputs<S, END> outputs, Part part, int tile, int warp,
                            int lane) {
  meet();  // nobody uses a ring any more
#pragma unroll
  for (int j = 0; j < S::BLOCKS; j++)
    push(part.place(warp, part.index, S::BLOCKS, j, lane), warp % part.split, d[4 * j], d[4 * j + 1], d[4 * j + 2],
         d[4 * j + 3]);
  const int fragments = (S::WARPS - part.index + part.split - 1) / part.split;
  const auto fragment = [&](int item) { return item / S::QUADS * part.split + part.index; };
  if (warp < fragments * S::QUADS) outputs.ask(outputs.row(tile, fragment(warp)), warp % S::QUADS, lane);
  meet();
#pragma unroll 1
  for (int item = warp; item < fragments * S::QUADS; item += S::WARPS) {
    const int quad = item % S::QUADS, row = outputs.row(tile, fragment(item));
    if (item != warp) outputs.ask(row, quad, lane);
    float c[16] = {};
#pragma unroll 1
    for (int from = 0; from < part.split; from++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 more = load_shared_16(part.place(fragment(item), from, S::BLOCKS, 4 * quad + i, lane));
        c[4 * i] += __uint_as_float(more.x), c[4 * i + 1] += __uint_as_float(more.y);
        c[4 * i + 2] += __uint_as_float(more.z), c[4 * i + 3] += __uint_as_float(more.w);
      }
    outputs.finish(c, row, quad, lane);
  }
}

template <class S, Epilogue END>
DEVICE void finish_alone(const float (&d)[S::COLUMNS / 2], Outputs<S, END> outputs, int tile, int warp, int lane) {
  const int row = outputs.row(tile, warp);
#pragma unroll
  for (int quad = 0; quad < S::QUADS; quad++) {
    float c[16];
#pragma unroll
    for (int i = 0; i < 16; i++) c[i] = d[16 * quad + i];
    outputs.ask(row, quad, lane);
    outputs.finish(c, row, quad, lane);
  }
}

// Shared memory: the ring, then its barriers. The grid: `split` CTAs, a cluster, for each tile; where it is 1, a CTA
// for some tiles. `early`: launched while the kernel before may still run.
template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(Shape<GROUPS, COLUMNS>::THREADS, 1)
    wide(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, void* out,
         const bf16* residual, const float* bias, int n, int k, int m, int stages, int split, int end, int early) {
  using S = Shape<GROUPS, COLUMNS>;
  let_next_kernel_start();
  extern __shared__ u8 unaligned[];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Ring ring{base, base + stages * S::SLOT, base + stages * (S::SLOT + 8), stages};
  const int index = blockIdx.x % split, units = k / 64, from = units * index / split;
  const Steps steps{int(blockIdx.x) / split, int(gridDim.x) / split, (n + S::ROWS - 1) / S::ROWS, from,
                    units * (index + 1) / split - from};
  if (threadIdx.x == S::THREADS - 32) {
    prefetch_map(&w_map), prefetch_map(&x_map);
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, S::WARPS);
    barriers_are_set();
  }
  __syncthreads();
  if (warp == S::WARPS) {
    if (lane == 0) fetch<S>(ring, &w_map, &x_map, steps, end == GATED, early);
    __syncwarp();
    wait_for_previous_kernel();
    if (split > 1) meet(), meet();
    return;
  }
  wait_for_previous_kernel();
  float d[COLUMNS / 2];
#pragma unroll 1
  for (int tile = steps.tile; tile < steps.tiles; tile += steps.stride) {
    add_up<S>(d, ring, steps.units, warp, lane);
    const auto finish = [&](auto outputs) {
      if (split > 1) finish_together(d, outputs, Part{index, split, base}, tile, warp, lane);
      else finish_alone(d, outputs, tile, warp, lane);
    };
    if (end == STORE) finish(Outputs<S, STORE>{out, residual, bias, n, m});
    else if (end == STORE_F32) finish(Outputs<S, STORE_F32>{out, residual, bias, n, m});
    else if (end == ADD) finish(Outputs<S, ADD>{out, residual, bias, n, m});
    else finish(Outputs<S, GATED>{out, residual, bias, n, m});
  }
}
