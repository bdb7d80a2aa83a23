// Runs the kernels of collectives.cu on a CPU: random calls of all ranks, with random delays, compared bit by bit with sums in
// the order of the ranks. Usage: run_collectives RANKS CALLS SEED KINDS MISTAKE ABSENT LATE
//   KINDS: numbers of the calls to draw, see run_call. MISTAKE: number of a mistake in the kernels, 0 for none.
//   ABSENT: a rank that stops taking part after half of the calls, or -1.
//   LATE: a rank that goes on after half of the calls only when the others have given up and made all their calls, or -1.
// Results of a call in which a rank gave up, and of later ones, are not compared.
static int mistake;
#include "collectives.cu"

constexpr int BLOCKS = 2, THREADS = 8, SLOT_BYTES = 1024, MESSAGE_BYTES = 512, DATA = 64 << 10;
static_assert(sizeof(Header) <= DATA, "HEADER_BYTES in collectives.py is too small");

struct Call {
  int kind, count, blocks, source, delay[MAX_RANKS];
  bool is_two_shot, has_residual;
  int sent[MAX_RANKS][MAX_RANKS];
  u32 seed;
};
struct Rank {
  std::vector<u8> buffer;
  u64 report[2] = {};
  Group group{};
};

static std::atomic<int> wrong{0};
static u64* reports[MAX_RANKS];

static void expect(bool is_right, const char* what, int rank, int call) {
  if (!is_right && !__atomic_load_n(reports[rank], __ATOMIC_RELAXED) && wrong++ < 5) fprintf(stderr, "wrong result: %s, rank %d, call %d\n", what, rank, call);
}
template <class T> static std::vector<T> draw(int count, u32 seed) {
  std::mt19937 random(seed);
  std::vector<T> x(count + 8);  // room to align
  for (T& each : x) round_to(each, std::normal_distribution<float>()(random));
  return x;
}
template <> std::vector<u8> draw<u8>(int count, u32 seed) {
  std::mt19937 random(seed);
  std::vector<u8> x(count);
  for (u8& each : x) each = u8(random());
  return x;
}
template <class T> static bool equal(const T* a, const T* b, int count) { return !memcmp(a, b, count * sizeof(T)); }

