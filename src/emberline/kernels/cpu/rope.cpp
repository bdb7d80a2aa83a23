// Between the qkv product and attention: optional norms per head, rotary position embedding, and the writes into the KV cache.
#include <algorithm>

#include "entries.h"
#include "pool.h"
#include "scalar.h"

namespace ember {
namespace {

constexpr int kSerialTokens = 4;  // up to this number, waking a thread costs more than the work

struct Rope {
    float* qkv;
    const int* positions;
    const float* cos_sin;
    int rotary;
    const float *q_norm, *k_norm;
    float eps;
    void *keys, *values;
    long key_stride, value_stride;
    const long* slots;
    int q_heads, kv_heads, dim, block_size;
    bool interleaved;  // whether pairs of rotated dimensions are neighbours, and not half of the rotated dimensions apart
};

void norm_and_rotate(float* x, const float* norm, float eps, const float* cos_sin, int rotary, int dim, bool interleaved) {
    if (norm) {
        float scale = rms_scale(x, dim, eps);
        for (int i = 0; i < dim; i++) x[i] = x[i] * scale * norm[i];
    }
    int half = rotary / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

template <class B>
void run_token(const Rope& op, long t) {
    int dim = op.dim, size = op.block_size;
    const float* angles = op.cos_sin + long(op.positions[t]) * op.rotary;
    float* q = op.qkv + t * (op.q_heads + (op.values ? 2 : 1) * op.kv_heads) * dim;
    float *k = q + op.q_heads * dim, *v = k + op.kv_heads * dim;
    for (int h = 0; h < op.q_heads; h++) norm_and_rotate(q + h * dim, op.q_norm, op.eps, angles, op.rotary, dim, op.interleaved);
    for (int h = 0; h < op.kv_heads; h++) norm_and_rotate(k + h * dim, op.k_norm, op.eps, angles, op.rotary, dim, op.interleaved);
    long slot = op.slots[t];
    if (slot < 0) return;
    long block = slot / size, offset = slot % size;
    B* keys = static_cast<B*>(op.keys) + block * op.key_stride + offset;
    if (!op.values) {  // values are parts of the keys
        for (long i = 0; i < op.kv_heads * dim; i++) narrow(k[i], keys[i * size]);
        return;
    }
    B* values = static_cast<B*>(op.values) + block * op.value_stride + offset * dim;
    for (long h = 0; h < op.kv_heads; h++)
        for (int i = 0; i < dim; i++) {
            narrow(k[h * dim + i], keys[(h * dim + i) * size]);
            narrow(v[h * dim + i], values[h * size * dim + i]);
        }
}

template <class B>
void run(const Rope& op, long tokens) {
    auto run_tokens = [&](long begin, long end) {
        for (long t = begin; t < end; t++) run_token<B>(op, t);
    };
    if (tokens <= kSerialTokens) run_tokens(0, tokens);
    else parallel(tokens, run_tokens);
}

}  // namespace
}  // namespace ember

using namespace ember;

extern "C" void ember_rope(float* qkv, const int* positions, const float* cos_sin, int rotary, const float* q_norm,
                           const float* k_norm, float eps, void* keys, void* values, int f32, long key_stride,
                           long value_stride, const long* slots, int tokens, int q_heads, int kv_heads, int dim, int block_size,
                           int interleaved) {
    Rope op{qkv, positions, cos_sin, rotary, q_norm, k_norm, eps, keys, values, key_stride, value_stride, slots,
            q_heads, kv_heads, dim, block_size, interleaved != 0};
    if (f32) run<float>(op, tokens);
    else run<bf16>(op, tokens);
}
