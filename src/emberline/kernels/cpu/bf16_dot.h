// Linear layers by instructions that add products of bf16 to float32 sums: bfmmla of Arm, vdpbf16ps of AVX512-BF16. Inputs are rounded
// to bf16, as with AMX, which is preferred where it is granted.
#pragma once
#include "linear.h"

#if defined(EMBER_PORTABLE)
#define EMBER_BF16_DOT 0
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define EMBER_BF16_DOT 1
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__) && defined(__AVX512BF16__)
#define EMBER_BF16_DOT 1
#else
#define EMBER_BF16_DOT 0
#endif

namespace ember::bf16_dot {

#if EMBER_BF16_DOT
#if defined(__aarch64__)
constexpr const char* kIsa = "neon and bf16";
#else
constexpr const char* kIsa = "avx512 and bf16";
#endif
constexpr bool available() { return true; }
void pack(const bf16* from, bf16* to, long n, long k, bool gated);
void run(const Linear& op, const bf16* weights);
void embed(const long* ids, long count, const bf16* table, long k, float* out);
#else
constexpr const char* kIsa = "";
constexpr bool available() { return false; }
inline void pack(const bf16*, bf16*, long, long, bool) {}
inline void run(const Linear&, const bf16*) {}
inline void embed(const long*, long, const bf16*, long, float*) {}
#endif

}  // namespace ember::bf16_dot
