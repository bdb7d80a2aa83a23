// Logits to tokens and log-probabilities: one CTA a row, nothing sorted but a short list of the likeliest tokens.
// A token's place is one number, its code: the logit's bits in order, then the id inverted. Codes are distinct, and a
// larger one is more probable, or as probable with a lower id. Logits of -inf and NaN have the code 0: never chosen.
// A token weighs exp((logit - most) / temperature) in integers, the likeliest 2^44. Integers add up to the same in any
// order, so a row's answer is the same to the bit in any batch and any run. What is lost: a fraction of 2^-21 of each
// weight, and what is below 2^-44 of the likeliest, so at most 2^-24 of that one for 2^20 tokens together.
// top-k, top-p and the draw each ask for the shortest prefix of the order that reaches a count or a mass. The prefix of
// a smaller mass lies inside that of a larger one, so a step needs no more than the mass that the one before it kept.
#include "common.cuh"

constexpr u32 THREADS = 1024, WARPS = THREADS / 32;
constexpr u32 LIST = 2048;    // tokens listed and sorted at once
constexpr u32 DIGITS = 2048;  // of the 11 bits that a level of the search looks at
constexpr u32 FEW = 64;       // a rank this low is found among 256 cells as well as among 1024
constexpr u32 MANY = 832;     // about 1700 tokens reach the best of so many cells: 1024 ln(1024 / (1024 - 832))
constexpr u32 ID_BITS = 20, CODE_BITS = 32 + ID_BITS, ID_MASK = (1u << ID_BITS) - 1;
constexpr u32 LOWEST = 0x00800000u;  // the key of the lowest finite float
constexpr u32 ONE_BITS = 44;
#define NEVER __int_as_float(0xff800000)  // -inf
static_assert(2 * THREADS == LIST && 2 * THREADS == DIGITS && WARPS == 32, "each thread owns two of each");

// -- tokens -----------------------------------------------------------------------------------------------------------

struct Row { const float* x; u32 n; };

DEVICE u64 code(float x, u32 id) {
  if (!(x > NEVER)) return 0;
  u32 bits = __float_as_uint(x + 0.f), key = bits ^ (bits >> 31 ? ALL : 0x80000000u);  // -0 becomes 0
  return u64(key) << ID_BITS | (ID_MASK - id);
}
DEVICE u32 id_of(u64 code) { return code ? ID_MASK - (u32(code) & ID_MASK) : 0; }
DEVICE float logit_of(u64 code) {  // also of a bound that is no token's: what lies below every float counts as -inf
  u32 key = u32(code >> ID_BITS);
  return key < LOWEST ? NEVER : __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Weights {
  float most, high, low, floor;  // high + low is log2(e) / temperature; what lies `floor` below the most weighs nothing

  DEVICE Weights(float most, float temperature) : most(most) {
    double scale = fmin(fmax(1.4426950408889634 / double(temperature), 1e-30), 1e38);  // all that follows is finite
    high = float(scale), low = float(scale - double(high)), floor = -float(ONE_BITS + 1) / high;
  }
  DEVICE u64 operator()(float x) const {
    float d = fmaxf(x - most, floor), y = __fmul_rn(d, high);  // rounded here, whatever follows: `error` is the loss
    float error = fmaf(d, high, -y) + d * low;
    float shifted = y + 12582912.f, whole = shifted - 12582912.f;  // 1.5 * 2^23: its low bits are the whole part
    u32 part = __float_as_uint(power_of_two((y - whole) + error) + 2.f) - 0x40000000u;  // in units of 2^-22
    return u64(part) << 40 >> (0x4b400000 + 62 - int(ONE_BITS) - __float_as_int(shifted));  // by 63 at the floor: 0
  }
};

// f(logits, id) of every four tokens from id on, ascending within a thread. A row may begin and end anywhere: there f
// gets one token and three of -inf. A thread's next FLIGHT pieces are on their way while f sees these.
template <u32 FLIGHT, class F>
DEVICE void each(const Row& row, F f) {
  const u32 t = threadIdx.x, misplaced = u32(reinterpret_cast<u64>(row.x) >> 2) & 3;
  const u32 head = min(row.n, (4 - misplaced) & 3), pieces = (row.n - head) / 4, last = head + 4 * pieces + t;
  const float4* body = reinterpret_cast<const float4*>(row.x + head);
  float4 these[FLIGHT], next[FLIGHT];
  auto load = [&](float4(&to)[FLIGHT], u32 start) {
#pragma unroll
    for (u32 j = 0; j < FLIGHT; j++)
      if (start + j * THREADS < pieces) to[j] = body[start + j * THREADS];
  };
  load(these, t);
  if (t < head) f(make_float4(row.x[t], NEVER, NEVER, NEVER), t);
#pragma unroll 1
  for (u32 start = t; start < pieces; start += THREADS * FLIGHT) {
    load(next, start + THREADS * FLIGHT);
#pragma unroll
    for (u32 j = 0; j < FLIGHT; j++) {
      if (start + j * THREADS < pieces) f(these[j], head + 4 * (start + j * THREADS));
      these[j] = next[j];
    }
  }
  if (last < row.n) f(make_float4(row.x[last], NEVER, NEVER, NEVER), last);
}
DEVICE float largest(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

// -- the CTA together -------------------------------------------------------------------------------------------------

template <class F>
DEVICE u64 reduce(u64 x, u64* partial, F combine) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 gap = 16; gap; gap /= 2) x = combine(x, __shfl_xor_sync(ALL, x, gap));
  __syncthreads();  // `partial` may still be read
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = partial[lane];
  for (u32 gap = 16; gap; gap /= 2) x = combine(x, __shfl_xor_sync(ALL, x, gap));
  return x;
}
DEVICE u64 sum(u64 x, u64* partial) { return reduce(x, partial, [](u64 a, u64 b) { return a + b; }); }
DEVICE u64 largest(u64 x, u64* partial) { return reduce(x, partial, [](u64 a, u64 b) { return max(a, b); }); }

