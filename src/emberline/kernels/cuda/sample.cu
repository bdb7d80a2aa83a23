// From logits to tokens and log-probabilities: one CTA per row. Only a short list of the most probable tokens is
// sorted.
//
// A token's rank is determined by one number, its code: the logit's bits in sortable order, then the inverted id. Codes
// are distinct. A larger code is more probable, or as probable with a lower id. Logits of -inf and NaN have the code 0
// and are never selected.
//
// A token's weight is exp((logit - max_logit) / temperature) as an integer; the largest is 2^44. Sums of integers do
// not depend on the order, so a row's result is the same in any batch and any run, bit for bit. The error is 2^-21 of
// each weight, plus all weights below 2^-44 of the largest: at most 2^-24 of it for 2^20 tokens together.
//
// Top-k, top-p and the draw each need the shortest prefix of the order that reaches a count or a mass (sum of weights).
// The prefix of a smaller mass is inside that of a larger one, so a step needs only the mass that the previous step
// kept.
#include "common.cuh"

constexpr u32 THREADS = 1024, WARPS = THREADS / 32;
constexpr u32 LIST = 2048;    // tokens that can be listed and sorted at once
constexpr u32 DIGITS = 2048;  // values of the 11 bits that one level of the radix search examines
// Up to this rank, the maxima of 256 parts of the row bound it as well as those of 1024.
constexpr u32 MAX_WIDE_PART_RANK = 64;
// About 1700 tokens exceed the 832nd of 1024 maxima: 1024 ln(1024 / (1024 - 832)).
constexpr u32 MAX_BOUND_RANK = 832;
constexpr u32 ID_BITS = 20, CODE_BITS = 32 + ID_BITS, ID_MASK = (1u << ID_BITS) - 1;
constexpr u32 LOWEST = 0x00800000u;  // the sortable key of the lowest finite float
constexpr u32 ONE_BITS = 44;
#define NEG_INF __int_as_float(0xff800000)  // -inf
static_assert(2 * THREADS == LIST && 2 * THREADS == DIGITS && WARPS == 32, "each thread owns two of each");

// -- tokens -----------------------------------------------------------------------------------------------------------

struct Row { const float* x; u32 n; };

