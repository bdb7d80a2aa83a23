// The instruction set is chosen by what the compiler was told to target; each header offers the same few primitives.
#pragma once
#if defined(__aarch64__)
#include "neon.h"
#elif defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.h"
#else
#include "portable.h"
#endif

namespace ember {
constexpr int kPanel = kLanes * kVecs;
static_assert(kVecs % 2 == 0, "panels are loaded in pairs of vectors");
}  // namespace ember
