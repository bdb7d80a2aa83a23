// What the kernels of narrow.cu and chain.cu have in common: a warp's copies of x, its products and its sums. Include
// after common.cuh and narrow.cuh.
#pragma once

constexpr u32 X_PITCH = 256 + 16;  // bytes from a row of x in a slot to the next; padded to avoid bank conflicts

// Copies 16 bytes to shared memory, or makes them zero if `bytes` is 0.
DEVICE void copy_chunk(u32 to, const u8* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Arrives at the barrier when all earlier copies of this thread by `copy_chunk` have ended.
DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Multiplies the codes of a slot and 128 k of x, both in shared memory, into the sums of the warp. `pitch`: bytes from a
// row of x to the next.
template <class F, int BLOCKS, int TILES>
DEVICE void multiply_slot(float (&sums)[BLOCKS][TILES][4], u32 slot, u32 x, u32 pitch, int x_rows, int lane) {
  u32 b[TILES][4][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const u32 row = min(8 * t + lane % 8, x_rows - 1);
#pragma unroll
    for (int i = 0; i < 4; i++) load_matrices(b[t][i], x + row * pitch + 64 * i + lane / 8 * 16);
  }
  constexpr int STEPS = 8 / F::GROUP_COUNT;
#pragma unroll
  for (int r = 0; r < BLOCKS; r++) {
    const u32 at = slot + r * UNIT<F>;
    F format;
    format.load(at + CODE_BYTES, lane);
    const uint4 first = load_shared_16(at + 16 * lane), second = load_shared_16(at + 512 + 16 * lane);
    const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int g = 0; g < F::GROUP_COUNT; g++) {
      float group_sums[TILES][4] = {};
#pragma unroll
      for (int s = g * STEPS; s < (g + 1) * STEPS; s++) {
        u32 a[4];
        format.decode(a, words[s], g);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          float(&target)[4] = F::SCALES_SUMS ? group_sums[t] : sums[r][t];
          multiply(target, a, b[t][s / 2][2 * (s % 2)], b[t][s / 2][2 * (s % 2) + 1]);
        }
      }
      if constexpr (F::SCALES_SUMS) {
        const float scale[2] = {format.scale(0, g), format.scale(1, g)};
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[r][t][i] += scale[i / 2] * group_sums[t][i];
      }
    }
  }
}

// Stores a warp's sums as [column][row].
template <int BLOCKS, int TILES>
DEVICE void store_partial(float* partial, const float (&sums)[BLOCKS][TILES][4], int x_rows, int lane) {
  constexpr int PITCH = 16 * BLOCKS + 4;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int column = 8 * t + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) {
      float* at = partial + column * PITCH + 16 * r + lane / 4;
      if (column < x_rows) at[0] = sums[r][t][0], at[8] = sums[r][t][2];
      if (column + 1 < x_rows) at[PITCH] = sums[r][t][1], at[PITCH + 8] = sums[r][t][3];
    }
  }
}
