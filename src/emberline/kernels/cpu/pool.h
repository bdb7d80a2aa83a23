// The threads of the process. The caller is one of them; the others spin briefly for the next job, then sleep.
#pragma once
#include <functional>

namespace ember {

void set_threads(int threads);
int threads();

// Runs body(begin, end) over [0, items) in pieces that shrink as the work runs out. Which thread runs a piece is not
// defined, so a body's result may depend on its range only. One call at a time; concurrent callers wait their turn.
using Body = std::function<void(long begin, long end)>;
void parallel(long items, const Body& body);

// This thread's reusable memory, at least `floats` long and 64-byte aligned. One purpose, one slot.
enum Slot { kInputs, kSums, kWeights, kQueries, kScores, kKeys, kValues, kPartial, kFold, kQkv, kMixed, kGate, kSlots };
float* scratch(Slot slot, long floats);

}  // namespace ember
