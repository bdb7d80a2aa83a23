// Collectives of ranks that have mapped each other's device memory: sums, with the residual and the norm that follow them in
// a decoder layer, gathered and exchanged rows, broadcasts, and messages. barrier.cuh says how ranks wait for each other.
//
// Sums. They are computed in float32 in the order of the ranks and rounded once, for every element alike. So every rank gets
// the same bits, whichever kernel computes them:
// - reduce_one_shot: every rank reads the parts of all ranks and sums them. One barrier.
// - reduce_two_shot: rank r sums the r-th chunk of the elements, then all ranks read each other's sums. Two barriers, but a
//   rank reads twice the tensor instead of as many times as there are ranks.
//
// Pack i of a tensor, or of the part that one rank reads from another, belongs to CTA i / blockDim.x % gridDim.x on all ranks.
#include "common.cuh"
#include "peer_memory.cuh"
#include "barrier.cuh"

// Kernels have __launch_bounds__ with 1 CTA per multiprocessor, although more fit: otherwise the compiler saves registers and
// waits for the first loads of a sum before it starts the others.
template <class T> constexpr int PER_PACK = 16 / sizeof(T);

// A pack as elements, and as the word that is loaded and stored.
template <class T> union Pack {
  uint4 word;
  T elements[PER_PACK<T>];
  DEVICE Pack() : word(make_uint4(0, 0, 0, 0)) {}
  DEVICE explicit Pack(uint4 word) : word(word) {}
};

// Loads pack i of a tensor of `count` elements. Missing elements are 0.
template <class T> DEVICE Pack<T> load_pack(const T* x, int i, int count) {
  const int first = i * PER_PACK<T>;
  if (first + PER_PACK<T> <= count) return Pack<T>(load_unit(reinterpret_cast<const uint4*>(x) + i));
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < PER_PACK<T>; j++)
    if (first + j < count) pack.elements[j] = load_unit(x + first + j);
  return pack;
}
template <class T> DEVICE void store_pack(T* x, int i, int count, const Pack<T>& pack) {
  const int first = i * PER_PACK<T>;
  if (first + PER_PACK<T> <= count) {
    reinterpret_cast<uint4*>(x)[i] = pack.word;
    return;
  }
#pragma unroll
  for (int j = 0; j < PER_PACK<T>; j++)
    if (first + j < count) x[first + j] = pack.elements[j];
}

// The slots of up to MOST ranks. If there are fewer ranks, the last one is repeated: loads without conditions are all under
// way before the first arrives, and a load from another GPU takes a microsecond.
template <int MOST> struct Slots {
  const uint4* at[MOST];
  int size;
  DEVICE Slots(const Group& group, u64 call) : size(group.size) {
#pragma unroll
    for (int rank = 0; rank < MOST; rank++)
      at[rank] = reinterpret_cast<const uint4*>(slot_of(group, min(rank, group.size - 1), call));
  }
};

// Returns the sum of pack i of the slots of all ranks.
template <class T, int MOST> DEVICE Pack<T> sum_packs(const Slots<MOST>& slots, int i) {
  Pack<T> parts[MOST];
#pragma unroll
  for (int rank = 0; rank < MOST; rank++) parts[rank].word = load_unit(slots.at[rank] + i);
  Pack<T> sum;
#pragma unroll
  for (int j = 0; j < PER_PACK<T>; j++) {
    float total = to_float(parts[0].elements[j]);
#pragma unroll
    for (int rank = 1; rank < MOST; rank++) {
      const float more = total + to_float(parts[rank].elements[j]);
      total = rank < slots.size ? more : total;
    }
    round_to(sum.elements[j], total);
  }
  return sum;
}

template <class T> DEVICE Pack<T> add_packs(const Pack<T>& a, const Pack<T>& b) {
  Pack<T> sum;
#pragma unroll
  for (int j = 0; j < PER_PACK<T>; j++) round_to(sum.elements[j], to_float(a.elements[j]) + to_float(b.elements[j]));
  return sum;
}

