// Recurrent layers: a causal depthwise convolution, the gated delta rule, and the gates of their outputs. Tokens are computed one
// after the other, and every element of a state by itself, so bits depend neither on the batch nor on where chunks begin.
#include <algorithm>
#include <cmath>
#include <vector>

#include "entries.h"
#include "exp.h"
#include "pool.h"

using namespace ember;

namespace {

constexpr int kTokenGroup = 4;       // fewer tokens are not worth a thread
constexpr int kChannelBlock = 512;   // sums of so many channels stay in the first-level cache
constexpr int kColumnVecs = 8;       // columns of a state that are computed at once, in vectors: independent chains of sums
constexpr float kNormEps = 1e-6f;    // of the lengths of queries and keys

template <class F>
void for_tokens(int count, const F& body) {
    parallel((count + kTokenGroup - 1) / kTokenGroup, [&](long begin, long end) {
        for (int t = int(begin) * kTokenGroup; t < std::min(int(end) * kTokenGroup, count); t++) body(t);
    });
}

int sequence_of(const Sequences& in, int token) {
    return int(std::upper_bound(in.query_start, in.query_start + in.count + 1, token) - in.query_start) - 1;
}

template <class V>
V load_as(const float* p) {
    if constexpr (sizeof(V) == sizeof(float)) return *p;
    else return load(p);
}

void store_as(float* p, float v) { *p = v; }
void store_as(float* p, Vec v) { store(p, v); }

// One value head of one sequence. `state` is its matrix [key_dim][value_dim]. Its rows are accepted drafts, then its tokens.
struct Head {
    const DeltaRule& rule;
    float *state, *saved;  // saved: the matrix of the slot to which it is copied after `saved_after` rows
    const float* drafts;   // the accepted rows
    int first, tokens, head, accepted, committed, saved_after;  // committed: rows that advance the state
    bool is_new;           // whether the state before the first row is zero
};

long mixed_width(const DeltaRule& rule) { return 2l * rule.key_heads * rule.key_dim + long(rule.value_heads) * rule.value_dim; }
long draft_width(const DeltaRule& rule) { return mixed_width(rule) + 2l * rule.value_heads; }

// Computes `N` vectors of columns from `column` on for all rows. Between rows the columns are in `kept`.
template <class V, int N>
void scan_columns(const Head& in, int column, float* kept) {
    constexpr int kStep = int(sizeof(V) / sizeof(float)), kWidth = N * kStep;
    const DeltaRule& rule = in.rule;
    int keys = rule.key_dim, key_head = in.head / (rule.value_heads / rule.key_heads);
    long outputs = long(rule.value_heads) * rule.value_dim, channels = mixed_width(rule);
    if (in.is_new) std::fill_n(kept, long(keys) * kWidth, 0.0f);
    for (int i = 0; i < in.accepted + in.tokens; i++) {
        bool is_draft = i < in.accepted;  // of the step before: it has no output
        long t = in.first + i - in.accepted;
        const float* row = is_draft ? in.drafts + i * draft_width(rule) : rule.mixed + t * channels;
        const float *q = row + key_head * keys, *k = q + long(rule.key_heads) * keys;
        const float* v = row + 2l * rule.key_heads * keys + long(in.head) * rule.value_dim + column;
        const float* gates = (is_draft ? row + channels : rule.gates + t * rule.value_heads * 2) + in.head * 2;
        bool is_kept = (i || in.is_new) && i != in.committed, is_last = i + 1 == in.committed;
        const float* from = is_kept ? kept : in.state + column;
        float* to = is_last ? in.state + column : kept;
        long from_stride = is_kept ? kWidth : rule.value_dim, to_stride = is_last ? rule.value_dim : kWidth;
        V decay = splat<V>(gates[0]), step = splat<V>(gates[1]), sums[N], out[N];
        for (int n = 0; n < N; n++) sums[n] = out[n] = splat<V>(0.0f);
        for (int j = 0; j < keys; j++) {
            V key = splat<V>(k[j]);
            for (int n = 0; n < N; n++) {
                V value = mul(load_as<V>(from + j * from_stride + n * kStep), decay);
                store_as(kept + j * kWidth + n * kStep, value);
                sums[n] = ember::fma(value, key, sums[n]);
            }
        }
        for (int n = 0; n < N; n++) sums[n] = mul(sub(load_as<V>(v + n * kStep), sums[n]), step);
        for (int j = 0; j < keys; j++) {
            V key = splat<V>(k[j]), query = splat<V>(q[j]);
            for (int n = 0; n < N; n++) {
                V value = ember::fma(key, sums[n], load_as<V>(kept + j * kWidth + n * kStep));
                store_as(to + j * to_stride + n * kStep, value);
                out[n] = ember::fma(value, query, out[n]);
            }
        }
        if (i + 1 == in.saved_after)
            for (int j = 0; j < keys; j++) std::copy_n(to + j * to_stride, kWidth, in.saved + long(j) * rule.value_dim + column);
        if (is_draft) continue;
        float* result = rule.out + t * outputs + long(in.head) * rule.value_dim + column;
        for (int n = 0; n < N; n++) store_as(result + n * kStep, out[n]);
    }
}

void scan_slice(const Head& in, int column, int width) {
    float* kept = scratch(kPartial, long(in.rule.key_dim) * kColumnVecs * kLanes);
    if (width == kColumnVecs * kLanes) return scan_columns<Vec, kColumnVecs>(in, column, kept);
    int end = column + width;
    for (; column + kLanes <= end; column += kLanes) scan_columns<Vec, 1>(in, column, kept);
    for (; column < end; column++) scan_columns<float, 1>(in, column, kept);
}

// Divides a query or key by its length, and multiplies it by `factor`.
void normalize(float* x, int n, float factor) {
    float squares = lane_sum(n, [x](int i) { return x[i] * x[i]; }), scale = factor / std::sqrt(squares + kNormEps);
    for (int i = 0; i < n; i++) x[i] *= scale;
}

// Norms the queries and keys of a token, and computes the factor of the state and the step size of each value head.
void prepare_token(const DeltaRule& rule, int t) {
    int keys = rule.key_dim, heads = rule.value_heads;
    float* mixed = rule.mixed + long(t) * mixed_width(rule);
    float query_factor = 1.0f / std::sqrt(float(keys));
    for (int h = 0; h < 2 * rule.key_heads; h++) normalize(mixed + h * keys, keys, h < rule.key_heads ? query_factor : 1.0f);
    const float *step = rule.steps + long(t) * rule.gate_stride, *time = rule.times + long(t) * rule.gate_stride;
    float* gates = rule.gates + 2l * t * heads;
    for (int h = 0; h < heads; h++) {
        gates[2 * h] = exp_negative(-rule.rates[h] * softplus(time[h] + rule.time_bias[h]));
        gates[2 * h + 1] = sigmoid(step[h]);
    }
}

// Keeps the rows of a sequence's drafted tokens.
void keep_drafts(const DeltaRule& rule, int sequence) {
    const Sequences& in = rule.in;
    int drafted = in.num_drafted(sequence), end = in.query_start[sequence + 1];
    long channels = mixed_width(rule), gates = 2l * rule.value_heads;
    float* to = rule.drafts + in.first_draft_row(sequence) * draft_width(rule);
    for (long t = end - drafted; t < end; t++) {
        to = std::copy_n(rule.mixed + t * channels, channels, to);
        to = std::copy_n(rule.gates + t * gates, gates, to);
    }
}

// The inputs of the convolution at a token of a sequence and before it; before the sequence they are zero.
struct ConvolutionInputs {
    const Convolution& op;
    const float* zeros;

