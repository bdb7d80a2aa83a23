// Shared by linear.cu and experts.cu: sources of weights, and the fragments, products and partial sums of a warp that
// multiplies 16 BLOCKS rows of w by 8 TILES rows of x by mma. Include after common.cuh and uw12.cuh.
#pragma once

struct PlainRows {
  static constexpr u32 BLOCK_BYTES = 2048;  // 16 rows x 64 k
  TensorMap map;
};
struct PackedUnits {
  static constexpr u32 BLOCK_BYTES = UNIT_BYTES;
  const u8 *planes, *headers;
  u32 stride;  // bytes of a header
  int blocks;  // n / 16
};

// Prefetches the tensor map itself.
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Loads two bf16 past L1. With PDL this CTA started early, and L1 may hold data from before the preceding kernel's
// writes.
DEVICE u32 load_past_l1(const bf16* at) {
  u32 pair;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(pair) : "l"(at) : "memory");
  return pair;
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
  DEVICE void decode(int, int) {}
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