DEVICE u64 token_code(float x, u32 id) {
  if (!(x > NEG_INF)) return 0;
  u32 bits = __float_as_uint(x + 0.f), key = bits ^ (bits >> 31 ? ALL_LANES : 0x80000000u);  // -0 becomes 0
  return u64(key) << ID_BITS | (ID_MASK - id);
}
DEVICE u32 id_of(u64 token_code) { return token_code ? ID_MASK - (u32(token_code) & ID_MASK) : 0; }
// Also of a bound that is not a token's code: keys below every float count as -inf.
DEVICE float logit_of(u64 token_code) {
  u32 key = u32(token_code >> ID_BITS);
  return key < LOWEST ? NEG_INF : __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Weights {
  float most, high, low, floor;  // high + low = log2(e) / temperature; logits `floor` below the largest weigh 0

  DEVICE Weights(float most, float temperature) : most(most) {
    // Keeps the following values finite.
    double scale = fmin(fmax(1.4426950408889634 / double(temperature), 1e-30), 1e38);
    high = float(scale), low = float(scale - double(high)), floor = -float(ONE_BITS + 1) / high;
  }
  DEVICE u64 operator()(float x) const {
    float d = fmaxf(x - most, floor), y = __fmul_rn(d, high);  // explicitly rounded, not fused; `error` corrects it
    float error = fmaf(d, high, -y) + d * low;
    float shifted = y + 12582912.f, whole = shifted - 12582912.f;  // 1.5 * 2^23: the low bits are the integer part
    u32 part = __float_as_uint(power_of_two((y - whole) + error) + 2.f) - 0x40000000u;  // in units of 2^-22
    // Shifted by 63 at the floor: 0.
    return u64(part) << 40 >> (0x4b400000 + 62 - int(ONE_BITS) - __float_as_int(shifted));
  }
};

// Calls f(logits, id) for every four tokens from id on, ascending within a thread. At a row's unaligned begin and end,
// f gets one token and three of -inf. The loads of a thread's next FLIGHT pieces are in flight while f processes the
// current ones.
template <u32 FLIGHT, class F>
DEVICE void for_each_four(const Row& row, F f) {
  const u32 t = threadIdx.x, misalignment = u32(reinterpret_cast<u64>(row.x) >> 2) & 3;
  const u32 head = min(row.n, (4 - misalignment) & 3), pieces = (row.n - head) / 4, last = head + 4 * pieces + t;
  const float4* body = reinterpret_cast<const float4*>(row.x + head);
  float4 current[FLIGHT], next[FLIGHT];
  auto load = [&](float4(&to)[FLIGHT], u32 start) {
#pragma unroll
    for (u32 j = 0; j < FLIGHT; j++)
      if (start + j * THREADS < pieces) to[j] = body[start + j * THREADS];
  };
  load(current, t);
  if (t < head) f(make_float4(row.x[t], NEG_INF, NEG_INF, NEG_INF), t);
#pragma unroll 1
  for (u32 start = t; start < pieces; start += THREADS * FLIGHT) {
    load(next, start + THREADS * FLIGHT);
#pragma unroll
    for (u32 j = 0; j < FLIGHT; j++) {
      if (start + j * THREADS < pieces) f(current[j], head + 4 * (start + j * THREADS));
      current[j] = next[j];
    }
  }
  if (last < row.n) f(make_float4(row.x[last], NEG_INF, NEG_INF, NEG_INF), last);
}
DEVICE float largest(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

// -- CTA-wide reductions
// -------------------------------------------------------------------------------------------------

template <class F>
DEVICE u64 reduce(u64 x, u64* partial, F combine) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 gap = 16; gap; gap /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, gap));
  __syncthreads();  // other threads may still read `partial`
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = partial[lane];
  for (u32 gap = 16; gap; gap /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, gap));
  return x;
}
DEVICE u64 sum(u64 x, u64* partial) { return reduce(x, partial, [](u64 a, u64 b) { return a + b; }); }
DEVICE u64 largest(u64 x, u64* partial) { return reduce(x, partial, [](u64 a, u64 b) { return max(a, b); }); }

// Returns the exclusive prefix sum over the threads.
DEVICE u64 sum_before(u64 x, u64* partial) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 up_to = x;
  for (u32 gap = 1; gap < 32; gap *= 2) {
    u64 other = __shfl_up_sync(ALL_LANES, up_to, gap);
    if (lane >= gap) up_to += other;
  }
  __syncthreads();  // other threads may still read `partial`
  if (lane == 31) partial[warp] = up_to;
  __syncthreads();
  u64 before = lane < warp ? partial[lane] : 0;
  for (u32 gap = 16; gap; gap /= 2) before += __shfl_xor_sync(ALL_LANES, before, gap);
  return before + up_to - x;
}

// Sorts codes[0, size) in descending order by a bitonic network; size <= LIST. Gaps up to 32 stay within the 64 codes
// of a warp, so that __syncwarp suffices.
DEVICE void sort(u64* codes, u32 size) {
  const u32 t = threadIdx.x;
  u32 width = 2;
  while (width < size) width *= 2;
  for (u32 i = size + t; i < width; i += THREADS) codes[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 run = 2; run <= width; run *= 2)
#pragma unroll 1
    for (u32 gap = run / 2; gap; gap /= 2) {
      u32 a = 2 * t - (t & (gap - 1)), b = a + gap, next = gap > 1 ? gap / 2 : run;  // the t-th pair of this gap
      if (t < width / 2) {
        u64 x = codes[a], y = codes[b];
        if ((x < y) == ((a & run) == 0)) codes[a] = y, codes[b] = x;
      }
      if (gap > 32 || next > 32) __syncthreads();
      else __syncwarp();
    }
  __syncthreads();
}

// -- the search -------------------------------------------------------------------------------------------------------

struct Found { u32 digit, count; u64 above, mass_above; };

