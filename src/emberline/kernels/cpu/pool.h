// The threads of the process. The caller is one of them; the others spin briefly for the next job, then sleep.
#pragma once

namespace ember {

void set_threads(int threads);
int threads();
long progress();

// What to run, by reference: no copy, no allocation.
struct Body {
    const void* object;
    void (*call)(const void* object, long begin, long end);
};
void run_parallel(long items, Body body);

// Runs body(begin, end) over [0, items) in pieces that shrink as the work runs out. Which thread runs a piece is not
// defined, so a body's result may depend on its range only. One call at a time; concurrent callers wait their turn.
template <class F>
void parallel(long items, const F& body) {
    run_parallel(items, {&body, [](const void* object, long begin, long end) { (*static_cast<const F*>(object))(begin, end); }});
}

// This thread's reusable memory, at least `floats` long and 64-byte aligned. One purpose, one slot.
enum Slot {
    kInputs, kSums, kWeights, kQueries, kScores, kKeys, kValues, kPartial, kFold, kQkv, kMixed, kGate, kNormed, kRouter, kVisitors,
    kSlots
};
float* scratch(Slot slot, long floats);

}  // namespace ember
