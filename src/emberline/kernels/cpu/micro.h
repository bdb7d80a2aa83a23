// The register tile: R rows of inputs times one panel of weights. All matrix products here, attention included, use it.
//
// Each output is a sum of spans of kSpan products in order, and a span is one chain of fused multiply-adds. So the bits of an
// output depend on its own row and column only: not on R, the batch, the threads, or where k was cut, if at multiples of
// kSpan. Short spans also reduce the rounding error, which grows with the longest chain.
#pragma once
#include "isa.h"

namespace ember {

enum Start { kFresh, kSpans, kChain };

template <class B>
struct Product {
    const float* a;  // rows of k inputs, with stride lda
    long lda;
    const B* b;  // k rows of a panel, with stride ldb
    long ldb;
    int k;
    float* c;  // rows of sums, with stride ldc
    long ldc;
    // What c holds at the start: nothing (kFresh); sums of whole spans, to which these are added (kSpans); or the chain of an
    // incomplete span, which continues here (kChain).
    Start start = kFresh;
};

// Multiplies `rows` inputs by one panel. Few rows use the full width, many rows use narrower tiles that fill registers better.
void run_tile(int rows, const Product<float>& p);
void run_tile(int rows, const Product<bf16>& p);
void run_tile(int rows, const Product<f16>& p);

// Splits `rows` into as few register tiles as possible, of nearly equal size: nine rows are 5 + 4, not 8 + 1.
struct RowBlocks {
    int rows, count;
    explicit RowBlocks(int rows, int max_rows = kRows) : rows(rows), count((rows + max_rows - 1) / max_rows) {}
    int start(int block) const { return int(long(rows) * block / count); }
    int size(int block) const { return start(block + 1) - start(block); }
};

}  // namespace ember
