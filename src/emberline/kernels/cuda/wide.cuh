// The tile shapes of wide.cu and the epilogues. Include after common.cuh, wgmma.cuh and uw12.cuh.
//
// Fragments. Warp i of the CTA has 16 rows of a tile of w. Lane l holds in d[4 j + 2 r + e] row l / 4 + 8 r and column
// 8 j + 2 (l % 4) + e. Four consecutive j are a `quad`: 32 columns.
#pragma once

enum Epilogue { STORE, STORE_F32, ADD, GATED };

// Whether consumers take over registers from the producer warpgroup by setmaxnreg: with four of them, or if the sums
// take half of all registers, a thread needs more than the launch gives to each. setmaxnreg works on whole warpgroups.
constexpr bool trades_registers(int groups, int columns) {
  return groups * columns == 512 || (groups == 4 && columns == 96);
}
constexpr int count_threads(int groups, int columns) {
  return 128 * groups + (trades_registers(groups, columns) ? 128 : 32);
}

template <int GROUPS_, int WIDTH, bool PACKED_, bool FP8_ = false, bool BLOCKS_SCALED_ = false> struct Shape {
  static constexpr bool PACKED = PACKED_, FP8 = FP8_;
  static constexpr bool BLOCKS_SCALED = BLOCKS_SCALED_;  // float8: scales of blocks of 16 rows and 128 k, not of rows
  static constexpr int UNIT_K = FP8 ? 128 : 64;          // k of a step: 128 bytes of plain rows
  static constexpr int GROUPS = GROUPS_, ROWS = 64 * GROUPS, WARPS = 4 * GROUPS;
  static constexpr int COLUMNS = WIDTH, BLOCKS = COLUMNS / 8, QUADS = COLUMNS / 32;
  static constexpr bool LARGE = COLUMNS > 128;  // CTAs of a cluster may share x
  static constexpr bool TRADES_REGISTERS = trades_registers(GROUPS, COLUMNS);
  // 128 * 40 + 256 * 232 = 384 * 168, as launched; 128 * 24 + 512 * 112 < 640 * 96
  static constexpr int PRODUCER_REGISTERS = LARGE ? 40 : 24, CONSUMER_REGISTERS = LARGE ? 232 : 112;
  // Sets of registers into which packed weights are decoded. Three warpgroups with large tiles have none to spare.
  static constexpr int DECODE_SETS = LARGE && GROUPS < 3 ? 2 : 1;
  static constexpr u32 GROUP_BYTES = PACKED ? 4 * UNIT_BYTES : 8192;
  static constexpr u32 X_BYTES = 128 * COLUMNS, W_BYTES = GROUPS * GROUP_BYTES, SLOT = X_BYTES + W_BYTES;
};

// CTAs of a cluster that share their tiles of x: their number, this CTA's index, the rank of the first, and the rows of
// x that each fetches. Rows beyond m are not fetched, to save time.
struct SharedX {
  int ctas, index, first, rows;
  DEVICE bool is_shared() const { return ctas > 1; }
  DEVICE u32 bytes() const { return 128 * rows * ctas; }
};

struct Ring {
  u32 slots, full, empty;
  int stages;
  SharedX sharing;
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
  // Releases a slot that this warp no longer reads, in every CTA that writes to it. The warp wrote nothing, so no
  // memory order is needed.
  template <class S> DEVICE void release_slot(int slot, int lane) const {
    const u32 barrier = empty + 8 * slot;
    if (!S::LARGE) {
      if (lane == 0) barrier_arrive(barrier);
    } else if (lane < sharing.ctas) {
      asm volatile("{ .reg .b32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
                   "mbarrier.arrive.shared::cluster.b64 _, [far]; }"
                   ::"r"(barrier), "r"(sharing.first + lane) : "memory");
    }
  }
};

// As barrier_wait, but a hang ends with a store to a null address. If a kernel contains a trap or a call (a division is
// one), the compiler ignores setmaxnreg and does not use the registers that a warpgroup takes over from another.
template <class S> DEVICE void barrier_wait_without_trap(u32 barrier, u32 parity) {
  if constexpr (S::TRADES_REGISTERS) {
#pragma unroll 1
    for (u32 tries = 0; !barrier_passed(barrier, parity); tries++)
      if (tries > (1u << 22)) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
  } else {
    barrier_wait(barrier, parity);
  }
}

// -- outputs ----------------------------------------------------------------------------------------------------------

