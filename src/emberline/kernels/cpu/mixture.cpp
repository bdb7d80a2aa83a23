// A mixture of experts with its norm and residual. Only experts that a row selected are read, in the order of their numbers. A
// row sums its experts in that order, so its bits do not depend on the other rows.
#include <algorithm>
#include <vector>

#include "entries.h"
#include "exp.h"
#include "pool.h"

using namespace ember;

namespace {

struct Assignment {
    int expert, row;
    float weight;
};

template <class F>
void for_rows(int count, const F& body) {
    constexpr int kGroup = 16;  // fewer rows are not worth a thread
    parallel((count + kGroup - 1) / kGroup, [&](long begin, long end) {
        for (int i = int(begin) * kGroup; i < std::min(int(end) * kGroup, count); i++) body(i);
    });
}

// Selects the most probable experts, the first among equals, with their weights, which are normalised over the selected experts
// or over all. Overwrites logits.
void select_experts(const Mixture& mix, int row, float* logits, Assignment* to) {
    constexpr float kSelected = -1.0f;
    float max_logit = *std::max_element(logits, logits + mix.count);
    for (int e = 0; e < mix.count; e++) {
        float weight = exp_negative(logits[e] - max_logit);
        logits[e] = weight >= 0.0f ? weight : 0.0f;  // NaN must select an expert too
    }
    float total = mix.renormalize ? 0.0f : lane_sum(mix.count, [=](int e) { return logits[e]; });
    for (int i = 0; i < mix.top_k; i++) {
        float* best = std::max_element(logits, logits + mix.count);
        to[i] = {int(best - logits), row, *best};
        if (mix.renormalize) total += *best;
        *best = kSelected;
    }
    for (int i = 0; i < mix.top_k; i++) to[i].weight /= total;
}

void multiply(const float* x, const void* w, int layout, int m, int n, int k, float* y, Mode mode) {
    ember_linear(x, w, layout, m, n, k, nullptr, nullptr, 0.0f, y, mode);
}

// Runs one expert for all rows that selected it.
void run_expert(const Mixture& mix, const Assignment* assignments, int count, const float* normed, float* x) {
    const Expert& expert = mix.experts[assignments->expert];
    float* rows = scratch(kExpertRows, long(count) * mix.hidden);
    float* gated = scratch(kGate, long(count) * mix.ffn);
    for_rows(count, [&](int i) {
        const float* from = normed + long(assignments[i].row) * mix.hidden;
        std::copy_n(from, mix.hidden, rows + long(i) * mix.hidden);
    });
    multiply(rows, expert.gate_up, expert.gate_up_layout, count, 2 * mix.ffn, mix.hidden, gated, kGated);
    // The gathered inputs are no longer needed: the outputs overwrite them.
    multiply(gated, expert.down, expert.down_layout, count, mix.hidden, mix.ffn, rows, kStore);
    for_rows(count, [&](int i) {
        const float* from = rows + long(i) * mix.hidden;
        float* to = x + long(assignments[i].row) * mix.hidden;
        for (int j = 0; j < mix.hidden; j++) to[j] += assignments[i].weight * from[j];
    });
}

}  // namespace

extern "C" void ember_mixture(const Mixture* mixture, int m, float* x) {
    const Mixture& mix = *mixture;
    float* normed = scratch(kNormed, long(m) * mix.hidden);
    float* logits = scratch(kRouter, long(m) * mix.count);
    ember_rms_norm(x, mix.norm, mix.eps, m, mix.hidden, normed);
    multiply(normed, mix.router, mix.router_layout, m, mix.count, mix.hidden, logits, kStore);
    std::vector<Assignment> assignments(size_t(m) * mix.top_k);
    for_rows(m, [&](int row) { select_experts(mix, row, logits + long(row) * mix.count, &assignments[size_t(row) * mix.top_k]); });
    std::stable_sort(assignments.begin(), assignments.end(),
                     [](const Assignment& a, const Assignment& b) { return a.expert < b.expert; });
    for (auto first = assignments.begin(); first != assignments.end();) {
        auto next = std::find_if(first, assignments.end(), [&](const Assignment& other) { return other.expert != first->expert; });
        run_expert(mix, &*first, int(next - first), normed, x);
        first = next;
    }
}