// The sum over the threads before this one.
DEVICE u64 sum_before(u64 x, u64* partial) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 up_to = x;
  for (u32 gap = 1; gap < 32; gap *= 2) {
    u64 other = __shfl_up_sync(ALL, up_to, gap);
    if (lane >= gap) up_to += other;
  }
  __syncthreads();  // `partial` may still be read
  if (lane == 31) partial[warp] = up_to;
  __syncthreads();
  u64 before = lane < warp ? partial[lane] : 0;
  for (u32 gap = 16; gap; gap /= 2) before += __shfl_xor_sync(ALL, before, gap);
  return before + up_to - x;
}

// codes[0, size) in descending order, by a bitonic network: size <= LIST. Gaps up to 32 stay within a warp's 64 codes.
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
  u64 codes[LIST];     // the listed tokens
  u64 sums[LIST];      // the mass up to and including each, in the order; while narrowing, the mass of each digit
  u32 counts[DIGITS];  // the tokens of each digit
  u64 partial[WARPS];
  Found found;
  u32 size;
};

struct Survey { u64 mine, best; u32 live; };  // the largest code of a thread, of the row; tokens that can be chosen
struct List { u32 size; u64 above, mass_above; };  // all tokens of a range of codes, sorted; what lies above the range
struct Place { u64 mass; u32 id; };                // where a prefix ends: its mass, its last token

DEVICE Survey survey(Shared& s, const Row& row, bool counts) {
  float most = NEVER;
  u32 at = 0, live = 0;
  each<4>(row, [&](float4 x, u32 id) {
    if (counts) live += (x.x > NEVER) + (x.y > NEVER) + (x.z > NEVER) + (x.w > NEVER);
    float here = largest(x);
    if (here > most) most = here, at = id + (x.x == here ? 0 : x.y == here ? 1 : x.z == here ? 2 : 3);
  });
  u64 mine = code(most, at);
  return {mine, largest(mine, s.partial), counts ? u32(sum(live, s.partial)) : 0};
}