// Transposes an 8x8 matrix, of which lane l holds row l / 4, columns 2 (l % 4) and the next.
DEVICE u32 transpose_8x8(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}
// Loads past L1. With PDL this CTA started early, and L1 may hold data from before the preceding kernel's writes.
DEVICE void load_past_l1(u32 (&x)[4], const bf16* at) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at) : "memory");
}

DEVICE float load_past_l1(const float* at) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}

// silu(gate) * up, rounded as in torch: gate and up to bf16, then silu, then the product.
template <class S> DEVICE float gated_silu(float gate, float up) {
  gate = to_float(to_bf16(gate));
  const float part = S::TRADES_REGISTERS ? silu(gate) : gate / (1.f + expf(-gate));
  return to_float(to_bf16(part)) * to_float(to_bf16(up));
}

// The epilogue of a tile's fragments, one quad at a time. Lanes exchange values until each has 8 adjacent outputs of a
// row.
template <class S, Epilogue EPILOGUE_> struct Outputs {
  static constexpr Epilogue EPILOGUE = EPILOGUE_;
  void* out;
  const bf16* residual;
  const float* bias;
  int n, m;
  const float *w_scales, *x_scales;  // float8: of the rows of w and of x; null if the sums are already scaled
  u32 added[2][4];                   // the residual as stored

  // A fragment's first row of w. Gated: the tile's groups of 32 rows are 16 gates and their 16 ups. Fragments of the
  // first half of the tile have 8 gates and their 8 ups each, those of the second half the other 8 of each. Packed: two
  // adjacent fragments have them, after the warps have exchanged values.
  static DEVICE int row(int tile, int fragment) {
    if (EPILOGUE != GATED) return S::ROWS * tile + 16 * fragment;
    if (S::PACKED) return S::ROWS * tile + 32 * (fragment / 2) + 8 * (fragment % 2);
    return S::ROWS * tile + 32 * (fragment % (S::WARPS / 2)) + 8 * (fragment / (S::WARPS / 2));
  }
  // The offset of the 8 outputs that a lane stores, and its row of x among columns 32 quad + 16 pair ...
  DEVICE i64 offset(int row, int column, int lane) const { return i64(column) * n + row + 8 * (lane % 2); }
  static DEVICE int column(int quad, int pair, int lane) { return 32 * quad + 16 * pair + lane % 4 / 2 * 8 + lane / 4; }

  DEVICE void load_residual(int row, int quad, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2 && EPILOGUE == ADD; pair++) {
      const int column = this->column(quad, pair, lane);
      added[pair][0] = added[pair][1] = added[pair][2] = added[pair][3] = 0;
      if (column < m && row < n) load_past_l1(added[pair], residual + offset(row, column, lane));
    }
  }
  DEVICE void finish(float (&c)[16], int row, int quad, int lane) {
    if (row >= n || 32 * quad >= m) return;  // the condition is the same for the whole warp
    if (S::FP8 && w_scales) scale(c, row, quad, lane);
    if (bias) {
      const float shift[2] = {bias[row + lane / 4], bias[row + lane / 4 + (EPILOGUE == GATED ? 16 : 8)]};
#pragma unroll
      for (int i = 0; i < 16; i++) c[i] += shift[i / 2 % 2];
    }
    if (EPILOGUE == STORE_F32) store_floats(c, row, quad, lane);
    else if (EPILOGUE == GATED) store_gated(c, row, quad, lane);
    else store(c, row, quad, lane);
  }
  DEVICE void scale(float (&c)[16], int row, int quad, int lane) const {
    const float of_w[2] = {w_scales[row + lane / 4], w_scales[row + lane / 4 + (EPILOGUE == GATED ? 16 : 8)]};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float of_x = load_past_l1(x_scales + min(32 * quad + 8 * i + 2 * (lane % 4) + e, m - 1));
        c[4 * i + e] *= of_w[0] * of_x, c[4 * i + 2 + e] *= of_w[1] * of_x;
      }
  }
  DEVICE void store(float (&c)[16], int row, int quad, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      u32 x[4];
      if (EPILOGUE == ADD) transpose_quad(added[pair]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &low_c = c[8 * pair + 2 * i], &high_c = c[8 * pair + 2 * i + 1];
        if (EPILOGUE == ADD) {
          const u32 more = transpose_8x8(added[pair][i]);
          low_c += low(more), high_c += high(more);
        }
        x[i] = transpose_8x8(pack(low_c, high_c));
      }
      transpose_quad(x);
      const int column = this->column(quad, pair, lane);
      bf16* const to = static_cast<bf16*>(out) + offset(row, column, lane);
      if (column < m) *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  DEVICE void store_gated(float (&c)[16], int row, int quad, int lane) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[i] = transpose_8x8(pack(gated_silu<S>(c[4 * i], c[4 * i + 2]), gated_silu<S>(c[4 * i + 1], c[4 * i + 3])));
    transpose_quad(x);
    const int column = 32 * quad + lane % 4 * 8 + lane / 4;
    bf16* const to = static_cast<bf16*>(out) + i64(column) * (n / 2) + row / 32 * 16 + row % 32;
    if (column < m) *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  }
  // The transposing instruction moves 16 bits, so the halves of floats are transposed separately.
  DEVICE void store_floats(float (&c)[16], int row, int quad, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 a = __float_as_uint(c[2 * i]), b = __float_as_uint(c[2 * i + 1]);
      const u32 lows = transpose_8x8(__byte_perm(a, b, 0x5410)), highs = transpose_8x8(__byte_perm(a, b, 0x7632));
      const int column = 32 * quad + i / 2 * 8 + lane / 4;
      u32* const to = static_cast<u32*>(out) + i64(column) * n + row + i % 2 * 8 + lane % 4 * 2;
      const uint2 both = make_uint2(__byte_perm(lows, highs, 0x5410), __byte_perm(lows, highs, 0x7632));
      if (column < m) *reinterpret_cast<uint2*>(to) = both;
    }
  }
};

