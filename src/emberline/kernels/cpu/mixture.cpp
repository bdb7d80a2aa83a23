// A mixture of experts, its norm and residual included. Only experts that a row chose are read, one after the other in the order
// of their numbers; a row adds up its own in that order, so its bits do not depend on the rows beside it.
#include <algorithm>
#include <vector>

#include "entries.h"
#include "exp.h"
#include "pool.h"

using namespace ember;

namespace {

struct Visit {
    int expert, row;
    float share;
};

template <class F>
void for_rows(int count, const F& body) {
    constexpr int kGroup = 16;  // fewer are not worth a thread
    parallel((count + kGroup - 1) / kGroup, [&](long begin, long end) {
        for (int i = int(begin) * kGroup; i < std::min(int(end) * kGroup, count); i++) body(i);
    });
}

// The most probable experts, the first among equals, and their share of what they have together, or of all. Overwrites logits.
void choose(const Mixture& mix, int row, float* logits, Visit* to) {
    constexpr float kTaken = -1.0f;
    float most = *std::max_element(logits, logits + mix.count);
    for (int e = 0; e < mix.count; e++) {
        float weight = exp_negative(logits[e] - most);
        logits[e] = weight >= 0.0f ? weight : 0.0f;  // NaN visits somebody too
    }
    float total = mix.renormalised ? 0.0f : lane_sum(mix.count, [=](int e) { return logits[e]; });
    for (int i = 0; i < mix.chosen; i++) {
        float* best = std::max_element(logits, logits + mix.count);
        to[i] = {int(best - logits), row, *best};
        if (mix.renormalised) total += *best;
        *best = kTaken;
    }
    for (int i = 0; i < mix.chosen; i++) to[i].share /= total;
}

void multiply(const float* x, const void* w, int layout, int m, int n, int k, float* y, Mode mode) {
    ember_linear(x, w, layout, m, n, k, nullptr, nullptr, 0.0f, y, mode);
}

// All visits to one expert.
void run(const Mixture& mix, const Visit* visits, int count, const float* normed, float* x) {
    const Expert& expert = mix.experts[visits->expert];
    float* rows = scratch(kVisitors, long(count) * mix.hidden);
    float* gated = scratch(kGate, long(count) * mix.ffn);
    for_rows(count, [&](int i) {
        const float* from = normed + long(visits[i].row) * mix.hidden;
        std::copy_n(from, mix.hidden, rows + long(i) * mix.hidden);
    });
    multiply(rows, expert.gate_up, expert.gate_up_layout, count, 2 * mix.ffn, mix.hidden, gated, kGated);
    multiply(gated, expert.down, expert.down_layout, count, mix.hidden, mix.ffn, rows, kStore);  // which have served
    for_rows(count, [&](int i) {
        const float* from = rows + long(i) * mix.hidden;
        float* to = x + long(visits[i].row) * mix.hidden;
        for (int j = 0; j < mix.hidden; j++) to[j] += visits[i].share * from[j];
    });
}

}  // namespace

extern "C" void ember_mixture(const Mixture* mixture, int m, float* x) {
    const Mixture& mix = *mixture;
    float* normed = scratch(kNormed, long(m) * mix.hidden);
    float* logits = scratch(kRouter, long(m) * mix.count);
    ember_rms_norm(x, mix.norm, mix.eps, m, mix.hidden, normed);
    multiply(normed, mix.router, mix.router_layout, m, mix.count, mix.hidden, logits, kStore);
    std::vector<Visit> visits(size_t(m) * mix.chosen);
    for_rows(m, [&](int row) { choose(mix, row, logits + long(row) * mix.count, &visits[size_t(row) * mix.chosen]); });
    std::stable_sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) { return a.expert < b.expert; });
    for (auto first = visits.begin(); first != visits.end();) {
        auto next = std::find_if(first, visits.end(), [&](const Visit& other) { return other.expert != first->expert; });
        run(mix, &*first, int(next - first), normed, x);
        first = next;
    }
}
