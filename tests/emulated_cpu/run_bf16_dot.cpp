// Runs a product of bf16_dot.cpp on a CPU that an emulator provides: reads m, n, k, inputs and weights, and writes the outputs of all
// rows at once, then the outputs of each row alone.
#include <cstdio>
#include <vector>

#include "bf16_dot.h"
#include "pool.h"

using namespace ember;

int main(int, char** arguments) {
    FILE* input = std::fopen(arguments[1], "rb");
    int shape[3];
    if (!input || std::fread(shape, sizeof shape, 1, input) != 1) return 1;
    auto [m, n, k] = shape;
    long panels = (n + kPanel - 1) / kPanel, depth = (k + 31) / 32 * 32;
    std::vector<float> x(size_t(m) * k), y(size_t(m) * n);
    std::vector<bf16> weights(size_t(n) * k), packed(panels * kPanel * depth);
    if (std::fread(x.data(), 4, x.size(), input) != x.size()) return 1;
    if (std::fread(weights.data(), 2, weights.size(), input) != weights.size()) return 1;
    set_threads(2);
    bf16_dot::pack(weights.data(), packed.data(), n, k, false);
    FILE* output = std::fopen(arguments[2], "wb");
    auto run = [&](const float* rows, int count) {
        bf16_dot::run({rows, count, n, k, nullptr, nullptr, 0.0f, y.data(), kStore, n}, packed.data());
        std::fwrite(y.data(), 4, size_t(count) * n, output);
    };
    run(x.data(), m);
    for (int r = 0; r < m; r++) run(x.data() + long(r) * k, 1);
    return std::fclose(output);
}
