// An index of token texts that finds where their newest tokens occurred before, to guess how they continue.
#pragma once
#include <cstdint>

extern "C" {

// Returns a new index. It keeps at most `capacity` tokens: when it is full, the older half is dropped. 0: no limit.
void* ember_suffix_new(long capacity);

void ember_suffix_free(void* index);

// Appends tokens to the text of the index. A negative token ends a text: no match and no guess goes across it.
void ember_suffix_append(void* index, const int32_t* tokens, long count);

// Guesses how the text of `own` continues, from earlier places in it and from those in `shared` (may be null) where its newest
// tokens occur. Writes at most `limit` tokens, with an estimate of the probability of each if those before it are right, and
// returns their number.
long ember_suffix_propose(const void* own, const void* shared, long limit, int32_t* tokens, float* confidence);
}