struct Shared {
  u64 codes[LIST];     // codes of the listed tokens
  u64 sums[LIST];      // mass up to and including each listed token; during the radix search, the mass of each digit
  u32 counts[DIGITS];  // number of tokens with each digit
  u64 partial[WARPS];
  Found found;
  u32 size;
};

// Largest code of this thread's tokens and of the row; selectable tokens.
struct RowScan { u64 mine, best; u32 selectable; };
// All tokens in a range of codes, sorted; count and mass above the range.
struct List { u32 size; u64 above, mass_above; };
struct PrefixEnd { u64 mass; u32 id; };                // end of a prefix: its mass and its last token

DEVICE RowScan scan_row(Shared& s, const Row& row, bool counts) {
  float most = NEG_INF;
  u32 at = 0, selectable = 0;
  for_each_four<4>(row, [&](float4 x, u32 id) {
    if (counts) selectable += (x.x > NEG_INF) + (x.y > NEG_INF) + (x.z > NEG_INF) + (x.w > NEG_INF);
    float here = largest(x);
    if (here > most) most = here, at = id + (x.x == here ? 0 : x.y == here ? 1 : x.z == here ? 2 : 3);
  });
  u64 mine = token_code(most, at);
  return {mine, largest(mine, s.partial), counts ? u32(sum(selectable, s.partial)) : 0};
}

// Returns a bound that at least `rank` tokens reach and not many more: the rank-th largest of the maxima of parts of
// the row.
DEVICE u64 find_lower_bound(Shared& s, u64 mine, u32 rank) {
  const u32 width = rank <= MAX_WIDE_PART_RANK ? 4 : 1;
  for (u32 gap = 1; gap < width; gap *= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, gap));
  if (threadIdx.x % width == 0) s.codes[threadIdx.x / width] = mine;
  sort(s.codes, THREADS / width);
  return max(s.codes[rank - 1], 1ull);
}

// Lists the tokens with codes in [least, most] in s.codes, unordered, and returns their number, even if more than LIST.
// Calls also(logits) for every four tokens.
template <class F>
DEVICE u32 gather(Shared& s, const Row& row, u64 least, u64 most, F also) {
  __syncthreads();
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  const float floor = logit_of(least);
  auto list = [&](float x, u32 id) {
    u64 c = token_code(x, id);
    if (c < least || c > most) return;
    u32 at = atomicAdd(&s.size, 1u);
    if (at < LIST) s.codes[at] = c;
  };
  for_each_four<3>(row, [&](float4 x, u32 id) {
    also(x);
    if (largest(x) >= floor) list(x.x, id), list(x.y, id + 1), list(x.z, id + 2), list(x.w, id + 3);
  });
  __syncthreads();
  return s.size;
}

// Sorts the list and computes its prefix sums of mass. Returns the mass of the tokens with a logit of at least `floor`.
DEVICE u64 sort_and_sum(Shared& s, const Weights& weights, const List& list, float floor) {
  sort(s.codes, list.size);
  u64 mass[2], likely = 0;
  for (u32 j = 0, i = 2 * threadIdx.x; j < 2; j++, i++) {
    float x = i < list.size ? logit_of(s.codes[i]) : NEG_INF;
    mass[j] = i < list.size ? weights(x) : 0;
    if (x >= floor) likely += mass[j];
  }
  u64 before = list.mass_above + sum_before(mass[0] + mass[1], s.partial);
  s.sums[2 * threadIdx.x] = before + mass[0], s.sums[2 * threadIdx.x + 1] = before + mass[0] + mass[1];
  return sum(likely, s.partial);  // the barriers in sum() also publish s.sums
}

DEVICE void add_to_digit(Shared& s, u32 digit, u64 mass) {
  atomicAdd(&s.counts[digit], 1u);
  // Shared memory has no fast 64-bit atomic add: two 32-bit adds with a carry.
  u32* half = reinterpret_cast<u32*>(&s.sums[digit]);
  u32 low = u32(mass), old = atomicAdd(half, low), high = u32(mass >> 32) + (old + low < old);
  if (high) atomicAdd(half + 1, high);
}

