// Selects the instruction set from the compiler's target. Each header defines the same few primitives.
#pragma once
#if defined(EMBER_PORTABLE)
#include "portable.h"
#elif defined(__aarch64__)
#include "neon.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#else
#include "portable.h"
#endif

namespace ember {
constexpr int kPanel = kLanes * kVecs;
static_assert(kVecs % 2 == 0, "panels are loaded in pairs of vectors");

inline void widen8(const float* from, float* to) { std::memcpy(to, from, 8 * sizeof(float)); }

// Widens `rows` rows of `count` numbers to float. Rows that are contiguous in source and target are treated as one long row.
template <class B>
inline void widen_rows(const B* from, long from_stride, long rows, long count, float* to, long to_stride) {
    if (from_stride == count && to_stride == count) count *= rows, rows = 1;
    for (long r = 0; r < rows; r++, from += from_stride, to += to_stride) {
        long i = 0;
        for (; i + 8 <= count; i += 8) widen8(from + i, to + i);
        for (; i < count; i++) to[i] = widen(from[i]);
    }
}

}  // namespace ember
