// bfmmla in software, to the bit as Arm documents it for CPUs without FEAT_EBF16 or with FPCR.EBF = 0.
#pragma once
#include <cmath>

namespace ember::bf16_dot {

inline float flush(double x) { return std::fabs(x) < 0x1p-126 ? std::copysign(0.0f, float(x)) : float(x); }

// Returns a + b rounded to odd: an inexact sum is cut off, and its last bit becomes 1.
inline float add_to_odd(float a, float b) {
    double sum = double(a) + b, part = sum - a, error = (a - (sum - part)) + (b - part);
    if (!(std::fabs(sum) < 0x1p128) || std::fabs(sum) < 0x1p-126) return flush(sum);
    float rounded = float(sum);
    if (rounded == sum && error == 0) return rounded;
    bool is_too_large = std::fabs(rounded) > std::fabs(sum) || (rounded == sum && (error < 0) == (sum > 0));
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    bits = (bits - is_too_large) | 1;
    std::memcpy(&rounded, &bits, sizeof bits);
    return rounded;
}

inline Sums add_products(Sums sum, Block rows, Block columns) {
    auto product = [&](int row, int column, int i) {
        double a = flush(widen(bf16{rows[4 * row + i]})), b = flush(widen(bf16{columns[4 * column + i]}));
        return flush(a * b);
    };
    for (int i = 0; i < 4; i++) {
        int row = i / 2, column = i % 2;
        float total = flush(sum[i]);
        for (int k = 0; k < 4; k += 2) total = add_to_odd(total, add_to_odd(product(row, column, k), product(row, column, k + 1)));
        sum[i] = std::isnan(total) ? std::nanf("") : total;
    }
    return sum;
}

}  // namespace ember::bf16_dot
