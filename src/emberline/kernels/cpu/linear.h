// Shared by all implementations of linear layers: the operands, the layout of panels, and the epilogue.
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
    long stride;  // of y; gated products have n / 2
};

// Returns the row of the weight that column `column` of panel `panel` holds, or -1 where the last panel is padding. A gated
// panel is half gate, half up, so that one register tile has both factors of its outputs.
inline long source_row(long panel, int column, long n, bool gated) {
    constexpr int half = kPanel / 2;
    if (!gated) return panel * kPanel + column < n ? panel * kPanel + column : -1;
    long first_column = panel * half + column % half;
    return first_column < n / 2 ? first_column + (column < half ? 0 : n / 2) : -1;
}

// Applies the epilogue to the sums [rows][kPanel] of one panel and writes the outputs.
inline void write_outputs(const Linear& op, long panel, int first, int rows, const float* sums) {
    constexpr int half = kPanel / 2;
    if (op.mode >= kGated) {
        long width = op.n / 2, first_column = panel * half;
        int columns = int(std::min<long>(half, width - first_column));
        for (int r = 0; r < rows; r++, sums += kPanel) {
            float gated[half];
            if (op.mode == kGated)
                for (int j = 0; j < half; j++) gated[j] = silu(sums[j]) * sums[half + j];
            else
                for (int j = 0; j < half; j++) gated[j] = gelu_tanh(sums[j]) * sums[half + j];
            std::copy_n(gated, columns, op.y + (first + r) * width + first_column);
        }
        return;
    }
    long first_column = panel * kPanel;
    int columns = int(std::min<long>(kPanel, op.n - first_column));
    for (int r = 0; r < rows; r++, sums += kPanel) {
        float* y = op.y + (first + r) * op.stride + first_column;
        for (int j = 0; j < columns; j++) {
            float value = op.bias ? sums[j] + op.bias[first_column + j] : sums[j];
            y[j] = op.mode == kAdd ? y[j] + value : value;
        }
    }
}

// write_outputs() with vectors, if the panel is whole.
inline void write_outputs_vectorized(const Linear& op, long panel, int first, int rows, const float* sums) {
    long at = panel * kPanel;
    if (op.mode >= kGated || at + kPanel > op.n) return write_outputs(op, panel, first, rows, sums);
    for (int r = 0; r < rows; r++, sums += kPanel) {
        float* y = op.y + (first + r) * op.stride + at;
        for (int j = 0; j < kPanel; j += kLanes) {
            Vec value = op.bias ? add(load(sums + j), load(op.bias + at + j)) : load(sums + j);
            store(y + j, op.mode == kAdd ? add(load(y + j), value) : value);
        }
    }
}

}  // namespace ember