// A bound that at least `rank` tokens reach and not many more: the rank-th of the largest codes of parts of the row.
DEVICE u64 bound(Shared& s, u64 mine, u32 rank) {
  const u32 width = rank <= FEW ? 4 : 1;
  for (u32 gap = 1; gap < width; gap *= 2) mine = max(mine, __shfl_xor_sync(ALL, mine, gap));
  if (threadIdx.x % width == 0) s.codes[threadIdx.x / width] = mine;
  sort(s.codes, THREADS / width);
  return max(s.codes[rank - 1], 1ull);
}

// Puts the tokens with codes in [least, most] in s.codes, unordered, and returns how many there are, even if more than
// LIST; calls also(logits) for every four tokens.
template <class F>
DEVICE u32 gather(Shared& s, const Row& row, u64 least, u64 most, F also) {
  __syncthreads();
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  const float floor = logit_of(least);
  auto list = [&](float x, u32 id) {
    u64 c = code(x, id);
    if (c < least || c > most) return;
    u32 at = atomicAdd(&s.size, 1u);
    if (at < LIST) s.codes[at] = c;
  };
  each<3>(row, [&](float4 x, u32 id) {
    also(x);
    if (largest(x) >= floor) list(x.x, id), list(x.y, id + 1), list(x.z, id + 2), list(x.w, id + 3);
  });
  __syncthreads();
  return s.size;
}

// Sorts the list and sums its masses up. Returns the mass of those with a logit of at least `floor`.
DEVICE u64 settle(Shared& s, const Weights& weights, const List& list, float floor) {
  sort(s.codes, list.size);
  u64 mass[2], likely = 0;
  for (u32 j = 0, i = 2 * threadIdx.x; j < 2; j++, i++) {
    float x = i < list.size ? logit_of(s.codes[i]) : NEVER;
    mass[j] = i < list.size ? weights(x) : 0;
    if (x >= floor) likely += mass[j];
  }
  u64 before = list.mass_above + sum_before(mass[0] + mass[1], s.partial);
  s.sums[2 * threadIdx.x] = before + mass[0], s.sums[2 * threadIdx.x + 1] = before + mass[0] + mass[1];
  return sum(likely, s.partial);  // its barriers also publish the sums
}

DEVICE void count_in(Shared& s, u32 digit, u64 mass) {
  atomicAdd(&s.counts[digit], 1u);
  u32* half = reinterpret_cast<u32*>(&s.sums[digit]);  // shared memory has no 64-bit atomic add: carry by hand
  u32 low = u32(mass), old = atomicAdd(half, low), high = u32(mass >> 32) + (old + low < old);
  if (high) atomicAdd(half + 1, high);
}

// The digit in which the prefix that reaches the target ends, given what lies above all digits. Thread t has the digits
// 2047 - 2t and the one below: the order of the threads is the order of the tokens.
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

// Lists the tokens around the end of the prefix that reaches the target, which all tokens together do: digit by digit,
// a pass over the row each, until at most half a list share the digits so far, at the latest when ten bits of the ids
// are left. If few lie above them, these are listed too: shorter prefixes end there.
DEVICE List narrow(Shared& s, const Row& row, const Weights& weights, bool by_mass, u64 target) {
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
      u64 c = code(x, id);
      if (c && c >> known == prefix) count_in(s, u32(c >> shift) & ((1u << bits) - 1), weights(x));
    };
    each<2>(row, [&](float4 x, u32 id) { count(x.x, id), count(x.y, id + 1), count(x.z, id + 2), count(x.w, id + 3); });
    __syncthreads();
    find_digit(s, by_mass, target, found.above, found.mass_above);
    found = s.found;
    prefix = prefix << bits | found.digit;
  } while (found.count > LIST / 2);
  u64 least = prefix << shift, most = least + ((1ull << shift) - 1);
  List list{0, found.above, found.mass_above};
  if (found.above <= LIST / 2) list.above = list.mass_above = 0, most = ~0ull;
  list.size = min(LIST, gather(s, row, max(least, 1ull), most, [](float4) {}));
  settle(s, weights, list, 0.f);
  return list;
}

