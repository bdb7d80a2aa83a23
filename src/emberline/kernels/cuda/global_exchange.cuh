// Split of k among CTAs that are not a cluster: they exchange their sums in global memory, through the L2. Include
// after common.cuh and wide.cuh.
//
// Clusters of four and more CTAs leave SMs idle, because a cluster must fit into one GPC (graphics processing cluster).
// CTAs without a cluster can use all SMs. But they need not run at the same time, so no CTA may wait for another
// without a limit. A warp polls for a while until the warps with the other parts of its fragment have arrived. Then
// each of them sums and finishes some of the fragment's quads. A warp that has polled long enough leaves its quads to
// the warp that arrives last.
//
// Order of sums. The same as in a cluster: the parts of k in order, whichever warp sums them.
#pragma once

// The fields of a fragment's counter word: number of parts that have arrived (mask COUNT), number of parts whose quads
// are finished (shift FINISHED), and a bit for each part whose quads are left to the last warp (shift LEFT). Zero
// between launches.
constexpr u32 COUNT = 0xff, FINISHED = 8, LEFT = 16;

struct Exchange {
  float4* sums;  // [tile][fragment][part][block][lane]
  u32* words;    // [tile][fragment]
  int polls;     // polls of a word before a warp leaves its quads to the last
};

DEVICE u32 atomic_or_acq_rel(u32* word, u32 bits) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(bits) : "memory");
  return before;
}

// Called by one lane when its warp's sums are stored. Returns a bit for each part whose quads this warp must finish.
// The atomics are acquire-release at GPU scope, so that the last warp sees the sums of all others.
DEVICE u32 arrive_and_claim(u32* word, int part, int parts, int finishers, int polls) {
  const u32 own = part < finishers ? 1u << part : 0, before = atomic_add_acq_rel(word, 1);
  if ((before & COUNT) == parts - 1) return own | before >> LEFT;
  if (!own) return 0;
#pragma unroll 1
  for (int i = 0; i < polls; i++)
    if ((load_acquire(word) & COUNT) == parts) return own;
  return (atomic_or_acq_rel(word, own << LEFT) & COUNT) == parts ? own : 0;
}

// Sums 32 columns of a fragment over all parts in order.
template <class S> DEVICE void add_quad(float (&c)[16], const float4* from, int parts) {
  constexpr int BATCH = 4;
#pragma unroll 1
  for (; parts > 0; parts -= BATCH, from += BATCH * S::BLOCKS * 32) {
    float4 more[BATCH][4];
#pragma unroll
    for (int i = 0; i < 4 * BATCH; i++)
      if (i / 4 < parts) more[i / 4][i % 4] = load_l2(from + (i / 4 * S::BLOCKS + i % 4) * 32);
#pragma unroll
    for (int i = 0; i < 4 * BATCH; i++) {
      if (i / 4 >= parts) continue;
      const float4 one = more[i / 4][i % 4];
      c[4 * (i % 4)] += one.x, c[4 * (i % 4) + 1] += one.y;
      c[4 * (i % 4) + 2] += one.z, c[4 * (i % 4) + 3] += one.w;
    }
  }
}

// Called by a warp with its part's sums of a fragment. `finish` gets the sums of a quad over all parts; quad q belongs
// to part q % parts.
template <class S, class Finish>
DEVICE void finish_by_exchange(const float (&d)[S::COLUMNS / 2], const Exchange& exchange, int fragment, int part,
                               int parts, int m, int lane, const Finish& finish) {
  float4* const sums = exchange.sums + i64(fragment) * parts * S::BLOCKS * 32 + lane;
  u32* const word = exchange.words + fragment;
#pragma unroll
  for (int j = 0; j < S::BLOCKS; j++)
    if (32 * (j / 4) < m)
      sums[(part * S::BLOCKS + j) * 32] = float4{d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
  __syncwarp();
  const int finishers = min(parts, S::QUADS);
  const u32 claimed_by_lane = lane == 0 ? arrive_and_claim(word, part, parts, finishers, exchange.polls) : 0;
  const u32 claimed = __shfl_sync(ALL_LANES, claimed_by_lane, 0);
  __syncwarp();
#pragma unroll 1
  for (int quad = 0; quad < S::QUADS && 32 * quad < m; quad++) {
    if (!(claimed >> quad % parts & 1)) continue;
    float c[16] = {};
    add_quad<S>(c, sums + 4 * quad * 32, parts);
    finish(c, quad);
  }
  if (claimed && lane == 0) {
    const u32 more = __popc(claimed) << FINISHED, now = atomic_add_acq_rel(word, more) + more;
    if ((now >> FINISHED & COUNT) == finishers) *word = 0;
  }
}