// -- clusters, and the parts of k -------------------------------------------------------------------------------------

// Synchronises all threads of the cluster; their writes to each other's shared memory are visible afterwards.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two steps, after the barriers are initialised, which is all that must be visible afterwards.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Copies to the same address in each CTA that shares the tile (multicast). Each CTA's own barrier counts the bytes.
DEVICE void copy_tile_multicast(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy, SharedX sharing) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(u16(((1 << sharing.ctas) - 1) << sharing.first)),
        "l"(policy) : "memory");
}
DEVICE void store_remote(u32 to, u32 cta, float a, float b, float c, float d) {
  asm volatile("{ .reg .u32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
               "st.shared::cluster.v4.f32 [far], {%2, %3, %4, %5}; }"
               ::"r"(to), "r"(cta), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_remote(u32 to, u32 cta, float a, float b) {
  asm volatile("{ .reg .u32 far;\n mapa.shared::cluster.u32 far, %0, %1;\n"
               "st.shared::cluster.v2.f32 [far], {%2, %3}; }" ::"r"(to), "r"(cta), "f"(a), "f"(b) : "memory");
}

struct ClusterPart {
  int index, split;
  u32 memory;  // overwrites the rings: [fragment / split][part][block] of 512 bytes
  SharedX sharing;
  DEVICE u32 owner(int fragment) const { return fragment % split * sharing.ctas + sharing.index; }
  DEVICE u32 offset(int fragment, int part, int blocks, int block, int lane) const {
    return memory + ((fragment / split * split + part) * blocks + block) * 512 + lane * 16;
  }
};

// Sends this warp's sums to the CTA that owns each fragment, through distributed shared memory. Packed and gated: a
// warp has gates or ups, half of each of two fragments.
template <class S, Epilogue EPILOGUE>
DEVICE void send_fragments(const float (&d)[S::COLUMNS / 2], ClusterPart part, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < S::BLOCKS; j++) {
    if (S::PACKED && EPILOGUE == GATED) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int fragment = warp / 2 * 2 + r;
        store_remote(part.offset(fragment, part.index, S::BLOCKS, j, lane) + 8 * (warp % 2), part.owner(fragment),
                     d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
      }
    } else {
      store_remote(part.offset(warp, part.index, S::BLOCKS, j, lane), part.owner(warp), d[4 * j], d[4 * j + 1],
                   d[4 * j + 2], d[4 * j + 3]);
    }
  }
}

