// The thread pool of the process. The caller is one of its threads; the others spin briefly for the next task, then sleep.
#pragma once

namespace ember {

void set_threads(int threads);
int threads();
long progress();  // a count that grows with every piece of work

// A callable by reference, without copy or allocation.
struct Body {
    const void* object;
    void (*call)(const void* object, long begin, long end);
};
void run_parallel(long items, Body body);

// Runs body(begin, end) over [0, items) in pieces that shrink toward the end, to balance the load. Any thread may run any
// piece, so a body's result may depend on its range only. Concurrent calls run one after the other.
template <class F>
void parallel(long items, const F& body) {
    run_parallel(items, {&body, [](const void* object, long begin, long end) { (*static_cast<const F*>(object))(begin, end); }});
}

// Returns reusable memory of this thread, at least `floats` long and 64-byte aligned. Each purpose has its own slot.
enum Slot {
    kInputs, kSums, kWeights, kQueries, kScores, kKeys, kValues, kPartial, kMerge, kQkv, kMixed, kGate, kNormed, kRouter,
    kExpertRows, kGateUp, kSlots
};
float* scratch(Slot slot, long floats);

}  // namespace ember
