// attend: one warp's attention over its own 16 keys of a tile, with an online softmax. decode.cu fetches the tiles.
//
// The rows of 16-row fragments are the query heads of a KV head, for one query or for several, one query after the
// other; the remaining rows are zero. HALVES: lane l has rows l / 4 (half 0) and l / 4 + 8 (half 1); up to 8 rows need
// only the first half. fp8 keys and values are converted to fp16 before the products, so queries and softmax weights
// are fp16 too; otherwise all are bf16.
//
// A row's sums do not depend on the other rows: mma computes each row by itself, and a key that is hidden from a row
// has the weight 0 there and leaves the row's largest score unchanged.
#pragma once
#include "common.cuh"

#define UNROLL _Pragma("unroll")

constexpr int TILE = 64, COMPUTE_WARPS = 4, WARP_KEYS = TILE / COMPUTE_WARPS;

// Sizes of a layer's cache, number of fragments, whether rows have several queries, and whether the layer may have
// chunks, capped scores or sinks.
template <int WIDTH_, int BYTES, int FRAGMENTS_, bool SEVERAL_, bool KINDS_>
struct Shape {
  // The head size, and the columns in shared memory and registers, of which those beyond the head size are zero.
  static constexpr int WIDTH = WIDTH_, HEAD_DIM = WIDTH <= 64 ? 64 : WIDTH <= 128 ? 128 : 256;
  static constexpr int F8 = BYTES == 1, FRAGMENTS = FRAGMENTS_;
  static constexpr bool SEVERAL = SEVERAL_, KINDS = KINDS_;
  static constexpr int ROW_BYTES = HEAD_DIM * BYTES, TILE_BYTES = TILE * ROW_BYTES;
  // Bytes of a row in one copy: the width of the swizzle.
  static constexpr int LINE = ROW_BYTES < 128 ? ROW_BYTES : 128;
  static constexpr int BOX = LINE / BYTES;                        // columns of one copy
  // An SM has one CTA for large heads, whose sums take more registers, with a pipeline of twice the size.
  static constexpr int MAX_STAGES = ((HEAD_DIM > 128 ? 192 : 96) << 10) / (2 * TILE_BYTES);
  static constexpr int STAGES = FRAGMENTS * (MAX_STAGES < 6 ? MAX_STAGES : 6);
  static constexpr int STEPS = HEAD_DIM / 16;  // steps of 16 columns
};

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 pack_half(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Converts four fp8 numbers to two pairs of fp16, exactly.
DEVICE void widen(u32 four, u32& first, u32& second) {
  asm("{ .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(first), "=r"(second) : "r"(four));
}
DEVICE void multiply_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class S, int HALVES>
struct State {
  float top[HALVES], sum[HALVES];  // over this warp's keys; `sum` over this lane's columns only
  float out[2 * S::STEPS][4];

  DEVICE void clear() {
    UNROLL for (int h = 0; h < HALVES; h++) top[h] = minus_infinity(), sum[h] = 0.f;
    UNROLL for (int t = 0; t < 2 * S::STEPS; t++)
      UNROLL for (int i = 0; i < 4; i++) out[t][i] = 0.f;
  }
};

// Address of a 16-byte column of row `row` of a tile. The swizzle is an XOR, so column() derives the address of column
// c ^ d from that of column c.
template <class S>
DEVICE u32 row_of(u32 tile, u32 row, u32 column) {
  u32 swizzle = S::LINE == 128 ? row & 7 : row >> 1 & 3;
  return tile + row * S::LINE + ((column ^ swizzle) << 4);
}
template <class S>
DEVICE u32 column(u32 row, int flip) {
  constexpr int COUNT = S::LINE / 16;
  return (row ^ (flip % COUNT << 4)) + flip / COUNT * (TILE * S::LINE);
}

// Loads from L2. While another kernel runs on the same SM, L1 is not invalidated and may hold queries of the previous
// layer.
DEVICE u32 load_l2(const u32* at) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// Loads a query head as the lane's row in half `h` of a fragment, or zeros instead. With fp8 keys the queries are fp16,
// and columns 4j .. 4j+3 of 16 are permuted to 2j, 2j+1, 2j+8, 2j+9, which matches the four bytes of keys that a lane
// holds.
template <class S>
DEVICE void load_row(u32 (&q)[S::STEPS][4], int h, const bf16* heads, int head, bool is_head, int lane) {
  const u32* from = reinterpret_cast<const u32*>(heads + head * S::WIDTH + lane % 4 * (S::F8 ? 4 : 2));
  UNROLL for (int s = 0; s < S::STEPS; s++) {
    if (16 * s >= S::WIDTH) is_head = false;
    u32 a = is_head ? load_l2(from + 8 * s) : 0, b = is_head ? load_l2(from + 8 * s + (S::F8 ? 1 : 4)) : 0;
    q[s][h] = S::F8 ? pack_half(low(a), high(a)) : a;
    q[s][2 + h] = S::F8 ? pack_half(low(b), high(b)) : b;
  }
}

// Computes scores of the 16 rows with this warp's 16 keys, 8 keys per fragment. Two chains of products for each, to
// hide the latency of mma.
template <class S>
DEVICE void score(float (&s)[2][4], const u32 (&q)[S::STEPS][4], u32 tile, int warp, int lane) {
  float odd[2][4] = {};
  UNROLL for (int t = 0; t < 2; t++)
    UNROLL for (int i = 0; i < 4; i++) s[t][i] = 0.f;
  u32 r[4];
  if constexpr (S::F8) {  // matrices: keys 0-7 and 8-15 of columns 16s.., then of 16(s+1)..
    u32 row = row_of<S>(tile, warp * WARP_KEYS + (lane >> 3 & 1) * 8 + (lane & 7), lane >> 4);
    UNROLL for (int k = 0; k < S::STEPS; k += 2) {
      load_matrices(r, column<S>(row, k));
      UNROLL for (int t = 0; t < 2; t++) {
        u32 b0, b1;
        widen(r[t], b0, b1);
        multiply_half(s[t], q[k], b0, b1);
        widen(r[2 + t], b0, b1);
        multiply_half(odd[t], q[k + 1], b0, b1);
      }
    }
  } else {  // matrices: keys 0-7 of columns 16s.. and 16s+8.., then keys 8-15
    u32 row = row_of<S>(tile, warp * WARP_KEYS + (lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
    UNROLL for (int k = 0; k < S::STEPS; k++) {
      load_matrices(r, column<S>(row, 2 * k));
      multiply(k & 1 ? odd[0] : s[0], q[k], r[0], r[1]);
      multiply(k & 1 ? odd[1] : s[1], q[k], r[2], r[3]);
    }
  }
  UNROLL for (int t = 0; t < 2; t++)
    UNROLL for (int i = 0; i < 4; i++) s[t][i] += odd[t][i];
}

// Scores s become cap * tanh(x) with factor * s = 2 x log2(e); a cap of 0 leaves them unchanged.
struct ScoreCap {
  float cap, factor;
};
DEVICE void cap_scores(float (&s)[2][4], ScoreCap cap) {
  if (cap.cap == 0.f) return;
  UNROLL for (int i = 0; i < 8; i++) {
    float inverse = exp2_fast(s[i / 4][i % 4] * cap.factor) + 1.f;
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(inverse));
    s[i / 4][i % 4] = fmaf(-2.f * cap.cap, inverse, cap.cap);
  }
}

// What a lane's rows see of the keys outside [low, high), which are visible to all rows: nothing.
struct SameForAllRows {};
// A row sees `window` keys, the last of which is newest[half]. No window is 2^31 - 1. In chunks (WINDOWS > 1), the
// windows of the halves differ.
template <int HALVES, int WINDOWS>
struct RowWindows {
  u32 window[WINDOWS];
  int newest[HALVES];
};

// Sets scores of hidden keys to -inf. `key`: the key of the lane's first score.
DEVICE void mask_scores(float (&s)[2][4], int key, int low, int high, SameForAllRows) {
  UNROLL for (int i = 0; i < 8; i++) {
    int at = key + i / 4 * 8 + i % 2;
    if (at < low || at >= high) s[i / 4][i % 4] = minus_infinity();
  }
}
template <int HALVES, int WINDOWS>
DEVICE void mask_scores(float (&s)[2][4], int key, int low, int high, const RowWindows<HALVES, WINDOWS>& rows) {
  UNROLL for (int i = 0; i < 8; i++) {
    int at = key + i / 4 * 8 + i % 2, half = i % 4 / 2;
    if (half < HALVES && u32(rows.newest[half] - at) >= rows.window[half % WINDOWS])
      s[i / 4][i % 4] = minus_infinity();
  }
}

// Turns scores into weights relative to the largest score so far, and rescales earlier sums to it.
template <class S, int HALVES>
DEVICE void update_softmax(State<S, HALVES>& state, float (&s)[2][4], float scale) {
  UNROLL for (int h = 0; h < HALVES; h++) {
    float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1])) * scale;
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(state.top[h], fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2)));
    float base = top == minus_infinity() ? 0.f : top;  // no visible key yet: every weight becomes 0
    if (__any_sync(ALL_LANES, top > state.top[h])) {
      float rescale = exp2_fast(state.top[h] - base);
      state.sum[h] *= rescale;
      UNROLL for (int t = 0; t < 2 * S::STEPS; t++) state.out[t][2 * h] *= rescale, state.out[t][2 * h + 1] *= rescale;
    }
    state.top[h] = top;
    UNROLL for (int t = 0; t < 2; t++)
      UNROLL for (int i = 2 * h; i < 2 * h + 2; i++) {
        s[t][i] = exp2_fast(fmaf(s[t][i], scale, -base));
        state.sum[h] += s[t][i];
      }
  }
}

