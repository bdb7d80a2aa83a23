// 4-bit codes: the layout of matrices, how codes become bf16, and the problems of narrow.cu and narrow_wide.cu. Include
// after common.cuh.
//
// Layout of w. A unit has 16 rows and 128 k: the codes, 16 bytes for each lane and 64 k in the order of mma fragments,
// then the scales of each row. The units of 4 blocks of 16 rows, a cell, are adjacent, then those of the next 128 k. In
// a gated matrix, a block has 8 rows of gate, then their rows of up. `cuda/narrow_layout.py` packs matrices.
//
// Values. int4: codes are multiplied without their scale, which multiplies the sum of a group of columns. float4: the
// scale multiplies the codes, which is exact. All sums are multiplied by `factor`, the power of two that was left out.
#pragma once

constexpr u32 CODE_BYTES = 1024;  // of a unit

enum Activation { SILU, GELU, CLAMPED };

struct Problem {
  const u8* codes;
  i64 expert_bytes;
  const float* row_scales;  // nvfp4: of the rows of all blocks; else null
  const bf16* x;
  void* out;
  const bf16* residual;
  const float *bias, *weights;                                 // weights: of assignments
  const int *order, *tile_experts, *tile_counts, *num_tiles;  // of sorted rows; null: all rows and one matrix
  int blocks, width, k, rows, tile_rows, divisor;             // blocks of 16 rows; columns of out
  int stages, parts, buffers, x_rows;                         // x_rows: rows of x in a slot
  int gated, activation, float32;
  int early, triggers_late;  // early: codes may be fetched before the preceding kernel ends
  int keeps_order;           // whether outputs are in the order of sorted rows
  float factor, alpha, limit;
};

DEVICE u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE float half_to_float(u32 bits) {
  float x;
  asm("{ .reg .b16 h;\n mov.b16 h, %1;\n cvt.f32.f16 %0, h; }" : "=f"(x) : "h"(u16(bits)));
  return x;
}
DEVICE int load_int(const int* at) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
DEVICE float load_float(const float* at) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Loads the scales of a row, BYTES of them.
template <int BYTES> DEVICE void load_scales(u32 (&to)[(BYTES + 3) / 4], u32 at) {
  if constexpr (BYTES == 2) asm volatile("{ .reg .b16 h;\n ld.shared.b16 h, [%1];\n mov.b32 %0, {h, h}; }" : "=r"(to[0]) : "r"(at) : "memory");
  if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(at) : "memory");
  if constexpr (BYTES == 8) asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
  if constexpr (BYTES == 16) {
    const uint4 all = load_shared_16(at);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  }
}

// int4: GROUPS scales of a row (float16) in a unit; with ZEROS, each is followed by -zero / 64 as bf16. The 8 lowest bits
// of a bf16 that has no others are a number times 2^-133, so that two codes of a half word need no shift.
template <int GROUPS, bool ZEROS> struct Int4 {
  static constexpr int GROUP_COUNT = GROUPS, ROW_BYTES = GROUPS * (ZEROS ? 4 : 2);
  static constexpr bool SCALES_SUMS = true;
  u32 scales[2][(ROW_BYTES + 3) / 4];  // of the lane's two rows
  DEVICE void load(u32 at, int lane) {
    load_scales<ROW_BYTES>(scales[0], at + lane / 4 * ROW_BYTES);
    load_scales<ROW_BYTES>(scales[1], at + (lane / 4 + 8) * ROW_BYTES);
  }
  DEVICE float scale(int row, int group) const {
    if constexpr (ZEROS) return half_to_float(scales[row][group]);
    return half_to_float(scales[row][group / 2] >> (16 * (group % 2)));
  }
  DEVICE u32 zero(int row, int group) const {
    if constexpr (ZEROS) return __byte_perm(scales[row][group], 0, 0x3232);
    return 0xbe00be00u;  // -8 / 64
  }
  // Decodes to (code - zero) / 64.
  DEVICE void decode(u32 (&a)[4], u32 word, int group) const {
    constexpr u32 LOW = 0x7f007f00u, HIGH = 0x7d007d00u;  // 2^127, 2^123
    const u32 upper = word >> 8;
    a[0] = multiply_add_pairs(word & 0x000f000fu, LOW, zero(0, group));
    a[1] = multiply_add_pairs(word & 0x00f000f0u, HIGH, zero(1, group));
    a[2] = multiply_add_pairs(upper & 0x000f000fu, LOW, zero(0, group));
    a[3] = multiply_add_pairs(upper & 0x00f000f0u, HIGH, zero(1, group));
  }
};

