// Packs weights into the format of uw12.cuh, unpacks them, and gathers single rows.
#include "common.cuh"
#include "uw12.cuh"

constexpr int EXPONENTS = 256, BASES = 128, WINDOW = 15;

// -- packing ----------------------------------------------------------------------------------------------------------

// The code of a weight in the planes, or +0 for an escape.
struct Code {
  u32 bits;
  bool escape;
  DEVICE Code(u32 weight, int base) {
    const int above = int(weight >> 7 & 255) - base;
    const bool inside = above >= 1 && above <= WINDOW, zero = (weight & 0x7fff) == 0;
    bits = inside ? (weight & 0x807f) | u32(above) << 7 : zero ? weight : 0;
    escape = !inside && !zero;
  }
};

// Loads a lane's weights of unit `unit` of 16 rows, two in a word, in the layout of mma's A operand.
DEVICE void load_fragments(u32 (&w)[4][4], const u16* rows, int k, int unit, int lane) {
  const u16* at = rows + i64(lane / 4) * k + 64 * unit + 2 * (lane % 4);
#pragma unroll
  for (int f = 0; f < 4; f++)
#pragma unroll
    for (int r = 0; r < 4; r++)
      w[f][r] = *reinterpret_cast<const u32*>(at + i64(8 * (r % 2)) * k + 16 * f + 8 * (r / 2));
}

// Returns the base that codes most weights of a row, the smallest among equals. Called by one warp with its own
// counters.
DEVICE int best_base(const u16* row, int k, u32* counts, int lane) {
  for (int i = lane; i < EXPONENTS; i += 32) counts[i] = 0;
  __syncwarp();
  for (int i = lane; i < k / 8; i += 32) {
    const uint4 eight = reinterpret_cast<const uint4*>(row)[i];
    const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      atomicAdd(&counts[pairs[j] >> 7 & 255], 1u);
      atomicAdd(&counts[pairs[j] >> 23 & 255], 1u);
    }
  }
  __syncwarp();
  u32 best = 0;
#pragma unroll 1
  for (int base = lane; base < BASES; base += 32) {
    u32 coded = 0;
    for (int i = 1; i <= WINDOW; i++) coded += counts[base + i];
    best = max(best, coded << 7 | u32(BASES - 1 - base));
  }
  return BASES - 1 - int(__reduce_max_sync(ALL_LANES, best) & (BASES - 1));
}

// A CTA packs 16 rows: each warp finds the base of one row, then packs every 16th unit. `counts` receives the number of
// escapes of each unit.
__global__ void __launch_bounds__(512)
    pack_units(const u16* weights, u8* planes, u8* bases, int* counts, int k) {
  __shared__ u32 histograms[16][EXPONENTS];
  __shared__ int base_of[16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, units = k / 64;
  const u16* rows = weights + i64(16 * block) * k;
  const int base = best_base(rows + i64(warp) * k, k, histograms[warp], lane);
  if (lane == 0) base_of[warp] = base, bases[16 * block + warp] = u8(base);
  __syncthreads();
  const int row_base[2] = {base_of[lane / 4], base_of[lane / 4 + 8]};
#pragma unroll 1
  for (int unit = warp; unit < units; unit += 16) {
    u32 w[4][4], low[4][2] = {}, high[4] = {}, escapes = 0;
    load_fragments(w, rows, k, unit, lane);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int f = i / 8, r = i / 2 % 4, p = i % 2, shift = 8 * (2 * (r % 2) + p);
      const Code code(p ? w[f][r] >> 16 : w[f][r] & 0xffff, row_base[r % 2]);
      const u32 four = (code.bits >> 8 & 0x87) << shift;
      low[f][r / 2] |= (code.bits & 0xff) << shift;
      high[f] |= r / 2 ? __funnelshift_r(four, four, 4) : four;
      escapes += code.escape;
    }
    uint4* const to = reinterpret_cast<uint4*>(planes + unit_offset(block, unit, units)) + lane;
    to[0] = make_uint4(low[0][0], low[0][1], low[1][0], low[1][1]);
    to[32] = make_uint4(low[2][0], low[2][1], low[3][0], low[3][1]);
    to[64] = make_uint4(high[0], high[1], high[2], high[3]);
    escapes = __reduce_add_sync(ALL_LANES, escapes);
    if (lane == 0) counts[i64(block) * units + unit] = int(escapes);
  }
}

// A CTA writes the header of 16 rows. `ends`: index in the list after each unit's escapes.
__global__ void __launch_bounds__(512)
    list_escapes(const u16* weights, const u8* bases, const int* ends, u8* headers, u32 stride, int k) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, units = k / 64;
  const u16* rows = weights + i64(16 * block) * k;
  u8* const header = headers + i64(block) * stride;
  u32* const list = reinterpret_cast<u32*>(header + escapes_offset(units));
  ends += i64(block) * units;
  const auto begin = [&](int unit) { return unit ? u32(ends[unit - 1]) : 0; };
  if (threadIdx.x < 16)
    reinterpret_cast<u32*>(header)[threadIdx.x] = (u32(bases[16 * block + threadIdx.x]) + 127) * 0x00800080u;
  for (int unit = threadIdx.x; unit <= units; unit += blockDim.x)
    reinterpret_cast<u16*>(header + STARTS_OFFSET)[unit] = u16(begin(unit));
  const int row_base[2] = {bases[16 * block + lane / 4], bases[16 * block + lane / 4 + 8]};