// Adds the weighted values. With fp8, 16 columns make two products: the even columns, and the odd ones.
template <class S, int HALVES>
DEVICE void add_values(State<S, HALVES>& state, const float (&s)[2][4], u32 tile, int warp, int lane) {
  u32 p[4] = {}, r[4];
  UNROLL for (int t = 0; t < 2; t++)
    UNROLL for (int h = 0; h < HALVES; h++)
      p[2 * t + h] = S::F8 ? pack_half(s[t][2 * h], s[t][2 * h + 1]) : pack(s[t][2 * h], s[t][2 * h + 1]);
  // matrices: keys 0-7 and 8-15 of one 16-byte column, then of the next
  u32 row = row_of<S>(tile, warp * WARP_KEYS + (lane >> 3 & 1) * 8 + (lane & 7), lane >> 4);
  UNROLL for (int k = 0; k < S::ROW_BYTES / 16; k += 2) {
    load_matrices_transposed(r, column<S>(row, k));
    if constexpr (S::F8) {
      UNROLL for (int n = 0; n < 2; n++) {  // a register has columns 2c, 2c+1 of one key, then of the next
        u32 even[2], odd[2];
        widen(__byte_perm(r[2 * n], 0, 0x3120), even[0], odd[0]);
        widen(__byte_perm(r[2 * n + 1], 0, 0x3120), even[1], odd[1]);
        multiply_half(state.out[2 * (k + n)], p, even[0], even[1]);
        multiply_half(state.out[2 * (k + n) + 1], p, odd[0], odd[1]);
      }
    } else {
      multiply(state.out[k], p, r[0], r[1]);
      multiply(state.out[k + 1], p, r[2], r[3]);
    }
  }
}

// Adds one tile to the running sums. `key`: this warp's first key; the keys [low, high) are visible to all rows.
template <class S, int HALVES, class Rows>
DEVICE void attend(State<S, HALVES>& state, const u32 (&q)[S::STEPS][4], u32 keys, u32 values, int key, int low,
                   int high, const Rows& rows, float scale, ScoreCap cap, int warp, int lane) {
  float s[2][4];
  score<S>(s, q, keys, warp, lane);
  if constexpr (S::KINDS) cap_scores(s, cap);
  if (key < low || key + WARP_KEYS > high) mask_scores(s, key + lane % 4 * 2, low, high, rows);
  update_softmax(state, s, scale);
  add_values(state, s, values, warp, lane);
}
