// Consecutive dense decoder layers in one call. Each layer is the same ops Python would have called, in the same order, so
// the bits are the same; what is saved is the way through Python between them, during which the other threads wait.
#include "entries.h"
#include "pool.h"

extern "C" void ember_stack(const Step* step, const Layer* layers, int count, float* x) {
    using namespace ember;
    const Step& s = *step;
    int q = s.q_heads * s.dim, width = q + 2 * s.kv_heads * s.dim;
    float* qkv = scratch(kQkv, long(s.tokens) * width);
    float* mixed = scratch(kMixed, long(s.tokens) * q);
    float* gated = scratch(kGate, long(s.tokens) * s.ffn);
    for (const Layer* l = layers; l < layers + count; l++) {
        ember_linear(x, l->qkv, l->layout, s.tokens, width, s.hidden, l->qkv_bias, l->attention_norm, s.eps, qkv, kStore);
        ember_rope(qkv, s.positions, s.cos_sin, s.rotary, l->q_norm, l->k_norm, s.eps, l->keys, l->values, s.wide, s.key_stride,
                   s.value_stride, s.slots, s.tokens, s.q_heads, s.kv_heads, s.dim, s.block_size);
        ember_attention(qkv, l->keys, l->values, s.wide, s.key_stride, s.value_stride, s.tables, s.table_stride, s.query_start,
                        s.context, s.sequences, s.scale, l->window, s.q_heads, s.kv_heads, s.dim, s.block_size, mixed);
        ember_linear(mixed, l->o, l->layout, s.tokens, s.hidden, q, l->o_bias, nullptr, 0.0f, x, kAdd);
        ember_linear(x, l->gate_up, l->layout, s.tokens, 2 * s.ffn, s.hidden, nullptr, l->ffn_norm, s.eps, gated, kGated);
        ember_linear(gated, l->down, l->layout, s.tokens, s.hidden, s.ffn, nullptr, nullptr, 0.0f, x, kAdd);
    }
}