#pragma unroll 1
  for (int unit = warp; unit < units; unit += 16) {
    u32 next = begin(unit);
    if (next == u32(ends[unit])) continue;
    u32 w[4][4];
    load_fragments(w, rows, k, unit, lane);
#pragma unroll
    for (int i = 0; i < 32; i++) {  // in the order of half, register, lane
      const int p = i / 16, f = i / 4 % 4, r = i % 4;
      const u32 weight = p ? w[f][r] >> 16 : w[f][r] & 0xffff;
      const bool escape = Code(weight, row_base[r % 2]).escape;
      const u32 escaping = __ballot_sync(ALL_LANES, escape);
      if (escape) list[next + __popc(escaping & ((1u << lane) - 1))] = weight << 16 | p << 9 | (4 * f + r) << 5 | lane;
      next += __popc(escaping);
    }
  }
}

// -- unpacking --------------------------------------------------------------------------------------------------------

// Stores 64 k of a row: four lanes hold two of each 8 weights, and each stores two times 8. `upper`: the row is g + 8
// of the unit. All lanes must call it, because of the shuffles, even those with nothing to store.
DEVICE void store_row(const u32 (&a)[4][4], bool upper, bf16* to, int t, bool stores) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32(&fragment)[4] = a[2 * half + i / 2];
      x[i] = upper ? fragment[2 * (i % 2) + 1] : fragment[2 * (i % 2)];
    }
    transpose_quad(x);
    if (stores) *reinterpret_cast<uint4*>(to + 32 * half + 8 * t) = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// A header in global memory, and the range of escapes of one unit.
struct Header {
  const u8* at;
  u32 begin, end;
  DEVICE void open(const u8* header, int unit) {
    at = header;
    const u16* const starts = reinterpret_cast<const u16*>(header + STARTS_OFFSET) + unit;
    begin = starts[0], end = starts[1];
  }
  DEVICE u32 scale(int row) const { return reinterpret_cast<const u32*>(at)[row]; }
  DEVICE void restore_escapes(u32 (&a)[4][4], int units, int lane) const {
    const u32* const list = reinterpret_cast<const u32*>(at + escapes_offset(units));
#pragma unroll 1
    for (u32 i = begin; i < end; i++) restore_escape(a, list[i], lane);
  }
};

// A CTA unpacks 64 rows x 256 k, a warp two adjacent units. Packed weights never change, so they are read before the
// preceding kernel has ended; the output is written after.
__global__ void __launch_bounds__(256, 4)
    unpack(const u8* planes, const u8* headers, u32 stride, bf16* out, int k) {
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, units = k / 64;
  const int unit = 4 * blockIdx.x + warp / 2, block = 4 * blockIdx.y + 2 * (warp % 2);
  const bool inside = unit < units;
  Unit packed[2];
  Header header[2];
  u32 scale[2][2];
  if (inside) {
    const u8* const from = planes + unit_offset(block, unit, units);
    packed[0].load_global(from, lane);
    packed[1].load_global(from + UNIT_BYTES, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      header[i].open(headers + i64(block + i) * stride, unit);
      scale[i][0] = header[i].scale(lane / 4), scale[i][1] = header[i].scale(lane / 4 + 8);
    }
  }
  wait_for_previous_kernel();
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 a[4][4];
    decode_unit(a, packed[i], scale[i][0], scale[i][1]);
    header[i].restore_escapes(a, units, lane);
    bf16* const to = out + i64(16 * (block + i) + lane / 4) * k + 64 * unit;
    store_row(a, false, to, lane % 4, true);
    store_row(a, true, to + i64(8) * k, lane % 4, true);
  }
}

DEVICE i64 load_past_l1(const i64* at) {
  i64 v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

// A CTA gathers one row, with four lanes for each unit.
__global__ void __launch_bounds__(128)
    gather(const i64* ids, const u8* planes, const u8* headers, u32 stride, bf16* out, int k) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4, quad = threadIdx.x % 32 / 4, units = k / 64;
  const i64 row = load_past_l1(ids + blockIdx.x);
  const int block = int(row / 16), within = int(row % 16), lane = 4 * (within % 8) + t;  // the lane that holds the row
#pragma unroll 1
  for (int first = 8 * warp; first < units; first += 32) {
    const int unit = first + quad;
    const bool inside = unit < units;
    u32 a[4][4] = {};
    if (inside) {
      Unit packed;
      packed.load_global(planes + unit_offset(block, unit, units), lane);
      Header header;
      header.open(headers + i64(block) * stride, unit);
      const u32 scale = header.scale(within);
      decode_unit(a, packed, scale, scale);
      header.restore_escapes(a, units, lane);
    }
    __syncwarp();
    store_row(a, within >= 8, out + i64(blockIdx.x) * k + 64 * unit, t, inside);
  }
}
