// How the kernels of the ranks of a group wait for each other. Include after peer_memory.cuh.
//
// Every rank has a buffer in its device memory, which all ranks have mapped. It begins with a Header. CTA b of a rank waits
// only for CTA b of the others, so all ranks launch the same grid and divide elements among CTAs in the same way.
//
// Calls are numbered from 1. Their number is in device memory, because a replayed graph cannot change arguments. Call n uses
// slot n % 2 of the data and flags n % 2. That makes one barrier per call enough: a rank starts call n + 2, which
// overwrites what the others read in call n, after it met all others in call n + 1, and they came there after call n.
//
// A flag holds the number of the call and a signature of the call. A rank gives up if it finds another signature, waits too
// long, or is asked to stop by its host. It reports that in host memory and tells the other ranks, which give up too. From then
// on, no kernel of the group waits. Later kernels of a rank that gave up do nothing: they would repeat the number of the call in
// which it did, and a rank that comes late to that call would read their data.
#pragma once

constexpr int MAX_RANKS = 8, MAX_BLOCKS = 32;
constexpr int POLLS_BETWEEN_CHECKS = 64;  // of the clock and the host's request to stop
constexpr int SIGNATURE_BITS = 16;        // of a flag; the number of the call is above them
constexpr u64 GAVE_UP = 1ull << 40;       // replaces the number of the last call, or message, of a rank that gave up
enum Failure : u64 { TIMED_OUT = 1, OTHER_CALL = 2, STOPPED = 3, ANOTHER_GAVE_UP = 4 };

struct Header {
  u64 calls[MAX_BLOCKS];  // calls that ended; all are equal between two kernels; CTA b reads [b]
  u64 failed;             // 1 + the number of a rank that gave up, or 0
  u64 unused[31];
  u64 flags[2][2][MAX_BLOCKS][MAX_RANKS];  // [barrier of the call][call % 2][CTA][rank that wrote it]
  u64 rounds[2][MAX_RANKS];                // [call % 2][rank that wrote it]: rounds that this rank's exchange needs
  // Messages between two ranks, which are numbered too
  u64 sent[MAX_RANKS][MAX_BLOCKS], received[MAX_RANKS][MAX_BLOCKS];  // messages to and from a rank that ended
  u64 arrived[MAX_RANKS][2][MAX_BLOCKS];                             // flags that the sender writes: [sender][message % 2][CTA]
  u64 taken[MAX_RANKS][MAX_BLOCKS];                                  // numbers that the receiver writes: [receiver][CTA]
};

struct Group {
  u8* buffers[MAX_RANKS];
  u64 peer_inboxes[MAX_RANKS];  // offset in a rank's buffer of the messages from this rank
  u64 own_inboxes[MAX_RANKS];   // offset in this rank's buffer of the messages from a rank
  u64* report;                  // in host memory: failure, rank and call; and a request to stop
  u64 data;                     // offset of the two slots
  u64 slot_bytes, message_bytes;
  u64 timeout_ns;
  int rank, size;
  int can_overlap;  // whether the next kernel may start before this one ends: the ranks have GPUs of their own
  int unused;
};

DEVICE Header* header_of(const Group& group, int rank) { return reinterpret_cast<Header*>(group.buffers[rank]); }
DEVICE u8* slot_of(const Group& group, int rank, u64 call) {
  return group.buffers[rank] + group.data + (call & 1) * group.slot_bytes;
}

// Gives up because of `peer`. The report of the first CTA that does is kept, unless several do at the same time.
DEVICE bool fail(const Group& group, Failure why, int peer, u64 call) {
  if (load_relaxed(group.report) == 0) store_relaxed(group.report, u64(why) | u64(peer) << 8 | call << 16);
  for (int rank = 0; why != ANOTHER_GAVE_UP && rank < group.size; rank++)
    store_relaxed(&header_of(group, rank)->failed, group.rank + 1);
  return false;
}

enum Comparison { EXACTLY, AT_LEAST };

// Waits until the flag has this value, or at least this number. Returns false if that does not happen.
template <Comparison COMPARISON> DEVICE bool wait_for(const Group& group, const u64* flag, u64 value, int peer) {
  const auto is_reached = [&](u64 found) { return COMPARISON == EXACTLY ? found == value : found >= value; };
  u64 found = load_acquire(flag);
  if (is_reached(found)) return true;
  const u64 begin = nanoseconds(), number = COMPARISON == EXACTLY ? value >> SIGNATURE_BITS : value;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (int i = 0; i < POLLS_BETWEEN_CHECKS; i++)
      if (is_reached(found = load_acquire(flag))) return true;
    if (COMPARISON == EXACTLY && found >> SIGNATURE_BITS == number) return fail(group, OTHER_CALL, peer, number);
    if (const u64 failed = load_relaxed(&header_of(group, group.rank)->failed))
      return fail(group, ANOTHER_GAVE_UP, int(failed) - 1, number);
    if (load_relaxed(group.report + 1)) return fail(group, STOPPED, peer, number);
    if (nanoseconds() - begin > group.timeout_ns) return fail(group, TIMED_OUT, peer, number);
  }
}

// Begins a kernel: waits for what it reads.
DEVICE void begin_kernel(const Group& group) {
  wait_for_previous_kernel();
  if (group.can_overlap) let_next_kernel_start();
}
DEVICE u64 next_number(const u64* counts) { return load_relaxed(counts + blockIdx.x) + 1; }
// The same for all threads of a CTA, because only their own CTA replaces the number that they read.
DEVICE bool has_given_up(u64 next_number) { return next_number > GAVE_UP; }

// Stores how many calls or messages ended, for all CTAs that a later kernel may have. No thread may read the number any more.
DEVICE void store_number(u64* counts, u64 number) {
  for (int block = blockIdx.x + threadIdx.x * gridDim.x; block < MAX_BLOCKS; block += blockDim.x * gridDim.x)
    store_relaxed(counts + block, number);
}

// Waits until CTA b of all ranks is here. What they wrote before is visible then. Returns false if one does not come.
DEVICE bool pass_barrier(const Group& group, u64 call, int barrier, u32 signature) {
  __syncthreads();
  bool is_passed = true;
  const int peer = threadIdx.x;
  if (peer < group.size) {
    const u64 value = call << SIGNATURE_BITS | signature;
    store_release(&header_of(group, peer)->flags[barrier][call & 1][blockIdx.x][group.rank], value);
    is_passed = wait_for<EXACTLY>(group, &header_of(group, group.rank)->flags[barrier][call & 1][blockIdx.x][peer], value, peer);
  }
  const bool all_passed = __syncthreads_and(is_passed);
  if (!all_passed) store_number(header_of(group, group.rank)->calls, GAVE_UP);
  return all_passed;
}