// The shortest prefix of the order whose count or mass reaches the target.
DEVICE Place resolve(Shared& s, const Row& row, const Weights& weights, List& list, bool by_mass, u64 target) {
  const u64 end = !list.size || list.size > LIST ? 0 : by_mass ? s.sums[list.size - 1] : list.above + list.size;
  const u64 start = by_mass ? list.mass_above : list.above;
  if (target <= start || target > end) list = narrow(s, row, weights, by_mass, target);
  u32 at = by_mass ? 0 : u32(target - 1 - list.above);
  for (u32 step = by_mass ? LIST / 2 : 0; step; step /= 2)
    if (at + step <= list.size && s.sums[at + step - 1] < target) at += step;
  at = min(at, max(list.size, 1u) - 1);
  return {s.sums[at], id_of(s.codes[at])};
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// 53 random bits that depend on nothing but the two: the splitmix64 finaliser over both.
DEVICE u64 random_bits(i64 seed, int position) {
  u64 x = u64(seed) + u64(i64(position) + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) >> 11;
}

struct Choice { u32 top_k; float top_p, floor; u64 random; };  // floor: the least logit that min-p keeps

DEVICE u32 draw(Shared& s, const Row& row, const Survey& seen, const Weights& weights, const Choice& choice) {
  const u32 top_k = choice.top_k < seen.live ? choice.top_k : 0;
  bool light = top_k && top_k <= MANY;  // the list has all that top-k keeps: the rest need not be weighed
  const u64 least = seen.live <= LIST ? 1 : bound(s, seen.mine, light ? top_k : MANY);
  u64 kept = 0, likely = 0;
  List list{0, 0, 0};
#pragma unroll 1
  for (;; light = false) {
    list.size = gather(s, row, least, ~0ull, [&](float4 x) {
      if (light) return;
      u64 a = weights(x.x), b = weights(x.y), c = weights(x.z), d = weights(x.w), none = 0;
      kept += (a + b) + (c + d);
      if (choice.floor <= NEVER) return;
      likely += (x.x >= choice.floor ? a : none) + (x.y >= choice.floor ? b : none);
      likely += (x.z >= choice.floor ? c : none) + (x.w >= choice.floor ? d : none);
    });
    if (!light || list.size <= LIST) break;
  }
  kept = sum(kept, s.partial), likely = choice.floor > NEVER ? sum(likely, s.partial) : kept;
  const u64 listed = list.size <= LIST ? settle(s, weights, list, choice.floor) : 0;
  if (light) likely = listed;
  Place place{0, 0};
#pragma unroll 1
  for (int step = 0; step < 3; step++) {
    u64 target = top_k;
    if ((step == 0 && !top_k) || (step == 1 && !(choice.top_p < 1.f))) continue;
    if (step == 1) target = min(kept, max(1ull, u64(ceil(double(choice.top_p) * double(kept)))));
    if (step == 2) {  // more than uniform * kept, which is random * kept / 2^53
      kept = min(kept, likely);
      target = (__umul64hi(kept, choice.random) << 11 | kept * choice.random >> 53) + 1;
    }
    place = resolve(s, row, weights, list, step > 0, target);
    kept = place.mass;
  }
  return place.id;
}

__global__ void __launch_bounds__(THREADS, 1)
sample(const float* logits, int stride, int n, const float* temperature, const int* top_k, const float* top_p,
       const float* min_p, const i64* seed, const int* position, i64* out) {
  __shared__ Shared s;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 r = blockIdx.x;
  const Row row{logits + i64(r) * stride, u32(n)};
  const float heat = temperature[r];
  const Survey seen = survey(s, row, heat != 0.f);
  const float most = logit_of(seen.best);
  u32 id = id_of(seen.best);
  if (heat != 0.f && most > NEVER && most < -NEVER) {
    const float floor = fminf(most, float(double(most) + double(heat) * log(double(min_p[r]))));
    const Choice choice{u32(max(top_k[r], 0)), top_p[r], floor, random_bits(seed[r], position[r])};
    id = draw(s, row, seen, Weights(most, heat), choice);
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
  const Survey seen = survey(s, row, true);
  const float most = logit_of(seen.best), picked = row.x[ids[r]];
  const Weights weights(most, 1.f);
  const u32 wanted = min(u32(top_n), seen.live);
  const u64 least = !wanted ? ~0ull : seen.live <= LIST ? 1 : bound(s, seen.mine, wanted);
  u64 mass = 0, higher = 0;
  const u32 size = gather(s, row, least, ~0ull, [&](float4 x) {
    mass += (weights(x.x) + weights(x.y)) + (weights(x.z) + weights(x.w));
    higher += (x.x > picked) + (x.y > picked) + (x.z > picked) + (x.w > picked);
  });
  if (size > LIST) narrow(s, row, weights, false, wanted);
  else sort(s.codes, size);
  mass = sum(mass, s.partial), higher = sum(higher, s.partial);
  const double total = double(most) + log(double(mass)) - ONE_BITS * 0.6931471805599453;
  for (u32 i = t; i < wanted; i += THREADS)
    top_ids[start + i] = id_of(s.codes[i]), top[start + i] = float(double(logit_of(s.codes[i])) - total);
  if (t > 0) return;
  chosen[r] = float(double(picked) - total);
  rank[r] = i64(higher) + 1;
  for (u32 i = wanted, id = 0; i < u32(top_n) && id < row.n; id++)  // fewer can be chosen: then the first of the others
    if (!(row.x[id] > NEVER)) top_ids[start + i] = id, top[start + i++] = float(double(NEVER) - total);
}

// logits[rows[i], t] becomes -inf wherever bit t of mask[i] is 0. Block (x, i): as many tokens as it has threads.
__global__ void apply_bitmask(float* logits, int stride, int n, const int* mask, int words, const i64* rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 id = blockIdx.x * blockDim.x + threadIdx.x;
  if (id >= u32(n)) return;
  const u32 word = mask[i64(blockIdx.y) * words + id / 32];
  if (!(word >> id % 32 & 1)) logits[rows[blockIdx.y] * stride + id] = NEVER;
}

// One logit a thread; a row of -1 is padding.
__global__ void edit(float* logits, int stride, int count, const int* rows, const int* ids, const float* divide,
                     const float* add) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= u32(count) || rows[i] < 0) return;
  float* at = logits + i64(rows[i]) * stride + ids[i];
  *at = (*at > 0.f ? *at / divide[i] : __fmul_rn(*at, divide[i])) + add[i];  // not fused: as the definition rounds
}

