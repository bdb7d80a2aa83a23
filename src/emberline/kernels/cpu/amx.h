// Linear layers with AMX, the matrix unit of x86 servers: bf16 inputs and weights, float32 sums. Inputs are rounded to bf16.
#pragma once
#include "linear.h"
#include "tiles.h"

namespace ember::amx {

constexpr const char* kIsa = "avx512 and amx";

#if EMBER_AMX
bool available();  // whether the operating system grants AMX to this process; only then may weights be packed for it
void pack(const bf16* from, bf16* to, long n, long k, bool gated);
void run(const Linear& op, const bf16* weights);
void embed(const long* ids, long count, const bf16* table, long k, float* out);
#else
inline bool available() { return false; }
inline void pack(const bf16*, bf16*, long, long, bool) {}
inline void run(const Linear&, const bf16*) {}
inline void embed(const long*, long, const bf16*, long, float*) {}
#endif

}  // namespace ember::amx