// Stores pack i of a sum, or adds it to `residual` and stores that. `out` may be `residual`.
template <class T> DEVICE void finish_pack(const Pack<T>& sum, const T* residual, T* out, int i, int count) {
  store_pack(out, i, count, residual ? add_packs(load_pack(residual, i, count), sum) : sum);
}

template <class T> DEVICE int count_packs(int count) { return (count + PER_PACK<T> - 1) / PER_PACK<T>; }

// x, residual, out: [count], aligned to 16 bytes. `residual` may be null. `out` may be x or `residual`. MOST: ranks, at most.
template <class T, int MOST>
__global__ void __launch_bounds__(512, 1)
    reduce_one_shot(const __grid_constant__ Group group, const T* x, const T* residual, T* out, int count, u32 signature) {
  const int packs = count_packs<T>(count), first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  const u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  uint4* const slot = reinterpret_cast<uint4*>(slot_of(group, group.rank, call));
  for (int i = first; i < packs; i += step) slot[i] = load_pack(x, i, count).word;
  if (!pass_barrier(group, call, 0, signature)) return;
  const Slots<MOST> slots(group, call);
  for (int i = first; i < packs; i += step) finish_pack(sum_packs<T>(slots, i), residual, out, i, count);
  store_number(header_of(group, group.rank)->calls, call);
}

template <class T, int MOST>
__global__ void __launch_bounds__(512, 1)
    reduce_two_shot(const __grid_constant__ Group group, const T* x, const T* residual, T* out, int count, u32 signature) {
  const int packs = count_packs<T>(count), first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const int chunk = (packs + group.size - 1) / group.size;  // packs of a rank
  begin_kernel(group);
  const u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  uint4* const slot = reinterpret_cast<uint4*>(slot_of(group, group.rank, call));
  for (int rank = 0; rank < group.size; rank++)
    for (int i = first; i < chunk; i += step)
      if (const int at = rank * chunk + i; at < packs) slot[at] = load_pack(x, at, count).word;
  if (!pass_barrier(group, call, 0, signature)) return;
  // No other rank reads this rank's part of its own chunk, so the sum can replace it.
  const Slots<MOST> slots(group, call);
  for (int i = first; i < chunk; i += step)
    if (const int at = group.rank * chunk + i; at < packs) slot[at] = sum_packs<T>(slots, at).word;
  if (!pass_barrier(group, call, 1, signature)) return;
  for (int offset = 0; offset < group.size; offset++) {
    const int rank = (group.rank + offset) % group.size;  // ranks read from different ranks at the same time
    const uint4* const sums = reinterpret_cast<const uint4*>(slot_of(group, rank, call));
    for (int i = first; i < chunk; i += step)
      if (const int at = rank * chunk + i; at < packs)
        finish_pack(Pack<T>(load_unit(sums + at)), residual, out, at, count);
  }
  store_number(header_of(group, group.rank)->calls, call);
}

