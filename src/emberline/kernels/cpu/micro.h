// The register tile: R rows of inputs times one panel of weights. Every product in the house, attention included, is this.
//
// Each output adds up spans of kSpan products in order, and a span is one chain of fused multiply-adds. So an output's bits
// depend on its own row and column only: not on R, the batch, the threads, or how k was cut, if at multiples of kSpan.
// Short spans also keep the error down: it grows with the longest chain.
#pragma once
#include "isa.h"

namespace ember {

enum Start { kFresh, kSpans, kChain };

template <class B>
struct Product {
    const float* a;  // rows of k inputs, lda apart
    long lda;
    const B* b;  // k rows of a panel, ldb apart
    long ldb;
    int k;
    float* c;  // rows of sums, ldc apart
    long ldc;
    // What c holds before: nothing; whole spans, to which these are added; or the chain of a span that goes on here.
    Start start = kFresh;
};

// `rows` inputs times one panel: few rows take it at full width, many in narrower tiles that fill the registers better.
void run_tile(int rows, const Product<float>& p);
void run_tile(int rows, const Product<bf16>& p);

// Cuts `rows` into as few register tiles as hold them, all nearly equal: nine rows are 5 + 4, not 8 + 1.
struct RowBlocks {
    int rows, count;
    explicit RowBlocks(int rows, int most = kRows) : rows(rows), count((rows + most - 1) / most) {}
    int start(int block) const { return int(long(rows) * block / count); }
    int size(int block) const { return start(block + 1) - start(block); }
};

}  // namespace ember
