// What every way to run a linear layer shares: its operands, how panels hold the weight's rows, and what becomes of the sums.
#pragma once
#include <algorithm>

#include "entries.h"
#include "exp.h"

namespace ember {

struct Linear {
    const float* x;
    int m, n, k;
    const float *bias, *norm;
    float eps;
    float* y;
    Mode mode;
};

// Row of the weight that column `column` of panel `panel` holds, or -1 where the last panel is padding. A gated panel is
// half gate, half up, so that one register tile has both factors of its outputs.
inline long source_row(long panel, int column, long n, bool gated) {
    constexpr int half = kPanel / 2;
    if (!gated) return panel * kPanel + column < n ? panel * kPanel + column : -1;
    long at = panel * half + column % half;
    return at < n / 2 ? at + (column < half ? 0 : n / 2) : -1;
}

// Writes out the sums [rows][kPanel] of one panel.
inline void finish(const Linear& op, long panel, int first, int rows, const float* sums) {
    constexpr int half = kPanel / 2;
    if (op.mode == kGated) {
        long width = op.n / 2, at = panel * half;
        int columns = int(std::min<long>(half, width - at));
        for (int r = 0; r < rows; r++, sums += kPanel) {
            float gated[half];
            for (int j = 0; j < half; j++) gated[j] = silu(sums[j]) * sums[half + j];
            std::copy_n(gated, columns, op.y + (first + r) * width + at);
        }
        return;
    }
    long at = panel * kPanel;
    int columns = int(std::min<long>(kPanel, op.n - at));
    for (int r = 0; r < rows; r++, sums += kPanel) {
        float* y = op.y + (first + r) * long(op.n) + at;
        for (int j = 0; j < columns; j++) {
            float value = op.bias ? sums[j] + op.bias[at + j] : sums[j];
            y[j] = op.mode == kAdd ? y[j] + value : value;
        }
    }
}

}  // namespace ember