// Finds the digit in which the prefix that reaches the target ends, given count and mass above all digits. Thread t has
// the digits 2047 - 2t and 2046 - 2t, so that the order of threads is the order of tokens.
DEVICE void find_digit(Shared& s, bool by_mass, u64 target, u64 above, u64 mass_above) {
  const u32 first = DIGITS - 1 - 2 * threadIdx.x;
  above += sum_before(s.counts[first] + s.counts[first - 1], s.partial);
  mass_above += sum_before(s.sums[first] + s.sums[first - 1], s.partial);
  for (u32 digit = first; digit + 2 > first; digit--) {
    u64 before = by_mass ? mass_above : above, here = by_mass ? s.sums[digit] : s.counts[digit];
    if (before < target && target <= before + here) s.found = {digit, s.counts[digit], above, mass_above};
    above += s.counts[digit], mass_above += s.sums[digit];
  }
  __syncthreads();
}

// Lists the tokens around the end of the prefix that reaches the target, by a radix search. Each pass over the row
// determines one more digit, until at most LIST / 2 tokens share the digits so far, at the latest when ten bits of the
// ids are left. If few tokens are above them, these are listed too, because shorter prefixes end there. All tokens
// together must reach the target.
DEVICE List radix_search(Shared& s, const Row& row, const Weights& weights, bool by_mass, u64 target) {
  Found found{0, 0, 0, 0};
  u64 prefix = 0;
  u32 shift = CODE_BITS;
#pragma unroll 1
  do {
    const u32 bits = shift > 30 ? 11 : 10, known = shift;  // 52 = 11 + 11 + 10 of the logit, 10 + 10 of the id
    shift -= bits;
    __syncthreads();
    for (u32 i = threadIdx.x; i < DIGITS; i += THREADS) s.counts[i] = 0, s.sums[i] = 0;
    if (threadIdx.x == 0) s.found = {0, 0, 0, 0};
    __syncthreads();
    auto count = [&](float x, u32 id) {
      u64 c = token_code(x, id);
      if (c && c >> known == prefix) add_to_digit(s, u32(c >> shift) & ((1u << bits) - 1), weights(x));
    };
    for_each_four<2>(row, [&](float4 x, u32 id) { count(x.x, id), count(x.y, id + 1), count(x.z, id + 2), count(x.w,
        id + 3); });
    __syncthreads();
    find_digit(s, by_mass, target, found.above, found.mass_above);
    found = s.found;
    prefix = prefix << bits | found.digit;
  } while (found.count > LIST / 2);
  u64 least = prefix << shift, most = least + ((1ull << shift) - 1);
  List list{0, found.above, found.mass_above};
  if (found.above <= LIST / 2) list.above = list.mass_above = 0, most = ~0ull;
  list.size = min(LIST, gather(s, row, max(least, 1ull), most, [](float4) {}));
  sort_and_sum(s, weights, list, 0.f);
  return list;
}