// Memory that is aligned to 16 bytes, with a guard behind it.
template <class T> struct Aligned {
  std::vector<uint4> memory;
  int count;
  explicit Aligned(const T* from, int count) : memory(count * sizeof(T) / 16 + 2), count(count) {
    memset(memory.data(), 0xab, memory.size() * 16);
    if (from) memcpy(memory.data(), from, count * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(memory.data()); }
  bool is_intact() {
    const u8* bytes = reinterpret_cast<const u8*>(memory.data());
    for (size_t i = count * sizeof(T); i < memory.size() * 16; i++)
      if (bytes[i] != 0xab) return false;
    return true;
  }
};

template <class T> static std::vector<T> sum_ranks(const Call& call, int size, int count) {
  std::vector<std::vector<T>> parts;
  for (int rank = 0; rank < size; rank++) parts.push_back(draw<T>(count, call.seed + rank));
  std::vector<T> sum(count);
  for (int i = 0; i < count; i++) {
    float total = to_float(parts[0][i]);
    for (int rank = 1; rank < size; rank++) total += to_float(parts[rank][i]);
    round_to(sum[i], total);
  }
  return sum;
}

template <class T> static void run_reduce(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  const int count = call.count * 4 / int(sizeof(T));
  Aligned<T> x(draw<T>(count, call.seed + group.rank).data(), count), residual(draw<T>(count, call.seed + 99).data(), count);
  std::vector<T> expected = sum_ranks<T>(call, group.size, count), before(residual.data(), residual.data() + count);
  T* const out = call.has_residual ? residual.data() : x.data();
  launch(call.blocks, THREADS, [&] {
    (call.is_two_shot ? reduce_two_shot<T, MAX_RANKS> : reduce_one_shot<T, MAX_RANKS>)(group, x.data(), call.has_residual ? residual.data() : nullptr,
                                                                out, count, call.kind);
  });
  for (int i = 0; call.has_residual && i < count; i++) round_to(expected[i], to_float(before[i]) + to_float(expected[i]));
  expect(equal(out, expected.data(), count) && x.is_intact() && residual.is_intact(), "sum", group.rank, number);
}

static void run_norm(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  const int rows = 1 + call.count % 2, columns = 256, count = rows * columns;
  Aligned<bf16> partial(draw<bf16>(count, call.seed + group.rank).data(), count), x(draw<bf16>(count, call.seed + 99).data(), count);
  Aligned<bf16> normed(nullptr, count);
  const std::vector<float> weight = draw<float>(columns, 3);
  std::vector<bf16> expected = sum_ranks<bf16>(call, group.size, count);
  for (int i = 0; i < count; i++) round_to(expected[i], to_float(x.data()[i]) + to_float(expected[i]));
  launch(min(rows, call.blocks), 32,
         [&] { reduce_add_norm<bf16, 1, MAX_RANKS>(group, partial.data(), x.data(), weight.data(), 1e-5f, normed.data(), rows, columns, 7); });
  expect(equal(x.data(), expected.data(), count), "residual", group.rank, number);
  for (int row = 0; row < rows; row++) {
    double size = 0;
    for (int i = 0; i < columns; i++) size += pow(to_float(expected[row * columns + i]), 2);
    for (int i = 0; i < columns; i++) {
      const double right = to_float(expected[row * columns + i]) / sqrt(size / columns + 1e-5) * weight[i];
      const float found = to_float(normed.data()[row * columns + i]);
      expect(fabs(found - right) <= fabs(right) / 64 + 1e-6, "norm", group.rank, number);
    }
  }
  expect(normed.is_intact() && x.is_intact(), "memory behind a norm", group.rank, number);
}

static void run_gather(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  const int rows = 1 + call.count % 3, width = call.count / rows, count = rows * width;
  Aligned<u32> x(reinterpret_cast<const u32*>(draw<float>(count, call.seed + group.rank).data()), count), out(nullptr, count * group.size);
  launch(call.blocks, THREADS, [&] { gather_rows<u32>(group, x.data(), out.data(), rows, width, 8); });
  for (int rank = 0; rank < group.size; rank++) {
    const std::vector<float> part = draw<float>(count, call.seed + rank);
    for (int row = 0; row < rows; row++)
      expect(!memcmp(out.data() + (row * group.size + rank) * width, part.data() + row * width, 4 * width), "gather", group.rank, number);
  }
  expect(out.is_intact(), "memory behind a gather", group.rank, number);
}

static void run_broadcast(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  const int count = call.count * 4 - 3, source = call.source % group.size;
  Aligned<u8> x(draw<u8>(count, call.seed + group.rank).data(), count);
  launch(call.blocks, THREADS, [&] { broadcast(group, x.data(), count, source, 9); });
  expect(equal(x.data(), draw<u8>(count, call.seed + source).data(), count) && x.is_intact(), "broadcast", group.rank, number);
}

// Element i that rank `from` sends to rank `to`.
static u32 element(const Call& call, int from, int to, int i) { return call.seed * 31 + from * 1000003 + to * 10007 + i; }

static void run_exchange(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  Counts counts{};
  std::vector<u32> sent, expected;
  for (int rank = 0; rank < group.size; rank++) {
    counts.sent[rank] = call.sent[group.rank][rank], counts.received[rank] = call.sent[rank][group.rank];
    for (int i = 0; i < counts.sent[rank]; i++) sent.push_back(element(call, group.rank, rank, i));
    for (int i = 0; i < counts.received[rank]; i++) expected.push_back(element(call, rank, group.rank, i));
  }
  Aligned<u32> x(sent.data(), int(sent.size())), out(nullptr, int(expected.size()));
  launch(BLOCKS, THREADS, [&] { exchange_parts<u32>(group, x.data(), out.data(), counts, 10); });
  expect(equal(out.data(), expected.data(), int(expected.size())) && out.is_intact(), "exchange", group.rank, number);
}

// Every rank sends a message to the next one, twice, and then receives two: the inbox has two places.
static void run_messages(Rank& own, const Call& call, int number) {
  const Group& group = own.group;
  const int to = (group.rank + 1) % group.size, source = (group.rank + group.size - 1) % group.size;
  if (group.size == 1) return;
  for (int i = 0; i < 2; i++) {
    const int count = min(MESSAGE_BYTES, call.count + i);
    Aligned<u8> x(draw<u8>(count, call.seed + 2 * group.rank + i).data(), count);
    launch(call.blocks, THREADS, [&] { send_message(group, x.data(), count, to, 11); });
  }
  for (int i = 0; i < 2; i++) {
    const int count = min(MESSAGE_BYTES, call.count + i);
    Aligned<u8> x(nullptr, count);
    launch(call.blocks, THREADS, [&] { receive_message(group, x.data(), count, source, 11); });
    expect(equal(x.data(), draw<u8>(count, call.seed + 2 * source + i).data(), count) && x.is_intact(), "message", group.rank, number);
  }
}

static void run_call(Rank& own, const Call& call, int number) {
  switch (call.kind) {
    case 0: return run_reduce<bf16>(own, call, number);
    case 1: return run_reduce<f16>(own, call, number);
    case 2: return run_reduce<float>(own, call, number);
    case 3: return run_norm(own, call, number);
    case 4: return run_gather(own, call, number);
    case 5: return run_broadcast(own, call, number);
    case 6: return run_exchange(own, call, number);
    case 7: return run_messages(own, call, number);
  }
}

static std::vector<Call> draw_calls(int size, int calls, u32 seed, const char* kinds) {
  std::mt19937 random(seed);
  std::vector<Call> drawn(calls);
  for (Call& each : drawn) {
    each.kind = kinds[random() % strlen(kinds)] - '0';
    each.count = 1 + random() % (SLOT_BYTES / 4 - 1);
    if (random() % 4 == 0) each.count = 1 + random() % 40;
    each.blocks = 1 + random() % BLOCKS;
    each.source = int(random() % MAX_RANKS), each.seed = u32(random() % 100000);
    each.is_two_shot = random() % 2, each.has_residual = random() % 2;
    for (int rank = 0; rank < size; rank++) {
      each.delay[rank] = random() % 4 ? 0 : int(random() % 500);
      for (int to = 0; to < size; to++) each.sent[rank][to] = random() % 3 ? int(random() % (SLOT_BYTES / 4)) : 0;
    }
  }
  return drawn;
}

int main(int, char** arguments) {
  const int size = atoi(arguments[1]), calls = atoi(arguments[2]), absent = atoi(arguments[6]), late = atoi(arguments[7]);
  mistake = atoi(arguments[5]);
  std::vector<Rank> ranks(size);
  for (Rank& each : ranks) each.buffer.resize(DATA + 2 * SLOT_BYTES + 2 * MESSAGE_BYTES * MAX_RANKS + 16);
  for (int rank = 0; rank < size; rank++) {
    Group& group = ranks[rank].group;
    for (int peer = 0; peer < size; peer++) {
      u8* const start = ranks[peer].buffer.data();
      group.buffers[peer] = start + (16 - reinterpret_cast<u64>(start) % 16) % 16;
      group.peer_inboxes[peer] = DATA + 2 * SLOT_BYTES + 2 * MESSAGE_BYTES * rank;
      group.own_inboxes[peer] = DATA + 2 * SLOT_BYTES + 2 * MESSAGE_BYTES * peer;
    }
    group.report = reports[rank] = ranks[rank].report, group.data = DATA;
    group.slot_bytes = SLOT_BYTES, group.message_bytes = MESSAGE_BYTES;
    group.timeout_ns = absent >= 0 || late >= 0 || mistake ? 300000000ull : 30000000000ull, group.rank = rank, group.size = size;
  }
  const std::vector<Call> drawn = draw_calls(size, calls, u32(atoi(arguments[3])), arguments[4]);
  std::vector<std::thread> streams;
  std::atomic<int> num_ended{0};
  for (Rank& own : ranks)
    streams.emplace_back([&] {
      for (int i = 0; i < calls; i++) {
        if (own.group.rank == absent && i == calls / 2) return;  // this rank makes no more calls
        while (own.group.rank == late && i == calls / 2 && num_ended < size - 1) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(drawn[i].delay[own.group.rank]));
        run_call(own, drawn[i], i);
        if (late < 0 && __atomic_load_n(own.report, __ATOMIC_RELAXED)) return;
      }
      num_ended++;
    });
  for (std::thread& each : streams) each.join();
  int gave_up = 0;
  for (Rank& own : ranks) gave_up += own.report[0] != 0;
  printf("%d wrong, %d gave up\n", wrong.load(), gave_up);
  for (Rank& own : ranks)
    if (own.report[0]) printf("rank %d: reason %llu rank %llu\n", own.group.rank, own.report[0] & 255, own.report[0] >> 8 & 255);
  return wrong || gave_up ? 1 : 0;
}
