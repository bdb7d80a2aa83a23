// The register tile: R rows of inputs times one panel of weights. Every product in the house, attention included, is this.
//
// Each output is one chain of fused multiply-adds over k = 0, 1, 2, ...; cutting k into chunks continues the chain from
// memory. So an output's bits depend on its own row and column only: not on R, the batch, the chunks or the threads.
#pragma once

#include "isa.h"

namespace ember {

template <class B>
struct Product {  // the operands of run_tile, with their strides
    const float* a;
    long lda;
    const B* b;
    long ldb;
    int k;
    float* c;
    long ldc;
    bool fresh = true;
};

// `rows` inputs times one panel: few rows take it at full width, many in narrower tiles that fill the registers better.
void run_tile(int rows, const Product<float>& p);
void run_tile(int rows, const Product<bf16>& p);

// Cuts `rows` into as few register tiles as hold them, all nearly equal: nine rows are 5 + 4, not 8 + 1.
struct RowBlocks {
    int rows, count;
    explicit RowBlocks(int rows) : rows(rows), count((rows + kRows - 1) / kRows) {}
    int start(int block) const { return int(long(rows) * block / count); }
    int size(int block) const { return start(block + 1) - start(block); }
};

}  // namespace ember
