// Packed weights (uw12): bf16 stored losslessly in a little over 12 bits. Include after common.cuh.
// `kernels/uw12_ref.py` defines the format.
//
// A unit is 16 rows x 64 k in 1536 bytes: the low bytes of fragments 0 and 1, those of 2 and 3, then four bits of each
// weight; each of the three has 16 bytes per lane. Fragment f is k 16f .. 16f + 15 in the layout of mma's A operand:
// lane 4g + t holds in register r, half p the weight of row g + 8 (r % 2), k 16f + 8 (r / 2) + 2t + p. Units are stored
// as [n / 64][k / 64][4]. Exponents are relative to a base per row, so a decoded weight is multiplied by 2^base.
//
// A weight whose exponent does not fit (an escape) is +0 in its unit. Each 16 rows have a header of `stride` bytes:
// 2^base of each row twice in a word, u16 start[k / 64 + 1], and from the next multiple of 16 bytes the escapes, one
// word each: bits << 16 | p << 9 | (4f + r) << 5 | lane. The escapes of unit i are start[i] .. start[i + 1] - 1.
#pragma once

constexpr u32 UNIT_BYTES = 1536;
constexpr u32 STARTS_OFFSET = 64;  // byte offset in a header

// Byte offset in the planes of unit `unit` (64 k) of block `block` (16 rows). `units`: k / 64.
DEVICE i64 unit_offset(int block, int unit, int units) {
  return ((i64(block / 4) * units + unit) * 4 + block % 4) * UNIT_BYTES;
}
DEVICE u32 escapes_offset(int units) { return (STARTS_OFFSET + 2 * (units + 1) + 15) & ~15u; }

// -- decoding ---------------------------------------------------------------------------------------------------------

// Loads 16 bytes that no kernel writes concurrently and that this SM does not read again: read-only, without L1
// allocation.
DEVICE uint4 load_once(const u8* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// One lane's part of a unit: 16 bytes each at 16 lane, 512 + 16 lane and 1024 + 16 lane.
struct Unit {
  uint4 low[2], high;
  DEVICE void load_shared(u32 unit, int lane) {
    low[0] = load_shared_16(unit + 16 * lane);
    low[1] = load_shared_16(unit + 512 + 16 * lane);
    high = load_shared_16(unit + 1024 + 16 * lane);
  }
  DEVICE void load_global(const u8* unit, int lane) {
    low[0] = load_once(unit + 16 * lane);
    low[1] = load_once(unit + 512 + 16 * lane);
    high = load_once(unit + 1024 + 16 * lane);
  }
};

DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else  // adding -0 changes no product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}
// Decodes the four registers of one fragment. The scales are those of rows g and g + 8, twice in a word.
DEVICE void decode_fragment(u32 (&a)[4], u32 low0, u32 low1, u32 high, u32 scale, u32 scale8) {
  constexpr u32 SIGN_AND_EXPONENT = 0x87878787u;
  const u32 first = high & SIGN_AND_EXPONENT, second = __funnelshift_l(high, high, 4) & SIGN_AND_EXPONENT;
  a[0] = multiply_pairs(select_bytes(low0, first, 0x5140), scale);
  a[1] = multiply_pairs(select_bytes(low0, first, 0x7362), scale8);
  a[2] = multiply_pairs(select_bytes(low1, second, 0x5140), scale);
  a[3] = multiply_pairs(select_bytes(low1, second, 0x7362), scale8);
}
DEVICE void decode_unit(u32 (&a)[4][4], const Unit& unit, u32 scale, u32 scale8) {
  decode_fragment(a[0], unit.low[0].x, unit.low[0].y, unit.high.x, scale, scale8);
  decode_fragment(a[1], unit.low[0].z, unit.low[0].w, unit.high.y, scale, scale8);
  decode_fragment(a[2], unit.low[1].x, unit.low[1].y, unit.high.z, scale, scale8);
  decode_fragment(a[3], unit.low[1].z, unit.low[1].w, unit.high.w, scale, scale8);
}

// -- escapes ----------------------------------------------------------------------------------------------------------

// ORs bits into a fragment if it is the wanted one. Predicated instead of a branch: a switch over all registers costs
// more.
DEVICE void or_if_equal(u32 (&a)[4], const u32 (&bits)[4], u32 fragment, u32 wanted) {
  asm("{ .reg .pred p;\n setp.eq.u32 p, %8, %9;\n"
      "@p or.b32 %0, %0, %4;\n @p or.b32 %1, %1, %5;\n @p or.b32 %2, %2, %6;\n @p or.b32 %3, %3, %7; }"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])
      : "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(fragment), "r"(wanted));
}
// Restores an escape, which was decoded to +0. All lanes may pass the same escape: only the lane that holds it changes.
DEVICE void restore_escape(u32 (&a)[4][4], u32 escape, int lane) {
  const u32 value = (escape & 31) == u32(lane) ? escape >> 16 << (escape >> 5 & 16) : 0;  // in its half
  u32 bits[4];
#pragma unroll
  for (u32 r = 0; r < 4; r++) bits[r] = (escape >> 5 & 3) == r ? value : 0;
#pragma unroll
  for (u32 f = 0; f < 4; f++) or_if_equal(a[f], bits, escape >> 7 & 3, f);
}

DEVICE u32 load_shared_4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
DEVICE u32 load_shared_2(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

// The escapes of a warp's next 32 units, from a header in shared memory: a mask of the units that have any, and in lane
// j the range of those of unit j.
struct Escapes {
  u32 mask = 0, range = 0;
  // Reads the ranges. Unit j is unit first + j step of k, if that is below `units`. Called by the whole warp.
  DEVICE void read_ranges(u32 header, int first, int step, int units, int lane) {
    const int unit = first + lane * step;
    u32 begin = 0, end = 0;
    if (unit < units) {
      begin = load_shared_2(header + STARTS_OFFSET + 2 * unit);
      end = load_shared_2(header + STARTS_OFFSET + 2 * unit + 2);
    }
    range = begin | end << 16;
    mask = __ballot_sync(0xffffffffu, begin != end);
  }
  DEVICE bool has(int j) const { return mask >> j & 1; }
  // Restores the escapes of the decoded unit j. `list`: address of the header's escapes. Called by the whole warp.
  DEVICE void restore(u32 (&a)[4][4], u32 list, int j, int lane) const {
    const u32 here = __shfl_sync(0xffffffffu, range, j);
#pragma unroll 1
    for (u32 i = here & 0xffff; i < here >> 16; i++) restore_escape(a, load_shared_4(list + 4 * i), lane);
  }
};