    const float* row(int sequence, int index) const {  // index: from the first new token, which has 0
        if (index >= 0) return op.x + (op.in.query_start[sequence] + index) * op.stride;
        if (!op.in.context[sequence]) return zeros;
        int row = op.in.num_accepted(sequence) + index;
        if (row >= 0) return drafts(sequence) + long(row) * op.channels;
        return state(op.in.slots[sequence]) + long(op.kernel - 1 + row) * op.channels;
    }
    float* state(int slot) const { return op.states + long(slot) * (op.kernel - 1) * op.channels; }
    float* drafts(int sequence) const { return op.drafts + op.in.first_draft_row(sequence) * op.channels; }
};

void convolve_token(const ConvolutionInputs& inputs, int t) {
    const Convolution& op = inputs.op;
    int sequence = sequence_of(op.in, t), index = t - op.in.query_start[sequence];
    for (int begin = 0; begin < op.channels; begin += kChannelBlock) {
        int count = std::min(kChannelBlock, op.channels - begin);
        float* y = op.y + long(t) * op.channels + begin;
        std::fill_n(y, count, 0.0f);
        for (int j = 0; j < op.kernel; j++) {
            const float *x = inputs.row(sequence, index + j - op.kernel + 1) + begin, *w = op.weight + long(j) * op.channels + begin;
            for (int c = 0; c < count; c++) y[c] = ember::fma(w[c], x[c], y[c]);
        }
        for (int c = 0; c < count; c++) y[c] = silu(y[c]);
    }
}

// Copies the last inputs of a sequence before the index `end` to a slot. Rows move to lower indices only, so that none is
// overwritten before it is read.
void copy_inputs(const ConvolutionInputs& inputs, int sequence, int end, int slot) {
    const Convolution& op = inputs.op;
    for (int j = 0; j < op.kernel - 1; j++) {
        const float* from = inputs.row(sequence, end + j - op.kernel + 1);
        float* to = inputs.state(slot) + long(j) * op.channels;
        if (from != to) std::copy_n(from, op.channels, to);
    }
}

// Keeps the last inputs of a sequence, and the inputs of its drafted tokens.
void keep_inputs(const ConvolutionInputs& inputs, int sequence) {
    const Convolution& op = inputs.op;
    const Sequences& in = op.in;
    int end = in.num_tokens(sequence) - in.num_drafted(sequence), after = in.saved_after(sequence);
    if (after) copy_inputs(inputs, sequence, after - in.num_accepted(sequence), in.save_slots[sequence]);
    copy_inputs(inputs, sequence, end, in.slots[sequence]);
    for (int i = 0; i < in.num_drafted(sequence); i++)
        std::copy_n(inputs.row(sequence, end + i), op.channels, inputs.drafts(sequence) + long(i) * op.channels);
}

}  // namespace

