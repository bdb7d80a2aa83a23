// Packed weights ("uw12"): bf16 in 12 bits and a little, to the bit. After common.cuh; `kernels/uw12_ref.py` is the
// format in full.
//
// A unit is 16 rows x 64 k in 1536 bytes: the low bytes of fragments 0 and 1, of 2 and 3, then four bits of each
// weight, 16 bytes a lane each time. Fragment f is k 16f .. 16f + 15 as the A operand of a matrix product has it: lane
// 4g + t holds in register r, half p the weight of row g + 8 (r % 2), k 16f + 8 (r / 2) + 2t + p. Units lie
// [n / 64][k / 64][4]. Exponents are counted from a base of the row, so a decoded weight is multiplied by 2^base.
//
// What does not fit (an escape) is +0 in its unit. Each 16 rows have a header of `stride` bytes: the rows' 2^base twice
// in a word, u16 start[k / 64 + 1], and from a multiple of 16 on the escapes, a word each: bits << 16 | p << 9 |
// (4f + r) << 5 | lane. Those of unit i are start[i] .. start[i + 1] - 1.
#pragma once

constexpr u32 UNIT_BYTES = 1536;
constexpr u32 STARTS_AT = 64;  // in a header

// Of 16 rows `block` and 64 k `unit`, from the first byte of the planes. `units`: k / 64.
DEVICE i64 unit_at(int block, int unit, int units) {
  return ((i64(block / 4) * units + unit) * 4 + block % 4) * UNIT_BYTES;
}
DEVICE u32 escapes_at(int units) { return (STARTS_AT + 2 * (units + 1) + 15) & ~15u; }  // in a header

// -- decoding ---------------------------------------------------------------------------------------------------------

// 16 bytes that nobody writes and nobody on this multiprocessor reads again.
DEVICE uint4 load_once(const u8* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// What one lane holds of a unit: 16 bytes at 16 lane, 512 + 16 lane and 1024 + 16 lane.
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

DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The four registers of one fragment. The scales are those of rows g and g + 8, twice in a word.
DEVICE void decode_fragment(u32 (&a)[4], u32 low0, u32 low1, u32 high, u32 scale, u32 scale8) {
  constexpr u32 SIGN_AND_EXPONENT = 0x87878787u;
  const u32 first = high & SIGN_AND_EXPONENT, second = __funnelshift_l(high, high, 4) & SIGN_AND_EXPONENT;
  a[0] = multiply_pairs(bytes_of(low0, first, 0x5140), scale);
  a[1] = multiply_pairs(bytes_of(low0, first, 0x7362), scale8);
  a[2] = multiply_pairs(bytes_of(low1, second, 0x5140), scale);
  a[3] = multiply_pairs(bytes_of(low1, second, 0x7362), scale8);
}
DEVICE void decode_unit(u32 (&a)[4][4], const Unit& unit, u32 scale, u32 scale8) {
  decode_fragment(a[0], unit.low[0].x, unit.low[0].y, unit.high.x, scale, scale8);
  decode_fragment(a[1], unit.low[0].z, unit.low[0].w, unit.high.y, scale, scale8);
  decode_fragment(a[2], unit.low[1].x, unit.low[1].y, unit.high.z, scale, scale8);
  decode_fragment(a[3], unit.low[1].z, unit.low[1].w, unit.high.w, scale, scale8);
}

// -- escapes ----------------------------------------------------------------------------------------------------------

// Adds bits to a fragment where it is the one they belong to. No branch: a switch over all registers costs more.
DEVICE void put_into(u32 (&a)[4], const u32 (&bits)[4], u32 fragment, u32 wanted) {
  asm("{ .reg .pred p;\n setp.eq.u32 p, %8, %9;\n"
      "@p or.b32 %0, %0, %4;\n @p or.b32 %1, %1, %5;\n @p or.b32 %2, %2, %6;\n @p or.b32 %3, %3, %7; }"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])
      : "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(fragment), "r"(wanted));
}
// Puts an escape where its weight was decoded to +0. It may be the same for all lanes: one of them takes it.
DEVICE void patch(u32 (&a)[4][4], u32 escape, int lane) {
  const u32 value = (escape & 31) == u32(lane) ? escape >> 16 << (escape >> 5 & 16) : 0;  // in its half
  u32 bits[4];
#pragma unroll
  for (u32 r = 0; r < 4; r++) bits[r] = (escape >> 5 & 3) == r ? value : 0;
#pragma unroll
  for (u32 f = 0; f < 4; f++) put_into(a[f], bits, escape >> 7 & 3, f);
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

// The escapes of a warp's next 32 units in a header that lies in shared memory: which units have any, at a glance. Lane
// j knows where those of unit j begin and end.
struct Escapes {
  u32 which = 0, range = 0;
  // Unit j is unit first + j step of k, while that is below `units`. By the whole warp.
  DEVICE void look(u32 header, int first, int step, int units, int lane) {
    const int unit = first + lane * step;
    u32 begin = 0, end = 0;
    if (unit < units) {
      begin = load_shared_2(header + STARTS_AT + 2 * unit);
      end = load_shared_2(header + STARTS_AT + 2 * unit + 2);
    }
    range = begin | end << 16;
    which = __ballot_sync(0xffffffffu, begin != end);
  }
  DEVICE bool in(int j) const { return which >> j & 1; }
  // Into unit j, decoded. `list`: where the header's escapes begin. By the whole warp.
  DEVICE void put(u32 (&a)[4][4], u32 list, int j, int lane) const {
    const u32 here = __shfl_sync(0xffffffffu, range, j);
#pragma unroll 1
    for (u32 i = here & 0xffff; i < here >> 16; i++) patch(a, load_shared_4(list + 4 * i), lane);
  }
};
