// Exported functions that other sources here call too, and the structures that Python fills (library.py has the same order).
#pragma once

extern "C" {

enum Mode { kStore, kAdd, kGated, kGatedGelu };
// The same numbers as packed_weight.py. From kQ4_0 on: codes and scales of GGUF blocks, see blocks.h.
enum Layout { kBf16, kF32, kTiles, kF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kMxfp4 };

struct Layer {
    const void *qkv, *o, *gate_up, *down, *qkv_tail;
    const float *qkv_bias, *o_bias, *attention_norm, *ffn_norm, *q_norm, *k_norm;
    int qkv_layout, o_layout, gate_up_layout, down_layout, window;
    int tail_layout, tail_rows;  // the last rows of qkv, if they have another layout than the first; 0: there are none
};

struct Expert {
    const void *gate_up, *down;
    const float *gate_up_bias, *down_bias;
    int gate_up_layout, down_layout, gated, ffn;
};

struct Mixture {
    const Expert *experts, *shared;
    const void *router, *shared_gate;
    const float *norm, *router_bias, *correction;
    int router_layout, shared_gate_layout, count, top_k, renormalize, sigmoid, groups, top_groups, group_best, scales_inputs, hidden;
    int first_expert, num_experts;  // of `experts`, which may be a part of all
    float eps, scale, shared_scale, swiglu_alpha, swiglu_limit;  // a limit of 0: the activation is silu
};

struct Step {
    const float* cos_sin;
    const int* positions;
    const long* slots;
    const int *tables, *query_start, *context;
    const long* rows;     // rows that are computed further after the last layer's keys are cached
    char *keys, *values;  // cache of the first layer
    long key_layer_bytes, value_layer_bytes;  // bytes from one layer's cache to the next
    long key_stride, value_stride;            // elements from one block to the next
    int row_count, tokens, sequences, table_stride, f32, rotary, block_size, hidden, ffn, q_heads, kv_heads, dim;
    float eps, scale;
};

// The sequences of a step in a recurrent layer: their tokens, the tokens before, and the slots with their states.
struct Sequences {
    const int *query_start, *context, *slots;
    // States are also copied to `save_slots` after so many rows, 0: not at all. Null: those of no sequence.
    const int *save_slots, *save_after;
    // The last `drafted` tokens of a sequence do not advance its states. Their rows are kept at its place. The states first
    // advance over the first `accepted` of the rows that are there. Null: no sequence has such tokens.
    const int *places, *accepted, *drafted;
    long count, max_draft;  // max_draft: rows of a place

    int num_tokens(long sequence) const { return query_start[sequence + 1] - query_start[sequence]; }
    int num_accepted(long sequence) const { return accepted ? accepted[sequence] : 0; }
    int num_drafted(long sequence) const { return drafted ? drafted[sequence] : 0; }
    int saved_after(long sequence) const { return save_after ? save_after[sequence] : 0; }
    long first_draft_row(long sequence) const { return places ? places[sequence] * max_draft : 0; }
};

struct Convolution {
    Sequences in;
    const float *x, *weight;  // weight: [kernel][channels]
    float *states, *y;        // states: [slots][kernel - 1][channels]
    float* drafts;            // kept rows of x: [places][max_draft][channels]
    long stride;              // of x
    int kernel, channels;
};

struct DeltaRule {
    Sequences in;
    float* mixed;  // queries, keys and values of each token; queries and keys are overwritten
    const float *steps, *times, *rates, *time_bias;
    float *states, *gates, *out;  // gates: memory for 2 numbers for each token and value head
    float* drafts;                // kept rows of `mixed`, each followed by its gates: [places][max_draft][..]
    long gate_stride;             // of steps and times
    int key_heads, value_heads, key_dim, value_dim;
};

void ember_linear(const float* x, const void* w, int layout, int m, int n, int k, const float* bias, const float* norm, float eps,
                  float* y, int mode);

// The same into n columns of rows with a stride.
void ember_linear_columns(const float* x, const void* w, int layout, int m, int n, int k, const float* bias, const float* norm,
                          float eps, float* y, int mode, long stride);

void ember_rms_norm(const float* x, const float* weight, float eps, int m, int k, float* out);

void ember_norm(const float* x, long stride, const float* weight, float eps, int m, int groups, int k, int centered, float* out,
                long out_stride);

// Without `values`, qkv has no values, because they are parts of the keys.
void ember_rope(float* qkv, const int* positions, const float* cos_sin, int rotary, const float* q_norm, const float* k_norm,
                float eps, void* keys, void* values, int f32, long key_stride, long value_stride, const long* slots, int tokens,
                int q_heads, int kv_heads, int dim, int block_size, int interleaved);

void ember_attention(const float* qkv, const void* keys, const void* values, int f32, long key_stride, long value_stride,
                     const int* tables, int table_stride, const int* query_start, const int* context, int sequences, float scale,
                     int window, int chunked, int q_heads, int kv_heads, int dim, int block_size, float softcap,
                     const float* sinks, int latent, float* out);
}