// Penalties of the tokens that occurred. Block (x, i): eight counts a thread, which is one load; most of them are zero.
// settings[i] is repetition, frequency, presence. Rounded after each operation, as the definition rounds.
__global__ void penalise(float* logits, int stride, int n, const int* rows, const int* slots, const float* settings,
                         const u16* counts, int width) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.y, first = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (first >= u32(n)) return;
  const uint4 eight = *reinterpret_cast<const uint4*>(counts + i64(slots[i]) * width + first);
  if (!(eight.x | eight.y | eight.z | eight.w)) return;
  const float repetition = settings[3 * i], frequency = settings[3 * i + 1], presence = settings[3 * i + 2];
  const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
  float* row = logits + i64(rows[i]) * stride;
#pragma unroll
  for (u32 j = 0; j < 8; j++) {
    const u32 seen = pairs[j / 2] >> (j % 2 * 16) & 0xffffu, count = seen & 0x7fffu, id = first + j;
    if (!seen || id >= u32(n)) continue;
    const float x = row[id], scaled = x > 0.f ? x / repetition : __fmul_rn(x, repetition);
    row[id] = __fsub_rn(scaled, __fadd_rn(__fmul_rn(float(count), frequency), count ? presence : 0.f));
  }
}

// counts[slots[i], tokens[rows[i]]] goes up by one, unless its 15 bits are full. One thread each.
__global__ void count_tokens(u16* counts, int width, int count, const int* slots, const int* rows, const i64* tokens) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= u32(count)) return;
  u16* at = counts + i64(slots[i]) * width + tokens[rows[i]];
  if ((*at & 0x7fffu) != 0x7fffu) *at = u16(*at + 1);
}
