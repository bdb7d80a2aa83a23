// Products of small integers, by the instructions at hand. A vector of codes has four consecutive codes of each of kLanes columns;
// a step multiplies them by four inputs and adds the products to one int32 for each column. All of this is exact.
//
// Codes of fewer than eight bits are stored as numbers from 0 (kSmall). Codes of the whole int8 range (kWhole) are stored plus
// kWholeOffset, which is 128 where the instruction reads unsigned codes. The sums start at the product of offset and inputs.
#pragma once
#include "isa.h"

#if defined(EMBER_PORTABLE)
#include "portable_int8.h"
#elif defined(__aarch64__)
#include "neon_int8.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__)
#include "avx512_int8.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2_int8.h"
#else
#include "portable_int8.h"
#endif

namespace ember {
constexpr int kCodeBytes = kLanes * 4;  // bytes of a vector of codes
}
