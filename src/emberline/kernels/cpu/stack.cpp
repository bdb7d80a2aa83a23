// Consecutive dense decoder layers in one call. Each layer consists of the same ops that Python would call, in the same order, so
// the bits are the same. This saves the time in Python between ops, during which the other threads would wait.
#include <algorithm>

#include "entries.h"
#include "pool.h"

using namespace ember;

namespace {

void gather(const float* from, const long* rows, int count, int width, float* to) {
    for (int i = 0; i < count; i++) std::copy_n(from + rows[i] * width, width, to + long(i) * width);
}

}  // namespace

extern "C" void ember_stack(const Step* step, const Layer* layers, int count, float* x, float* out) {
    const Step& s = *step;
    int q = s.q_heads * s.dim, width = q + 2 * s.kv_heads * s.dim, tokens = s.tokens;
    float* qkv = scratch(kQkv, long(tokens) * width);
    float* mixed = scratch(kMixed, long(tokens) * q);
    float* gated = scratch(kGate, long(tokens) * s.ffn);
    for (int i = 0; i < count; i++) {
        const Layer& l = layers[i];
        void *keys = s.keys + i * s.key_layer_bytes, *values = s.values + i * s.value_layer_bytes;
        int head = width - l.tail_rows;
        ember_linear_columns(x, l.qkv, l.qkv_layout, tokens, head, s.hidden, l.qkv_bias, l.attention_norm, s.eps, qkv, kStore, width);
        if (l.tail_rows)
            ember_linear_columns(x, l.qkv_tail, l.tail_layout, tokens, l.tail_rows, s.hidden, l.qkv_bias ? l.qkv_bias + head : nullptr,
                                 l.attention_norm, s.eps, qkv + head, kStore, width);
        ember_rope(qkv, s.positions, s.cos_sin, s.rotary, l.q_norm, l.k_norm, s.eps, keys, values, s.f32, s.key_stride,
                   s.value_stride, s.slots, tokens, s.q_heads, s.kv_heads, s.dim, s.block_size, 0);
        bool last = i == count - 1;
        if (last && !s.row_count) return;
        ember_attention(qkv, keys, values, s.f32, s.key_stride, s.value_stride, s.tables, s.table_stride, s.query_start,
                        s.context, s.sequences, s.scale, l.window, 0, s.q_heads, s.kv_heads, s.dim, s.block_size, 0.0f,
                        nullptr, 0, mixed);
        if (last) {
            gather(x, s.rows, s.row_count, s.hidden, out);
            gather(mixed, s.rows, s.row_count, q, qkv);  // qkv is no longer needed
            x = out, mixed = qkv, tokens = s.row_count;
        }
        ember_linear(mixed, l.o, l.o_layout, tokens, s.hidden, q, l.o_bias, nullptr, 0.0f, x, kAdd);
        ember_linear(x, l.gate_up, l.gate_up_layout, tokens, 2 * s.ffn, s.hidden, nullptr, l.ffn_norm, s.eps, gated, kGated);
        ember_linear(gated, l.down, l.down_layout, tokens, s.hidden, s.ffn, nullptr, nullptr, 0.0f, x, kAdd);
    }
}
