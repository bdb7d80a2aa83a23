// A mixture of experts with its norm and residual. Only experts that a row selected are read, in the order of their numbers. A
// row sums its experts in that order, so its bits do not depend on the other rows.
#include <algorithm>
#include <limits>
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

constexpr float kLowest = std::numeric_limits<float>::lowest(), kExcluded = -std::numeric_limits<float>::infinity();

template <class F>
void for_rows(int count, const F& body) {
    constexpr int kGroup = 16;  // fewer rows are not worth a thread
    parallel((count + kGroup - 1) / kGroup, [&](long begin, long end) {
        for (int i = int(begin) * kGroup; i < std::min(int(end) * kGroup, count); i++) body(i);
    });
}

// Replaces the logits of a row by scores, and fills `choice` with the numbers that order the experts. Returns what the weights are
// divided by, or the first summand of it if they are renormalised.
float compute_scores(const Mixture& mix, float* scores, float* choice) {
    float total = mix.renormalize ? 0.0f : 1.0f;
    if (mix.sigmoid) {
        bool by_logit = !mix.correction && mix.groups == 1;  // the sigmoids of large logits are equal
        for (int e = 0; e < mix.count; e++) {
            choice[e] = scores[e];
            scores[e] = sigmoid(scores[e]);
            if (!by_logit) choice[e] = scores[e];
        }
        total = std::max(total, 1e-20f);  // all may be 0
    } else {
        float max_logit = *std::max_element(scores, scores + mix.count);
        for (int e = 0; e < mix.count; e++) {
            float weight = exp_negative(scores[e] - max_logit);
            choice[e] = scores[e] = weight >= 0.0f ? weight : 0.0f;  // NaN must select an expert too
        }
        float sum = mix.renormalize && !mix.correction ? 0.0f : lane_sum(mix.count, [=](int e) { return scores[e]; });
        if (mix.correction)
            for (int e = 0; e < mix.count; e++) choice[e] = scores[e] /= sum;
        else
            total = sum;
    }
    for (int e = 0; e < mix.count; e++) {
        float value = mix.correction ? choice[e] + mix.correction[e] : choice[e];
        choice[e] = value >= kLowest ? value : kLowest;  // also NaN, so that it is selected if nothing else is left
    }
    return total;
}

// Excludes the experts of all groups but the best, the first among equals.
void exclude_groups(const Mixture& mix, float* choice) {
    int size = mix.count / mix.groups;
    std::vector<float> values(mix.groups);
    for (int g = 0; g < mix.groups; g++) {
        float best = kExcluded, second = kExcluded;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = std::max(second, std::min(best, choice[e]));
            best = std::max(best, choice[e]);
        }
        values[g] = std::max(mix.group_best == 2 ? best + second : best, kLowest);
    }
    for (int i = 0; i < mix.top_groups; i++) *std::max_element(values.begin(), values.end()) = kExcluded;
    for (int g = 0; g < mix.groups; g++)
        if (values[g] != kExcluded) std::fill_n(choice + g * size, size, kExcluded);
}

// Selects the experts with the highest scores, the first among equals, with their weights, which are normalised over the selected
// experts or over all. Overwrites scores, which are logits before, and choice.
void select_experts(const Mixture& mix, int row, float* scores, float* choice, Assignment* to) {
    float total = compute_scores(mix, scores, choice);
    if (mix.groups > 1) exclude_groups(mix, choice);
    for (int i = 0; i < mix.top_k; i++) {
        float* best = std::max_element(choice, choice + mix.count);
        int expert = int(best - choice);
        to[i] = {expert, row, scores[expert]};
        if (mix.renormalize) total += scores[expert];
        *best = kExcluded;
    }
    for (int i = 0; i < mix.top_k; i++) to[i].weight = to[i].weight / total * mix.scale;
}

void multiply(const float* x, const void* w, int layout, int m, int n, int k, const float* bias, float* y, Mode mode) {
    ember_linear(x, w, layout, m, n, k, bias, nullptr, 0.0f, y, mode);
}

float activate(const Mixture& mix, float gate, float up) {
    if (mix.swiglu_limit == 0.0f) return silu(gate) * up;
    // Written so that NaN stays NaN.
    float limit = mix.swiglu_limit, low = gate > limit ? limit : gate, inner = up > limit ? limit : up < -limit ? -limit : up;
    return low * sigmoid(low * mix.swiglu_alpha) * (inner + 1.0f);
}

// Computes one expert for `count` rows of inputs, which `out` may overwrite.
void compute_expert(const Mixture& mix, const Expert& expert, const float* inputs, int count, float* out, Mode mode) {
    int ffn = expert.ffn, hidden = mix.hidden;
    float* gated = scratch(kGate, long(count) * ffn);
    if (expert.gated) {
        multiply(inputs, expert.gate_up, expert.gate_up_layout, count, 2 * ffn, hidden, nullptr, gated, kGated);
    } else {
        float* both = scratch(kGateUp, long(count) * 2 * ffn);
        multiply(inputs, expert.gate_up, expert.gate_up_layout, count, 2 * ffn, hidden, expert.gate_up_bias, both, kStore);
        for_rows(count, [&](int i) {
            const float *gate = both + long(i) * 2 * ffn, *up = gate + ffn;
            for (int j = 0; j < ffn; j++) gated[long(i) * ffn + j] = activate(mix, gate[j], up[j]);
        });
    }
    multiply(gated, expert.down, expert.down_layout, count, hidden, ffn, expert.down_bias, out, mode);
}