// Sums the parts of k within a cluster. The CTA of part f % split owns fragment f; its warps share the quads of its
// fragments.
template <class S, Epilogue EPILOGUE>
DEVICE void finish_in_cluster(const float (&d)[S::COLUMNS / 2], Outputs<S, EPILOGUE> outputs, ClusterPart part,
                              int tile, int warp, int lane) {
  cluster_sync();  // all CTAs are done with their rings, which are overwritten next
  send_fragments<S, EPILOGUE>(d, part, warp, lane);
  const int fragments = (S::WARPS - part.index + part.split - 1) / part.split;
  const auto fragment = [&](int item) { return item / S::QUADS * part.split + part.index; };
  if (warp < fragments * S::QUADS) outputs.load_residual(outputs.row(tile, fragment(warp)), warp % S::QUADS, lane);
  cluster_sync();
#pragma unroll 1
  for (int item = warp; item < fragments * S::QUADS; item += S::WARPS) {
    const int quad = item % S::QUADS, row = outputs.row(tile, fragment(item));
    if (item != warp) outputs.load_residual(row, quad, lane);
    float c[16] = {};
#pragma unroll 1
    for (int from = 0; from < part.split; from++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 more = load_shared_16(part.offset(fragment(item), from, S::BLOCKS, 4 * quad + i, lane));
        c[4 * i] += __uint_as_float(more.x), c[4 * i + 1] += __uint_as_float(more.y);
        c[4 * i + 2] += __uint_as_float(more.z), c[4 * i + 3] += __uint_as_float(more.w);
      }
    outputs.finish(c, row, quad, lane);
  }
}

template <class S, Epilogue EPILOGUE>
DEVICE void finish_alone(const float (&d)[S::COLUMNS / 2], Outputs<S, EPILOGUE> outputs, int tile, int warp, int lane) {
  const int row = outputs.row(tile, warp);
#pragma unroll
  for (int quad = 0; quad < S::QUADS; quad++) {
    float c[16];
#pragma unroll
    for (int i = 0; i < 16; i++) c[i] = d[16 * quad + i];
    outputs.load_residual(row, quad, lane);
    outputs.finish(c, row, quad, lane);
  }
}

// -- packed gates and ups ---------------------------------------------------------------------------------------------

DEVICE void store_shared_16(u32 at, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void sync_warp_pair(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }

// A warp has 16 gates, the next warp their 16 ups: the first warp finishes 8 of each, the second the others. They
// exchange rounded values through the memory of their units in a slot that both have read. It holds three quads, so a
// warp that writes the fourth knows, by the barriers between, that the first was read.
template <class S>
DEVICE void exchange_and_finish(const float (&d)[S::COLUMNS / 2], Outputs<S, GATED> outputs, u32 units, int tile,
                                int warp, int lane) {
  const int row = S::ROWS * tile + 16 * warp, odd = warp % 2;
  const u32 own_slot = units + UNIT_BYTES * warp + 16 * lane, other_slot = units + UNIT_BYTES * (warp ^ 1) + 16 * lane;
  if (row >= outputs.n) return;
  const float* const bias = outputs.bias;
  const float shift[2] = {bias ? bias[row + lane / 4] : 0.f, bias ? bias[row + lane / 4 + 8] : 0.f};
  outputs.bias = nullptr;  // already added before the exchange
#pragma unroll
  for (int quad = 0; quad < S::QUADS; quad++) {
    if (32 * quad >= outputs.m) return;
    u32 own[4], outgoing[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float c[4];
#pragma unroll
      for (int j = 0; j < 4; j++) c[j] = bias ? d[16 * quad + 4 * i + j] + shift[j / 2] : d[16 * quad + 4 * i + j];
      const u32 first = pack(c[0], c[1]), second = pack(c[2], c[3]);
      own[i] = odd ? second : first, outgoing[i] = odd ? first : second;
    }
    store_shared_16(own_slot + 512 * (quad % 3), outgoing);
    sync_warp_pair(warp / 2);
    const uint4 received = load_shared_16(other_slot + 512 * (quad % 3));
    const u32 others[4] = {received.x, received.y, received.z, received.w};
    float c[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 gates = odd ? others[i] : own[i], ups = odd ? own[i] : others[i];
      c[4 * i] = low(gates), c[4 * i + 1] = high(gates), c[4 * i + 2] = low(ups), c[4 * i + 3] = high(ups);
    }
    outputs.finish(c, outputs.row(tile, warp), quad, lane);
  }
}
template <class S>
DEVICE void finish_in_pairs(const float (&d)[S::COLUMNS / 2], Outputs<S, GATED> outputs, const Ring& ring, int last,
                            int tile, int warp, int lane) {
  exchange_and_finish(d, outputs, ring.slots + last * S::SLOT + S::X_BYTES, tile, warp, lane);
  fence_shared_writes();
  __syncwarp();
  ring.release_slot<S>(last, lane);
}