extern "C" void ember_convolution(const Convolution* convolution) {
    std::vector<float> zeros(convolution->channels);
    ConvolutionInputs inputs{*convolution, zeros.data()};
    const Sequences& in = convolution->in;
    for_tokens(in.query_start[in.count], [&](int t) { convolve_token(inputs, t); });
    parallel(in.count, [&](long begin, long end) {
        for (long sequence = begin; sequence < end; sequence++) keep_inputs(inputs, int(sequence));
    });
}

extern "C" void ember_delta_rule(const DeltaRule* delta_rule) {
    const DeltaRule& rule = *delta_rule;
    const Sequences& in = rule.in;
    for_tokens(in.query_start[in.count], [&](int t) { prepare_token(rule, t); });
    constexpr int kWidth = kColumnVecs * kLanes;
    int slices = (rule.value_dim + kWidth - 1) / kWidth, heads = rule.value_heads;
    auto matrix = [&](int slot, int head) { return rule.states + (long(slot) * heads + head) * rule.key_dim * rule.value_dim; };
    parallel(in.count * heads * slices, [&](long begin, long end) {
        for (long item = begin; item < end; item++) {
            int slice = int(item % slices), head = int(item / slices % heads), sequence = int(item / slices / heads);
            int tokens = in.num_tokens(sequence), accepted = in.num_accepted(sequence), after = in.saved_after(sequence);
            Head work{rule, matrix(in.slots[sequence], head), after ? matrix(in.save_slots[sequence], head) : nullptr,
                      accepted ? rule.drafts + in.first_draft_row(sequence) * draft_width(rule) : nullptr,
                      in.query_start[sequence], tokens, head, accepted, accepted + tokens - in.num_drafted(sequence), after,
                      in.context[sequence] == 0};
            int column = slice * kWidth;
            scan_slice(work, column, std::min(kWidth, rule.value_dim - column));
        }
    });
    for (int sequence = 0; sequence < in.count; sequence++)
        if (in.num_drafted(sequence)) keep_drafts(rule, sequence);
}

// Norms groups of `k` columns of x, and multiplies them by the silu of the gate.
extern "C" void ember_gated_norm(float* x, const float* gate, long gate_stride, const float* weight, float eps, int m, int groups,
                                 int k) {
    for_tokens(m, [&](int t) {
        for (int g = 0; g < groups; g++) {
            float *row = x + (long(t) * groups + g) * k, scale = rms_scale(row, k, eps);
            const float* z = gate + t * gate_stride + g * k;
            for (int i = 0; i < k; i++) row[i] = row[i] * scale * weight[i] * silu(z[i]);
        }
    });
}

// Multiplies x by the sigmoid of the gate.
extern "C" void ember_sigmoid_gate(float* x, const float* gate, int m, int k) {
    for_tokens(m, [&](int t) {
        for (long i = long(t) * k; i < long(t + 1) * k; i++) x[i] *= sigmoid(gate[i]);
    });
}
