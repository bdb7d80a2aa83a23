// Masks, sampling and log-probabilities over rows of logits. A row's result depends on that row only.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "exp.h"
#include "pool.h"

namespace ember {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

float largest(const float* x, int n) {  // ignores NaN
    float lane[16];
    std::fill_n(lane, 16, kMasked);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    return *std::max_element(lane, lane + 16);
}

int argmax(const float* x, int n) {  // the lowest id among equals
    constexpr int kBlock = 1024;
    float max_logit = kMasked;
    int i = 0;
    for (int at = 0; at < n; at += kBlock)
        if (float block_max = largest(x + at, std::min(kBlock, n - at)); block_max > max_logit) max_logit = block_max, i = at;
    for (; i < n; i++)
        if (x[i] == max_logit) return i;
    return 0;
}

// Tokens of one row in the order (weight descending, id ascending), sorted lazily: weights are divided into bands of a factor e,
// and a band is sorted when a rank in it is requested.
class TokenOrder {
public:
    TokenOrder(const float* weight, int n) : weight_(weight), n_(n) {}

    int at(size_t rank) {
        while (rank >= sorted_.size() && band_ <= kBands) next_band();
        return sorted_[std::min(rank, sorted_.size() - 1)];  // NaN weights belong to no band
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

    static constexpr int kBands = 87;  // exp_negative returns nothing smaller
    const float* weight_;
    int n_, band_ = 0;
    float high_ = 2.0f;
    std::vector<int> sorted_;
};

struct SamplingParams {
    float temperature, top_p, min_p;
    int top_k;
    double uniform;
};

double total(const float* weight, int n) {
    double lane[8] = {};
    for (int i = 0; i < n; i++) lane[i % 8] += weight[i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Replaces each logit by the token's probability relative to the largest, which is exactly 1.
void logits_to_weights(float* x, int n, float max_logit, float temperature) {
    for (int i = 0; i < n; i++) x[i] = x[i] == kMasked ? 0.0f : exp_negative((x[i] - max_logit) / temperature);
}

long sample_row(float* x, int n, const SamplingParams& params) {
    int first = argmax(x, n);
    if (params.temperature == 0.0f || !std::isfinite(x[first])) return first;
    logits_to_weights(x, n, x[first], params.temperature);
    TokenOrder order(x, n);
    size_t keep = params.top_k > 0 ? std::min(params.top_k, n) : n;
    double kept_mass = 0.0, mass = 0.0;
    if (keep < size_t(n)) for (size_t i = 0; i < keep; i++) kept_mass += x[order.at(i)];
    else kept_mass = total(x, n);
    if (params.top_p < 1.0f) {
        size_t i = 0;
        for (mass = 0.0; i < keep && (i == 0 || mass < double(params.top_p) * kept_mass); i++) mass += x[order.at(i)];
        keep = i, kept_mass = mass;
    }
    if (params.min_p > 0.0f) {
        size_t i = 0;
        for (mass = 0.0; i < keep && (i == 0 || x[order.at(i)] >= params.min_p); i++) mass += x[order.at(i)];
        keep = i, kept_mass = mass;
    }
    mass = 0.0;
    for (size_t i = 0; i < keep; i++)
        if ((mass += x[order.at(i)]) > params.uniform * kept_mass) return order.at(i);
    return order.at(keep - 1);
}

struct LogProbs {
    float *chosen, *top;
    long *top_ids, *rank;
    int top_n;
};

void write_log_probs(const float* x, int n, long id, long row, const LogProbs& to) {
    float max_logit = x[argmax(x, n)];
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += x[i] == kMasked ? 0.0f : exp_negative(x[i] - max_logit);
    double log_sum = std::log(sum) + max_logit;
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
            ids[r] = sample_row(logits + r * n, n, {temperature[r], top_p[r], min_p[r], top_k[r], uniform[r]});
    });
}

void ember_log_probs(const float* logits, int rows, int n, const long* ids, int top_n, float* chosen, long* top_ids, float* top,
                     long* rank) {
    LogProbs to{chosen, top, top_ids, rank, top_n};
    parallel(rows, [=](long begin, long end) {
        for (long r = begin; r < end; r++) write_log_probs(logits + r * n, n, ids[r], r, to);
    });
}

void ember_bitmask(float* logits, int n, const int* mask, int words, const long* rows, int count) {
    parallel(count, [=](long begin, long end) {
        for (long r = begin; r < end; r++) {
            float* x = logits + rows[r] * n;
            for (int i = 0; i < n; i++)
                if (!(mask[r * words + i / 32] >> (i % 32) & 1)) x[i] = kMasked;
        }
    });
}
}