// Returns the sum of the lanes' values, by lanes whose numbers differ in the highest bit first.
DEVICE float sum_lanes(float value, int lanes) {
  for (int distance = lanes / 2; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

// x += the sum of `partial`, and normed = RMS norm of x. partial, x, normed: [rows, columns]; columns are a multiple of 16.
//
// The bits are those of reduce_one_shot, and of the norm in triton/norm.py: it adds squares in the same order. A thread has the
// same packs there: CHUNKS packs, which are blockDim.x packs apart. Its first two squares are added in reverse.
template <class T, int CHUNKS, int MOST>
__global__ void __launch_bounds__(512, 1)
    reduce_add_norm(const __grid_constant__ Group group, const T* partial, T* x, const float* weight, float eps, T* normed,
                    int rows, int columns, u32 signature) {
  constexpr int PER = PER_PACK<T>;
  __shared__ float warp_sums[2][16];
  const int packs = columns / PER, warps = blockDim.x / 32, count = rows * columns;
  begin_kernel(group);
  const u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  uint4* const slot = reinterpret_cast<uint4*>(slot_of(group, group.rank, call));
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    for (int i = row * packs + threadIdx.x; i < (row + 1) * packs; i += blockDim.x) slot[i] = load_pack(partial, i, count).word;
  if (!pass_barrier(group, call, 0, signature)) return;
  const Slots<MOST> slots(group, call);
  int turn = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    Pack<T> values[CHUNKS];
    float size = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      if (const int i = threadIdx.x + chunk * blockDim.x; i < packs)
        values[chunk] = add_packs(load_pack(x, row * packs + i, count), sum_packs<T>(slots, row * packs + i));
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      if (const int i = threadIdx.x + chunk * blockDim.x; i < packs) store_pack(x, row * packs + i, count, values[chunk]);
#pragma unroll
      for (int j = 0; j < PER; j++) {
        const float value = to_float(values[chunk].elements[chunk == 0 && j < 2 ? 1 - j : j]);
        size = __fmaf_rn(value, value, size);
      }
    }
    size = sum_lanes(size, 32);
    if (warps > 1) {
      if (threadIdx.x % 32 == 0) warp_sums[turn][threadIdx.x / 32] = size;
      __syncthreads();
      size = sum_lanes(warp_sums[turn][threadIdx.x % warps], warps);
    }
    const float factor = rsqrt_fast(divide_fast(size, float(columns)) + eps);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const int i = threadIdx.x + chunk * blockDim.x;
      if (i >= packs) continue;
      Pack<T> result;
#pragma unroll
      for (int j = 0; j < PER; j++) {
        T unit;
        round_to(unit, to_float(values[chunk].elements[j]) * factor);
        round_to(result.elements[j], to_float(unit) * weight[i * PER + j]);
      }
      store_pack(normed, row * packs + i, count, result);
    }
  }
  store_number(header_of(group, group.rank)->calls, call);
}

// out[row] = the rows of all ranks' x, in order. x: [rows, width], out: [rows, ranks, width], of Units of memory.
template <class Unit>
__global__ void __launch_bounds__(512, 1)
    gather_rows(const __grid_constant__ Group group, const Unit* x, Unit* out, int rows, int width, u32 signature) {
  const int count = rows * width, first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  const u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  Unit* const slot = reinterpret_cast<Unit*>(slot_of(group, group.rank, call));
  for (int i = first; i < count; i += step) slot[i] = load_unit(x + i);
  if (!pass_barrier(group, call, 0, signature)) return;
  for (int offset = 0; offset < group.size; offset++) {
    const int rank = (group.rank + offset) % group.size;
    const Unit* const from = reinterpret_cast<const Unit*>(slot_of(group, rank, call));
    for (int i = first; i < count; i += step)
      out[(i64(i / width) * group.size + rank) * width + i % width] = load_unit(from + i);
  }
  store_number(header_of(group, group.rank)->calls, call);
}

// x of `source` replaces x of the other ranks. x: `count` bytes, aligned to 16.
__global__ void __launch_bounds__(512, 1)
    broadcast(const __grid_constant__ Group group, u8* x, int count, int source, u32 signature) {
  const int packs = count_packs<u8>(count), first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  const u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  uint4* const slot = reinterpret_cast<uint4*>(slot_of(group, source, call));
  if (group.rank == source)
    for (int i = first; i < packs; i += step) slot[i] = load_pack(x, i, count).word;
  if (!pass_barrier(group, call, 0, signature)) return;
  if (group.rank != source)
    for (int i = first; i < packs; i += step) store_pack(x, i, count, Pack<u8>(load_unit(slot + i)));
  store_number(header_of(group, group.rank)->calls, call);
}

struct Counts {  // of Units, by rank
  int sent[MAX_RANKS], received[MAX_RANKS];
};

