// The selection of experts by their scores; and for at most 8 rows, tables of the rows of each selected expert, which
// each CTA makes itself in shared memory. Include after common.cuh.
#pragma once

// Loads past L1. With PDL this CTA started early, and L1 may hold data from before the preceding kernel's writes.
DEVICE int load_int(const int* at) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE float load_float(const float* at) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}

// The rows that selected one expert.
struct RowTile {
  int expert;
  u32 mask;  // of these rows
};

// -- selection --------------------------------------------------------------------------------------------------------

constexpr float LOWEST = -3.4028234663852886e38f;

// How rows select experts: `Routing` of mixture.py, without groups.
struct SelectionRules {
  const float *logits, *correction;  // [rows, experts], [experts] or null
  int rows, experts, top, sigmoid, renormalize;
  float scale;
};

// Numbers that sort as the floats do; 0 is below all. NaN is as low as the lowest number.
DEVICE u32 sortable(float x) {
  const u32 bits = __float_as_uint(x > LOWEST ? x : LOWEST);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// An expert that a row selected, and its weight.
struct Selected {
  int expert;
  float weight;
};

// Returns the expert of rank `lane` of a row, for lanes below `top`. Lane l has the scores of experts PER_LANE l and
// the following. Called by a whole warp, after the kernel that wrote the logits.
template <int PER_LANE> DEVICE Selected select_experts(const SelectionRules& rules, int row, int lane) {
  float score[PER_LANE];
  u32 key[PER_LANE];
  const int first = lane * PER_LANE;
  const float* const logits = rules.logits + i64(row) * rules.experts + first;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    score[i] = first + i < rules.experts ? load_float(logits + i) : LOWEST;
    key[i] = sortable(score[i]);
  }
  float total = 1.f;
  if (rules.sigmoid) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) score[i] = 1.f / (1.f + expf(-score[i]));
  } else {
    float highest = LOWEST;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) highest = fmaxf(highest, score[i]);
#pragma unroll
    for (int distance = 16; distance; distance /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, distance));
    total = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      score[i] = expf(score[i] - highest);
      if (first + i < rules.experts) total += score[i];
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) total += __shfl_xor_sync(ALL_LANES, total, distance);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    if (first + i >= rules.experts) key[i] = 0;
    else if (rules.correction) key[i] = sortable(score[i] / total + rules.correction[first + i]);
  }
  Selected found{0, 0.f};
  float chosen = 0.f;
#pragma unroll 1
  for (int rank = 0; rank < rules.top; rank++) {
    u32 best = 0, number = ALL_LANES;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) best = max(best, key[i]);
    best = __reduce_max_sync(ALL_LANES, best);
#pragma unroll
    for (int i = PER_LANE - 1; i >= 0; i--)
      if (key[i] == best) number = first + i;
    number = __reduce_min_sync(ALL_LANES, number);
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (number == u32(first + i)) key[i] = 0, own = score[i];
    const float weight = __shfl_sync(ALL_LANES, own, number / PER_LANE);
    chosen += weight;
    if (lane == rank) found = Selected{int(number), weight};
  }
  if (rules.renormalize) total = rules.sigmoid ? chosen + 1e-20f : chosen;
  found.weight *= rules.scale / total;
  return found;
}

// Returns the sum over the lanes up to this one.
DEVICE int sum_up_to_lane(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int more = __shfl_up_sync(ALL_LANES, x, distance);
    if (lane >= distance) x += more;
  }
  return x;
}

// -- tables of a CTA --------------------------------------------------------------------------------------------------

constexpr int MAX_SELECTING_ROWS = 8;

// Tables in shared memory, for 32 PER_LANE experts. Column r of each tile is row r of x.
template <int PER_LANE> struct SelectedTiles {
  static constexpr int EXPERTS = 32 * PER_LANE;
  float weights[EXPERTS][MAX_SELECTING_ROWS];  // of the rows that selected an expert
  u32 masks[EXPERTS];                          // of each expert, the rows that selected it
  u32 entries[EXPERTS];                        // of each tile: its expert, and its rows << 16
  int count;

  DEVICE RowTile load(int tile) const { return RowTile{int(entries[tile] & 0xffff), entries[tile] >> 16}; }
  // Selects the experts of all rows. Called by all threads of the CTA, after the kernel that wrote the logits.
  DEVICE void select(const SelectionRules& rules, int warp, int warps, int lane) {
    for (int i = threadIdx.x; i < EXPERTS; i += 32 * warps) masks[i] = 0;
    __syncthreads();
    for (int row = warp; row < rules.rows; row += warps) {
      const Selected found = select_experts<PER_LANE>(rules, row, lane);
      if (lane < rules.top) {
        weights[found.expert][row] = found.weight;
        atomicOr(&masks[found.expert], 1u << row);
      }
    }
    __syncthreads();
    if (warp == 0) list_tiles(lane);
    __syncthreads();
  }

 private:
  // Lists the experts that any row selected, in their order.
  DEVICE void list_tiles(int lane) {
    int used = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) used += masks[lane * PER_LANE + i] != 0;
    const int end = sum_up_to_lane(used, lane);
    int place = end - used;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int expert = lane * PER_LANE + i;
      if (masks[expert]) entries[place++] = expert | masks[expert] << 16;
    }
    if (lane == 31) count = end;
  }
};