// Multiplies both halves of a by one half of b, which needs no instruction of its own.
DEVICE u32 multiply_by_low(u32 a, u32 b) {
  u32 d;
  asm("{ .reg .b16 l, h;\n .reg .b32 s;\n mov.b32 {l, h}, %2;\n mov.b32 s, {l, l};\n mul.rn.bf16x2 %0, %1, s; }"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 multiply_by_high(u32 a, u32 b) {
  u32 d;
  asm("{ .reg .b16 l, h;\n .reg .b32 s;\n mov.b32 {l, h}, %2;\n mov.b32 s, {h, h};\n mul.rn.bf16x2 %0, %1, s; }"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// float4: a code's bits become sign, the two lowest bits of the exponent, and the first bit of the mantissa of a bf16,
// whose value is 2^-126 of the code's. No four shifts of a word show all its bits at these places; five do. So the last
// register is the xor of two of them, which packing allows for: 8 instructions instead of 11 with separate bits.
// mxfp4 (4 groups): exponents. nvfp4 (8 groups): scales in e4m3.
template <int GROUPS> struct Float4 {
  static constexpr int GROUP_COUNT = GROUPS, ROW_BYTES = GROUPS;
  static constexpr bool SCALES_SUMS = false;
  u32 scales[2][GROUPS / 4];
  DEVICE void load(u32 at, int lane) {
    load_scales<ROW_BYTES>(scales[0], at + lane / 4 * ROW_BYTES);
    load_scales<ROW_BYTES>(scales[1], at + (lane / 4 + 8) * ROW_BYTES);
  }
  // Returns the scales of the lane's two rows as bf16. The bits of a byte are rotated so that the scale is among those of
  // the byte and its copy: by one bit for mxfp4, by four for nvfp4.
  DEVICE u32 scale_rows(int group) const {
    const u32 bytes = __byte_perm(scales[0][group / 4], scales[1][group / 4], 0x4400 + 0x1111 * (group % 4));
    if constexpr (GROUPS == 4) return bytes & 0x7f807f80u;
    const u32 exact = multiply_pairs(bytes & 0x07f007f0u, 0x7b807b80u);  // e4m3's bits in bf16, times 2^120
    return multiply_pairs(exact, 0x71807180u);                           // times 2^100
  }
  DEVICE void decode(u32 (&a)[4], u32 word, int group) const {
    constexpr u32 MASK = 0x81c081c0u;
    const u32 scale = scale_rows(group);
    a[0] = multiply_by_low(word & MASK, scale);
    a[1] = multiply_by_high((word << 6) & MASK, scale);
    a[2] = multiply_by_low(__funnelshift_r(word, word, 4) & MASK, scale);
    a[3] = multiply_by_high(((word << 2) ^ (word >> 6)) & MASK, scale);
  }
};

template <class F> constexpr u32 UNIT = CODE_BYTES + 16 * F::ROW_BYTES;
template <class F> constexpr u32 CELL = 4 * UNIT<F>;

// Byte offset of block `block`; its unit u is u cells further.
template <class F> DEVICE i64 block_offset(int block, int units) {
  return i64(block / 4) * units * CELL<F> + block % 4 * UNIT<F>;
}

DEVICE float activate(const Problem& p, float gate, float up) {
  if (p.activation == SILU) return gate / (1.f + __expf(-gate)) * up;
  if (p.activation == GELU)  // the approximation by a tanh: 1 + tanh(u) is 2 / (1 + e^-2u)
    return gate / (1.f + __expf(-1.5957691216f * (gate + 0.044715f * gate * gate * gate))) * up;
  gate = fminf(gate, p.limit), up = fminf(fmaxf(up, -p.limit), p.limit);
  return gate / (1.f + __expf(-p.alpha * gate)) * (up + 1.f);
}

// What is needed to finish the outputs of a column of out.
struct ColumnTerms {
  float scale, up_scale, bias, up_bias;
  DEVICE ColumnTerms(const Problem& p, int expert, int column) {
    scale = up_scale = p.factor, bias = up_bias = 0.f;
    if (p.row_scales) {
      const float* const scales = p.row_scales + i64(expert) * p.blocks * 16 + column;
      scale *= scales[0];
      if (p.gated) up_scale *= scales[p.width];
    }
    if (p.bias) {
      const float* const biases = p.bias + i64(expert) * (p.gated ? 2 * p.width : p.width) + column;
      bias = biases[0];
      if (p.gated) up_bias = biases[p.width];
    }
  }
  // Applies scales, bias, the weight of the assignment, and the activation. `up`: if gated.
  DEVICE float finish(const Problem& p, float weight, float sum, float up) const {
    // Not left to the compiler, which might fuse other operations in kernels for other numbers of rows.
    if (!p.gated) return __fmul_rn(__fmaf_rn(sum, scale, bias), weight);
    const auto add_bias = [&](float x, float own_scale, float own_bias) {
      return __fmaf_rn(__fmul_rn(x, own_scale), weight, own_bias);
    };
    return activate(p, add_bias(sum, scale, bias), add_bias(up, up_scale, up_bias));
  }
};

// Finishes two columns of a row of out, adds the residual, and stores them. `sums`, `ups`: of a row of w and the next.
// `place`: row of out; `assignment`: that of the weight.
DEVICE void finish_pair(const Problem& p, int expert, int column, int place, int assignment, float2 sums, float2 ups) {
  const float weight = p.weights ? load_float(p.weights + assignment) : 1.f;
  float x = ColumnTerms(p, expert, column).finish(p, weight, sums.x, ups.x);
  float y = ColumnTerms(p, expert, column + 1).finish(p, weight, sums.y, ups.y);
  const i64 at = i64(place) * p.width + column;
  if (p.residual) {
    u32 added;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(added) : "l"(p.residual + at) : "memory");
    x += low(added), y += high(added);
  }
  if (p.float32) *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(x, y);
  else *reinterpret_cast<u32*>(static_cast<bf16*>(p.out) + at) = pack(x, y);
}