// Sends the first counts.sent[0] Units of x to rank 0, and so on; `out` is what was received from rank 0, then rank 1, ...
// Each slot has an area for each rank. If a part is larger, all ranks exchange areas in several rounds, each a call.
template <class Unit>
__global__ void __launch_bounds__(512, 1)
    exchange_parts(const __grid_constant__ Group group, const Unit* x, Unit* out, const __grid_constant__ Counts counts,
                   u32 signature) {
  const int area = int(group.slot_bytes / group.size / 16 * (16 / sizeof(Unit)));
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  u64 call = next_number(header_of(group, group.rank)->calls);
  if (has_given_up(call)) return;
  int longest = 1;
  for (int rank = 0; rank < group.size; rank++) longest = max(longest, counts.sent[rank]);
  u64 rounds = (longest + area - 1) / area;
  if (threadIdx.x < group.size)
    store_relaxed(&header_of(group, threadIdx.x)->rounds[call & 1][group.rank], rounds);
  const u64 parity = call & 1;
  for (u64 round = 0; round < rounds; round++, call++) {
    const int begin = int(round) * area;
    Unit* const slot = reinterpret_cast<Unit*>(slot_of(group, group.rank, call));
    for (int rank = 0, start = 0; rank < group.size; start += counts.sent[rank++])
      for (int i = first; i < area && begin + i < counts.sent[rank]; i += step)
        slot[i64(rank) * area + i] = load_unit(x + start + begin + i);
    if (!pass_barrier(group, call, 0, signature)) return;
    if (round == 0)
      for (int rank = 0; rank < group.size; rank++)
        rounds = max(rounds, load_relaxed(&header_of(group, group.rank)->rounds[parity][rank]));
    for (int rank = 0, start = 0; rank < group.size; start += counts.received[rank++]) {
      const Unit* const from = reinterpret_cast<const Unit*>(slot_of(group, rank, call)) + i64(group.rank) * area;
      for (int i = first; i < area && begin + i < counts.received[rank]; i += step)
        out[start + begin + i] = load_unit(from + i);
    }
  }
  store_number(header_of(group, group.rank)->calls, call - 1);
}

// Writes x, `count` bytes, into the inbox of rank `to`, which has two places: the message before the last must have been taken.
__global__ void __launch_bounds__(512, 1)
    send_message(const __grid_constant__ Group group, const u8* x, int count, int to, u32 signature) {
  const int packs = count_packs<u8>(count), first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  Header* const own = header_of(group, group.rank);
  const u64 message = next_number(own->sent[to]);
  if (has_given_up(message)) return;
  bool is_free = true;
  for (int block = threadIdx.x; message > 2 && block < MAX_BLOCKS; block += blockDim.x)
    is_free = is_free && wait_for<AT_LEAST>(group, &own->taken[to][block], message - 2, to);
  if (!__syncthreads_and(is_free)) return store_number(own->sent[to], GAVE_UP);
  uint4* const inbox =
      reinterpret_cast<uint4*>(group.buffers[to] + group.peer_inboxes[to] + (message & 1) * group.message_bytes);
  for (int i = first; i < packs; i += step) inbox[i] = load_pack(x, i, count).word;
  __syncthreads();
  if (threadIdx.x == 0)
    store_release(&header_of(group, to)->arrived[group.rank][message & 1][blockIdx.x], message << SIGNATURE_BITS | signature);
  store_number(own->sent[to], message);
}

__global__ void __launch_bounds__(512, 1)
    receive_message(const __grid_constant__ Group group, u8* x, int count, int source, u32 signature) {
  const int packs = count_packs<u8>(count), first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  begin_kernel(group);
  Header* const own = header_of(group, group.rank);
  const u64 message = next_number(own->received[source]);
  if (has_given_up(message)) return;
  const u64 value = message << SIGNATURE_BITS | signature;
  bool is_here = true;
  if (threadIdx.x == 0) is_here = wait_for<EXACTLY>(group, &own->arrived[source][message & 1][blockIdx.x], value, source);
  if (!__syncthreads_and(is_here)) return store_number(own->received[source], GAVE_UP);
  const uint4* const inbox = reinterpret_cast<const uint4*>(group.buffers[group.rank] + group.own_inboxes[source] +
                                                            (message & 1) * group.message_bytes);
  for (int i = first; i < packs; i += step) store_pack(x, i, count, Pack<u8>(load_unit(inbox + i)));
  __syncthreads();
  for (int block = blockIdx.x + threadIdx.x * gridDim.x; block < MAX_BLOCKS; block += blockDim.x * gridDim.x)
    store_release(&header_of(group, source)->taken[group.rank][block], message);
  store_number(own->received[source], message);
}
