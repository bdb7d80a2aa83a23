// Parts of k whose CTAs are no cluster: their sums meet in the L2. After common.cuh and wide.cuh.
//
// Clusters of four and more leave multiprocessors idle, as a cluster must fit into one of the groups they come in;
// parts that are none can have them all. Nothing says that such CTAs run at once, so nobody may wait for another for
// good: a warp that has come waits a little for those with the other parts of its fragment, and then each of them adds
// up some of its quads. Who has waited long enough leaves its own to whoever comes last, and goes.
//
// Order of sums. The same as in a cluster: the parts of k, in order, whoever adds them up.
#pragma once

// A word for each fragment: how many parts have come, how many are finished with their quads, and which have left them
// to the last. Zero between launches.
constexpr u32 COUNT = 0xff, FINISHED = 8, LEFT = 16;

struct Table {
  float4* sums;  // [tile][fragment][part][block][lane]
  u32* words;    // [tile][fragment]
  int looks;     // at a word, before a warp goes
};

DEVICE u32 add_to(u32* word, u32 more) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(more) : "memory");
  return before;
}
DEVICE u32 set_in(u32* word, u32 bits) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(bits) : "memory");
  return before;
}
DEVICE u32 look_at(const u32* word) {
  u32 now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  return now;
}

// By one lane, when its warp's sums are in the table. The parts whose quads the warp is to add up, a bit each.
DEVICE u32 come(u32* word, int part, int parts, int finishers, int looks) {
  const u32 mine = part < finishers ? 1u << part : 0, before = add_to(word, 1);
  if ((before & COUNT) == parts - 1) return mine | before >> LEFT;
  if (!mine) return 0;
#pragma unroll 1
  for (int i = 0; i < looks; i++)
    if ((look_at(word) & COUNT) == parts) return mine;
  return (set_in(word, mine << LEFT) & COUNT) == parts ? mine : 0;
}

// Of a fragment, 32 columns of all parts in order.
template <class S> DEVICE void add_quad(float (&c)[16], const float4* from, int parts) {
  constexpr int AT_ONCE = 4;
#pragma unroll 1
  for (; parts > 0; parts -= AT_ONCE, from += AT_ONCE * S::BLOCKS * 32) {
    float4 more[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < 4 * AT_ONCE; i++)
      if (i / 4 < parts) more[i / 4][i % 4] = load_l2(from + (i / 4 * S::BLOCKS + i % 4) * 32);
#pragma unroll
    for (int i = 0; i < 4 * AT_ONCE; i++) {
      if (i / 4 >= parts) continue;
      const float4 one = more[i / 4][i % 4];
      c[4 * (i % 4)] += one.x, c[4 * (i % 4) + 1] += one.y;
      c[4 * (i % 4) + 2] += one.z, c[4 * (i % 4) + 3] += one.w;
    }
  }
}

// By a warp with its part's sums of a fragment. `finish` gets a quad's, of all parts; quad q belongs to part q % parts.
template <class S, class Finish>
DEVICE void finish_apart(const float (&d)[S::COLUMNS / 2], const Table& table, int fragment, int part, int parts, int m,
                         int lane, const Finish& finish) {
  float4* const sums = table.sums + i64(fragment) * parts * S::BLOCKS * 32 + lane;
  u32* const word = table.words + fragment;
#pragma unroll
  for (int j = 0; j < S::BLOCKS; j++)
    if (32 * (j / 4) < m)
      sums[(part * S::BLOCKS + j) * 32] = float4{d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
  __syncwarp();
  const int finishers = min(parts, S::QUADS);
  const u32 whose = __shfl_sync(ALL_LANES, lane == 0 ? come(word, part, parts, finishers, table.looks) : 0, 0);
  __syncwarp();
#pragma unroll 1
  for (int quad = 0; quad < S::QUADS && 32 * quad < m; quad++) {
    if (!(whose >> quad % parts & 1)) continue;
    float c[16] = {};
    add_quad<S>(c, sums + 4 * quad * 32, parts);
    finish(c, quad);
  }
  if (whose && lane == 0) {
    const u32 more = __popc(whose) << FINISHED, now = add_to(word, more) + more;
    if ((now >> FINISHED & COUNT) == finishers) *word = 0;
  }
}
