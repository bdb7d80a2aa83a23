// The end of a step: masks, sampling and log-probabilities over rows of logits. A row's answer depends on that row alone.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "exp.h"
#include "pool.h"

namespace ember {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

float largest(const float* x, int n) {  // NaN aside
    float lane[16];
    std::fill_n(lane, 16, kNever);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    return *std::max_element(lane, lane + 16);
}

int argmax(const float* x, int n) {  // the lowest id among equals: in the first block that has it
    constexpr int kBlock = 1024;
    float most = kNever;
    int i = 0;
    for (int at = 0; at < n; at += kBlock)
        if (float here = largest(x + at, std::min(kBlock, n - at)); here > most) most = here, i = at;
    for (; i < n; i++)
        if (x[i] == most) return i;
    return 0;
}

// Tokens of one row by (weight descending, id ascending), sorted only as far as they are asked for: the weights fall into
// bands of a factor e, and a band is sorted when the walk reaches it.
class Order {
public:
    Order(const float* weight, int n) : weight_(weight), n_(n) {}

    int at(size_t rank) {
        while (rank >= sorted_.size() && band_ <= kBands) next_band();
        return sorted_[std::min(rank, sorted_.size() - 1)];  // NaN weights are in no band
    }

private:
    void next_band() {
        float low = ++band_ > kBands ? -1.0f : exp_negative(-float(band_));
        size_t start = sorted_.size();
        for (int i = 0; i < n_; i++)
            if (weight_[i] < high_ && weight_[i] >= low) sorted_.push_back(i);
        std::sort(sorted_.begin() + long(start), sorted_.end(), [this](int a, int b) {
            return weight_[a] != weight_[b] ? weight_[a] > weight_[b] : a < b;
        });
        high_ = low;
    }

    static constexpr int kBands = 87;  // exp_negative is 0 beyond
    const float* weight_;
    int n_, band_ = 0;
    float high_ = 2.0f;
    std::vector<int> sorted_;
};

struct Choice {
    float temperature, top_p, min_p;
    int top_k;
    double uniform;
};

double total(const float* weight, int n) {
    double lane[8] = {};
    for (int i = 0; i < n; i++) lane[i % 8] += weight[i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Leaves in `x` each token's probability relative to the largest, so the first token weighs exactly 1.
void weigh(float* x, int n, float most, float temperature) {
    for (int i = 0; i < n; i++) x[i] = x[i] == kNever ? 0.0f : exp_negative((x[i] - most) / temperature);
}

long pick(float* x, int n, const Choice& choice) {
    int first = argmax(x, n);
    if (choice.temperature == 0.0f || !std::isfinite(x[first])) return first;
    weigh(x, n, x[first], choice.temperature);
    Order order(x, n);
    size_t keep = choice.top_k > 0 ? std::min(choice.top_k, n) : n;
    double kept = 0.0, mass = 0.0;
    if (keep < size_t(n)) for (size_t i = 0; i < keep; i++) kept += x[order.at(i)];
    else kept = total(x, n);
    if (choice.top_p < 1.0f) {
        size_t i = 0;
        for (mass = 0.0; i < keep && (i == 0 || mass < double(choice.top_p) * kept); i++) mass += x[order.at(i)];
        keep = i, kept = mass;
    }
    if (choice.min_p > 0.0f) {
        size_t i = 0;
        for (mass = 0.0; i < keep && (i == 0 || x[order.at(i)] >= choice.min_p); i++) mass += x[order.at(i)];
        keep = i, kept = mass;
    }
    mass = 0.0;
    for (size_t i = 0; i < keep; i++)
        if ((mass += x[order.at(i)]) > choice.uniform * kept) return order.at(i);
    return order.at(keep - 1);
}

struct LogProbs {
    float *chosen, *top;
    long *top_ids, *rank;
    int top_n;
};

void describe(const float* x, int n, long id, long row, const LogProbs& to) {
    float most = x[argmax(x, n)];
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += x[i] == kNever ? 0.0f : exp_negative(x[i] - most);
    double log_sum = std::log(sum) + most;
    long higher = 0;
    for (int i = 0; i < n; i++) higher += x[i] > x[id];
    to.chosen[row] = float(x[id] - log_sum);
    to.rank[row] = higher + 1;
    std::vector<int> ids(n);
    for (int i = 0; i < n; i++) ids[i] = i;
    auto before = [x](int a, int b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    std::partial_sort(ids.begin(), ids.begin() + to.top_n, ids.end(), before);
    for (int i = 0; i < to.top_n; i++) {
        to.top_ids[row * to.top_n + i] = ids[i];
        to.top[row * to.top_n + i] = float(x[ids[i]] - log_sum);
    }
}

}  // namespace
}  // namespace ember

using namespace ember;

extern "C" {

void ember_sample(float* logits, int rows, int n, const float* temperature, const int* top_k, const float* top_p,
                  const float* min_p, const double* uniform, long* ids) {
    parallel(rows, [=](long begin, long end) {
        for (long r = begin; r < end; r++)
            ids[r] = pick(logits + r * n, n, {temperature[r], top_p[r], min_p[r], top_k[r], uniform[r]});
    });
}

void ember_log_probs(const float* logits, int rows, int n, const long* ids, int top_n, float* chosen, long* top_ids, float* top,
                     long* rank) {
    LogProbs to{chosen, top, top_ids, rank, top_n};
    parallel(rows, [=](long begin, long end) {
        for (long r = begin; r < end; r++) describe(logits + r * n, n, ids[r], r, to);
    });
}

void ember_bitmask(float* logits, int n, const int* mask, int words, const long* rows, int count) {
    parallel(count, [=](long begin, long end) {
        for (long r = begin; r < end; r++) {
            float* x = logits + rows[r] * n;
            for (int i = 0; i < n; i++)
                if (!(mask[r * words + i / 32] >> (i % 32) & 1)) x[i] = kNever;
        }
    });
}
}
