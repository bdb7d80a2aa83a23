// Linear layers by instructions that add products of bf16 to float32 sums: bfmmla of Arm, vdpbf16ps of AVX512-BF16. Inputs are rounded
// to bf16, as with AMX, which is preferred where it is granted.
#pragma once
#include "linear.h"

// A test defines EMBER_BF16_MODEL, the name of a header that computes one of the instructions in software, and which one it is.
#if defined(EMBER_BF16_MODEL)
#if !defined(EMBER_BFMMLA) && !defined(EMBER_VDPBF16PS)
#error "a model of an instruction needs EMBER_BFMMLA or EMBER_VDPBF16PS"
#endif
#elif defined(EMBER_PORTABLE)
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define EMBER_BFMMLA 1
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__) && defined(__AVX512BF16__)
#define EMBER_VDPBF16PS 1
#endif

namespace ember::bf16_dot {

#if defined(EMBER_BFMMLA) || defined(EMBER_VDPBF16PS)
#if defined(EMBER_BFMMLA)
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

// Each output is a sum of chains in order. A chain is a sum of products in the order of k and of the instruction. So, as in micro.h, an
// output's bits depend on its own row and column only. Chains also reduce the rounding error: with k = 4096, one chain of all products
// errs 6 times (vdpbf16ps) and 10 times (bfmmla) as much as torch in float32, chains of 128 at most twice.
constexpr int kChainProducts = 128;

// What the register tiles of bfmmla.h and vdpbf16ps.h compute: some groups of rows times a panel, over `k` elements, a multiple of
// kDepth.
struct Tile {
    const bf16* rows;  // inputs of the first group: [k / kDepth][kRowGroup][kDepth]
    long stride;       // elements from one group to the next
    const bf16* weights;
    int k;
    float* sums;  // [rows][kPanel]
    bool fresh;   // whether `sums` holds nothing yet; otherwise the sums of earlier chains
};

}  // namespace ember::bf16_dot