// Returns the end of the shortest prefix whose count or mass reaches the target.
DEVICE PrefixEnd find_prefix_end(Shared& s, const Row& row, const Weights& weights, List& list, bool by_mass,
                                 u64 target) {
  const u64 end = !list.size || list.size > LIST ? 0 : by_mass ? s.sums[list.size - 1] : list.above + list.size;
  const u64 start = by_mass ? list.mass_above : list.above;
  if (target <= start || target > end) list = radix_search(s, row, weights, by_mass, target);
  u32 at = by_mass ? 0 : u32(target - 1 - list.above);
  for (u32 step = by_mass ? LIST / 2 : 0; step; step /= 2)
    if (at + step <= list.size && s.sums[at + step - 1] < target) at += step;
  at = min(at, max(list.size, 1u) - 1);
  return {s.sums[at], id_of(s.codes[at])};
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// Returns 53 random bits that depend on seed and position only: the splitmix64 finaliser over both.
DEVICE u64 random_bits(i64 seed, int position) {
  u64 x = u64(seed) + u64(i64(position) + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) >> 11;
}

struct SamplingParams { u32 top_k; float top_p, floor; u64 random; };  // floor: the lowest logit that min-p keeps

DEVICE u32 draw(Shared& s, const Row& row, const RowScan& scan, const Weights& weights, const SamplingParams& params) {
  const u32 top_k = params.top_k < scan.selectable ? params.top_k : 0;
  // The list has all tokens that top-k keeps, so the others need no weights.
  bool weigh_listed_only = top_k && top_k <= MAX_BOUND_RANK;
  const u64 least =
      scan.selectable <= LIST ? 1 : find_lower_bound(s, scan.mine, weigh_listed_only ? top_k : MAX_BOUND_RANK);
  u64 kept = 0, likely = 0;
  List list{0, 0, 0};
#pragma unroll 1
  for (;; weigh_listed_only = false) {
    list.size = gather(s, row, least, ~0ull, [&](float4 x) {
      if (weigh_listed_only) return;
      u64 a = weights(x.x), b = weights(x.y), c = weights(x.z), d = weights(x.w), none = 0;
      kept += (a + b) + (c + d);
      if (params.floor <= NEG_INF) return;
      likely += (x.x >= params.floor ? a : none) + (x.y >= params.floor ? b : none);
      likely += (x.z >= params.floor ? c : none) + (x.w >= params.floor ? d : none);
    });
    if (!weigh_listed_only || list.size <= LIST) break;
  }
  kept = sum(kept, s.partial), likely = params.floor > NEG_INF ? sum(likely, s.partial) : kept;
  const u64 listed = list.size <= LIST ? sort_and_sum(s, weights, list, params.floor) : 0;
  if (weigh_listed_only) likely = listed;
  PrefixEnd prefix_end{0, 0};
#pragma unroll 1
  for (int step = 0; step < 3; step++) {
    u64 target = top_k;
    if ((step == 0 && !top_k) || (step == 1 && !(params.top_p < 1.f))) continue;
    if (step == 1) target = min(kept, max(1ull, u64(ceil(double(params.top_p) * double(kept)))));
    if (step == 2) {  // more than uniform * kept, which is random * kept / 2^53
      kept = min(kept, likely);
      target = (__umul64hi(kept, params.random) << 11 | kept * params.random >> 53) + 1;
    }
    prefix_end = find_prefix_end(s, row, weights, list, step > 0, target);
    kept = prefix_end.mass;
  }
  return prefix_end.id;
}

__global__ void __launch_bounds__(THREADS, 1)
sample(const float* logits, int stride, int n, const float* temperature, const int* top_k, const float* top_p,
       const float* min_p, const i64* seed, const int* position, i64* out) {
  __shared__ Shared s;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 r = blockIdx.x;
  const Row row{logits + i64(r) * stride, u32(n)};
  const float row_temperature = temperature[r];
  const RowScan scan = scan_row(s, row, row_temperature != 0.f);
  const float most = logit_of(scan.best);
  u32 id = id_of(scan.best);
  if (row_temperature != 0.f && most > NEG_INF && most < -NEG_INF) {
    const float floor = fminf(most, float(double(most) + double(row_temperature) * log(double(min_p[r]))));
    const SamplingParams params{u32(max(top_k[r], 0)), top_p[r], floor, random_bits(seed[r], position[r])};
    id = draw(s, row, scan, Weights(most, row_temperature), params);
  }
  if (threadIdx.x == 0) out[r] = id;
}

__global__ void __launch_bounds__(THREADS, 1)
log_probs(const float* logits, int stride, int n, const i64* ids, int top_n, float* chosen, i64* top_ids, float* top,
          i64* rank) {
  __shared__ Shared s;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 r = blockIdx.x, t = threadIdx.x, start = r * u32(top_n);
  const Row row{logits + i64(r) * stride, u32(n)};
  const RowScan scan = scan_row(s, row, true);
  const float most = logit_of(scan.best), chosen_logit = row.x[ids[r]];
  const Weights weights(most, 1.f);
  const u32 top_count = min(u32(top_n), scan.selectable);
  const u64 least = !top_count ? ~0ull : scan.selectable <= LIST ? 1 : find_lower_bound(s, scan.mine, top_count);
  u64 mass = 0, higher = 0;
  const u32 size = gather(s, row, least, ~0ull, [&](float4 x) {
    mass += (weights(x.x) + weights(x.y)) + (weights(x.z) + weights(x.w));
    higher += (x.x > chosen_logit) + (x.y > chosen_logit) + (x.z > chosen_logit) + (x.w > chosen_logit);
  });
  if (size > LIST) radix_search(s, row, weights, false, top_count);
  else sort(s.codes, size);
  mass = sum(mass, s.partial), higher = sum(higher, s.partial);
  const double total = double(most) + log(double(mass)) - ONE_BITS * 0.6931471805599453;
  for (u32 i = t; i < top_count; i += THREADS)
    top_ids[start + i] = id_of(s.codes[i]), top[start + i] = float(double(logit_of(s.codes[i])) - total);
  if (t > 0) return;
  chosen[r] = float(double(chosen_logit) - total);
  rank[r] = i64(higher) + 1;
  // Fewer tokens are selectable: fill with the first of the others.
  for (u32 i = top_count, id = 0; i < u32(top_n) && id < row.n; id++)
    if (!(row.x[id] > NEG_INF)) top_ids[start + i] = id, top[start + i++] = float(double(NEG_INF) - total);
}

// Sets logits[rows[i], t] to -inf wherever bit t of mask[i] is 0. CTA (x, i) has one token per thread.
__global__ void apply_bitmask(float* logits, int stride, int n, const int* mask, int words, const i64* rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 id = blockIdx.x * blockDim.x + threadIdx.x;
  if (id >= u32(n)) return;
  const u32 word = mask[i64(blockIdx.y) * words + id / 32];
  if (!(word >> id % 32 & 1)) logits[rows[blockIdx.y] * stride + id] = NEG_INF;
}

// Edits one logit per thread; a row of -1 is padding.
__global__ void edit_logits(float* logits, int stride, int count, const int* rows, const int* ids, const float* divide,
                            const float* add) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= u32(count) || rows[i] < 0) return;
  float* at = logits + i64(rows[i]) * stride + ids[i];
  *at = (*at > 0.f ? *at / divide[i] : __fmul_rn(*at, divide[i])) + add[i];  // not fused, to round as kernels/reference.py
}