// Runs one expert for all rows that selected it.
void run_expert(const Mixture& mix, const Expert& expert, const Assignment* assignments, int count, const float* normed, float* x) {
    int hidden = mix.hidden;
    float* rows = scratch(kExpertRows, long(count) * hidden);
    for_rows(count, [&](int i) {
        const float* from = normed + long(assignments[i].row) * hidden;
        float* to = rows + long(i) * hidden;
        if (mix.scales_inputs)
            for (int j = 0; j < hidden; j++) to[j] = assignments[i].weight * from[j];
        else
            std::copy_n(from, hidden, to);
    });
    compute_expert(mix, expert, rows, count, rows, kStore);
    for_rows(count, [&](int i) {
        const float* from = rows + long(i) * hidden;
        float *to = x + long(assignments[i].row) * hidden, weight = mix.scales_inputs ? 1.0f : assignments[i].weight;
        for (int j = 0; j < hidden; j++) to[j] += weight * from[j];
    });
}

// Runs the expert that all rows use.
void run_shared(const Mixture& mix, const float* normed, int m, float* x) {
    if (!mix.shared_gate && mix.shared_scale == 1.0f) return compute_expert(mix, *mix.shared, normed, m, x, kAdd);
    float *out = scratch(kExpertRows, long(m) * mix.hidden), *gates = scratch(kRouter, m);
    compute_expert(mix, *mix.shared, normed, m, out, kStore);
    if (mix.shared_gate) multiply(normed, mix.shared_gate, mix.shared_gate_layout, m, 1, mix.hidden, nullptr, gates, kStore);
    for_rows(m, [&](int i) {
        float weight = mix.shared_gate ? mix.shared_scale * sigmoid(gates[i]) : mix.shared_scale;
        for (long j = long(i) * mix.hidden; j < long(i + 1) * mix.hidden; j++) x[j] += weight * out[j];
    });
}

bool has_lower_expert(const Assignment& a, const Assignment& b) { return a.expert < b.expert; }

// Norms rows, and returns the assignments of each row to the experts that it selects.
std::vector<Assignment> route(const Mixture& mix, int m, const float* x, float* normed) {
    float *logits = scratch(kRouter, 2l * m * mix.count), *choice = logits + long(m) * mix.count;
    ember_rms_norm(x, mix.norm, mix.eps, m, mix.hidden, normed);
    multiply(normed, mix.router, mix.router_layout, m, mix.count, mix.hidden, mix.router_bias, logits, kStore);
    std::vector<Assignment> assignments(size_t(m) * mix.top_k);
    for_rows(m, [&](int row) {
        long first = long(row) * mix.count;
        select_experts(mix, row, logits + first, choice + first, &assignments[size_t(row) * mix.top_k]);
    });
    return assignments;
}

// Sorts assignments by expert, and calls `body` with the first assignment of each expert and their number.
template <class F>
void for_experts(std::vector<Assignment>& assignments, const F& body) {
    std::stable_sort(assignments.begin(), assignments.end(), has_lower_expert);
    for (auto first = assignments.begin(); first != assignments.end();) {
        auto next = std::find_if(first, assignments.end(), [&](const Assignment& other) { return other.expert != first->expert; });
        body(&*first, int(next - first));
        first = next;
    }
}

}  // namespace

extern "C" void ember_mixture(const Mixture* mixture, int m, const float* x, float* out) {
    const Mixture& mix = *mixture;
    float* normed = scratch(kNormed, long(m) * mix.hidden);
    std::vector<Assignment> assignments = route(mix, m, x, normed);
    if (mix.shared) run_shared(mix, normed, m, out);
    for_experts(assignments, [&](const Assignment* first, int count) {
        int local = first->expert - mix.first_expert;  // experts of other ranks are skipped
        if (local >= 0 && local < mix.num_experts) run_expert(mix, mix.experts[local], first, count, normed, out);
    });
}

extern "C" void ember_select_experts(const Mixture* mixture, int m, const float* x, float* normed, float* weights, int* chosen) {
    const Mixture& mix = *mixture;
    std::vector<Assignment> assignments = route(mix, m, x, normed);
    for_rows(m, [&](int row) {
        Assignment* of_row = &assignments[size_t(row) * mix.top_k];
        std::sort(of_row, of_row + mix.top_k, has_lower_expert);
        for (int i = 0; i < mix.top_k; i++) {
            weights[long(row) * mix.top_k + i] = of_row[i].weight;
            chosen[long(row) * mix.top_k + i] = of_row[i].expert;
        }
    });
}

extern "C" void ember_experts(const Mixture* mixture, int m, const float* x, const int* experts, float* out) {
    const Mixture& mix = *mixture;
    long hidden = mix.hidden;
    std::vector<Assignment> assignments(m);
    for (int i = 0; i < m; i++) assignments[i] = {experts[i], i, 1.0f};
    for_experts(assignments, [&](const Assignment* first, int count) {
        float* rows = scratch(kExpertRows, count * hidden);
        for_rows(count, [&](int i) { std::copy_n(x + first[i].row * hidden, hidden, rows + i * hidden); });
        compute_expert(mix, mix.experts[first->expert], rows, count, rows, kStore);
        for_rows(count, [&](int i) { std::copy_n(rows + i * hidden, hidden, out + first[i].row * hidden); });
    });
}

extern "C" void ember_shared_expert(const Mixture* mixture, int m, const float* normed, float* out) {
    run_shared(*mixture, normed, m, out);
}