// Applies penalties for the tokens that occurred. CTA (x, i): each thread has eight counts, one load; most of them are
// zero. penalties[i] is repetition, frequency, presence. Rounds after each operation, as kernels/reference.py.
__global__ void apply_penalties(float* logits, int stride, int n, const int* rows, const int* slots,
                                const float* penalties, const u16* counts, int width) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.y, first = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (first >= u32(n)) return;
  const uint4 eight = *reinterpret_cast<const uint4*>(counts + i64(slots[i]) * width + first);
  if (!(eight.x | eight.y | eight.z | eight.w)) return;
  const float repetition = penalties[3 * i], frequency = penalties[3 * i + 1], presence = penalties[3 * i + 2];
  const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
  float* row = logits + i64(rows[i]) * stride;
#pragma unroll
  for (u32 j = 0; j < 8; j++) {
    const u32 scan = pairs[j / 2] >> (j % 2 * 16) & 0xffffu, count = scan & 0x7fffu, id = first + j;
    if (!scan || id >= u32(n)) continue;
    const float x = row[id], scaled = x > 0.f ? x / repetition : __fmul_rn(x, repetition);
    row[id] = __fsub_rn(scaled, __fadd_rn(__fmul_rn(float(count), frequency), count ? presence : 0.f));
  }
}

// Increments counts[slots[i], tokens[rows[i]]], unless its 15 bits are full. One thread for each i.
__global__ void count_tokens(u16* counts, int width, int count, const int* slots, const int* rows, const i64* tokens) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= u32(count)) return;
  u16* at = counts + i64(slots[i]) * width + tokens[rows[i]];
  if ((*at & 0x7fffu) != 0x7fffu) *at = u16(*at + 1);
}
