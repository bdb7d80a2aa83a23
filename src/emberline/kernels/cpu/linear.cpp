// Linear layers with weights packed into panels: [n / kPanel][k][kPanel], read sequentially exactly once at batch 1.
#include <algorithm>
#include <utility>

#include "amx.h"
#include "bf16_dot.h"
#include "blocks.h"
#include "entries.h"
#include "linear.h"
#include "micro.h"
#include "pool.h"

namespace ember {
namespace {

constexpr int kChunk = 640;                  // k of one widened piece of a panel, which stays in L1 with its inputs
static_assert(kChunk % kSpan == 0, "cuts elsewhere would change the bits of results");
constexpr long kInputFloats = 128 * 1024;    // inputs that stay in L2 while all panels are multiplied
constexpr long kSerialFloats = 16 * 1024;    // up to this size, waking a thread costs more than preparing the inputs

template <class B>
void pack(const B* from, B* to, long n, long k, bool gated) {
    parallel((n + kPanel - 1) / kPanel, [=](long begin, long end) {
        for (long p = begin; p < end; p++)
            for (int column = 0; column < kPanel; column++) {
                long row = source_row(p, column, n, gated);
                B* at = to + p * k * kPanel + column;
                for (long i = 0; i < k; i++) at[i * kPanel] = row < 0 ? B{} : from[row * k + i];
            }
    });
}

struct Inputs {
    const float* rows;
    long stride;
};

// Returns the inputs that a product reads: x itself if possible, otherwise a normalised copy. Its row stride is not a multiple of
// 4 KiB, so that rows do not compete for the same cache sets.
Inputs prepare(const Linear& op) {
    if (!op.norm && (op.m == 1 || op.k % 1024)) return {op.x, op.k};
    long stride = op.k + 16;
    float* to = scratch(kInputs, op.m * stride);
    auto prepare_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++) {
            const float* x = op.x + r * op.k;
            float scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
            for (int i = 0; i < op.k; i++) to[r * stride + i] = op.norm ? x[i] * scale * op.norm[i] : x[i];
        }
    };
    if (long(op.m) * op.k <= kSerialFloats) prepare_rows(0, op.m);
    else parallel(op.m, prepare_rows);
    return {to, stride};
}

inline const float* widen_weights(const float* b, long) { return b; }

template <class B>
inline const float* widen_weights(const B* b, long count) {
    float* to = scratch(kWeights, long(kChunk) * kPanel);
    widen_rows(b, count, 1, count, to, count);
    return to;
}

// Multiplies one panel by the row blocks [from, to). A single block reads the panel directly; several share a widened copy.
template <class B>
void run_panel(const Linear& op, const RowBlocks& blocks, int from, int to, Inputs in, const B* weights, long panel) {
    const B* b = weights + panel * op.k * kPanel;
    int first = blocks.start(from), rows = blocks.start(to) - first;
    float* sums = scratch(kSums, long(rows) * kPanel);
    if (to - from == 1) {
        run_tile(rows, Product<B>{in.rows + first * in.stride, in.stride, b, kPanel, op.k, sums, kPanel});
    } else {
        for (int at = 0; at < op.k; at += kChunk) {
            int length = std::min(kChunk, op.k - at);
            const float* wide = widen_weights(b + long(at) * kPanel, long(length) * kPanel);
            for (int block = from; block < to; block++) {
                int row = blocks.start(block);
                const float* a = in.rows + row * in.stride + at;
                float* c = sums + (row - first) * kPanel;
                run_tile(blocks.size(block), Product<float>{a, in.stride, wide, kPanel, length, c, kPanel, at ? kSpans : kFresh});
            }
        }
    }
    write_outputs(op, panel, first, rows, sums);
}

template <class B>
void run(const Linear& op, const B* weights) {
    RowBlocks blocks(op.m);
    Inputs in = prepare(op);
    long panels = (op.n + kPanel - 1) / kPanel;
    int group = int(std::max(8L, kInputFloats / (long(op.k) * kRows)));
    int groups = (blocks.count + group - 1) / group;
    parallel(groups * panels, [&](long begin, long end) {
        for (long task = begin; task < end; task++) {
            int from = int(task / panels) * group, to = std::min(from + group, blocks.count);
            run_panel(op, blocks, from, to, in, weights, task % panels);
        }
    });
}

template <class B>
void gather(const long* ids, long count, const B* table, long k, bool packed, float* out) {
    parallel((count + 15) / 16, [=](long begin, long end) {
        for (long t = begin * 16; t < std::min(end * 16, count); t++) {
            long id = ids[t], stride = packed ? kPanel : 1;
            const B* row = packed ? table + id / kPanel * k * kPanel + id % kPanel : table + id * k;
            for (long i = 0; i < k; i++) out[t * k + i] = widen(row[i * stride]);
        }
    });
}

}  // namespace
}  // namespace ember

using namespace ember;

extern "C" {

int ember_panel() { return kPanel; }

void ember_pack(const void* from, void* to, int layout, int n, int k, int gated) {
    auto pack_tiles = amx::available() ? amx::pack : bf16_dot::pack;
    if (layout == kTiles) pack_tiles(static_cast<const bf16*>(from), static_cast<bf16*>(to), n, k, gated);
    else if (layout == kF32) pack(static_cast<const float*>(from), static_cast<float*>(to), n, k, gated);
    else if (layout == kF16) pack(static_cast<const f16*>(from), static_cast<f16*>(to), n, k, gated);
    else pack(static_cast<const bf16*>(from), static_cast<bf16*>(to), n, k, gated);
}

void ember_linear(const float* x, const void* w, int layout, int m, int n, int k, const float* bias, const float* norm, float eps,
                  float* y, int mode) {
    ember_linear_columns(x, w, layout, m, n, k, bias, norm, eps, y, mode, n);
}

void ember_linear_columns(const float* x, const void* w, int layout, int m, int n, int k, const float* bias, const float* norm,
                          float eps, float* y, int mode, long stride) {
    Linear op{x, m, n, k, bias, norm, eps, y, Mode(mode), stride};
    if (layout >= kQ4_0) run_blocks(op, layout, static_cast<const uint8_t*>(w));
    else if (layout == kTiles) (amx::available() ? amx::run : bf16_dot::run)(op, static_cast<const bf16*>(w));
    else if (layout == kF32) run(op, static_cast<const float*>(w));
    else if (layout == kF16) run(op, static_cast<const f16*>(w));
    else run(op, static_cast<const bf16*>(w));
}

void ember_embed(const long* ids, int count, const void* table, int layout, int k, int packed, float* out) {
    auto embed_tiles = amx::available() ? amx::embed : bf16_dot::embed;
    if (layout >= kQ4_0) embed_blocks(ids, count, layout, static_cast<const uint8_t*>(table), k, out);
    else if (layout == kTiles) embed_tiles(ids, count, static_cast<const bf16*>(table), k, out);
    else if (layout == kF32) gather(ids, count, static_cast<const float*>(table), k, packed, out);
    else if (layout == kF16) gather(ids, count, static_cast<const f16*>(table), k, packed, out);
    else gather(ids, count, static_cast<const bf16*>(table), k, packed, out);
}

void ember_rms_norm(const float* x, const float* weight, float eps, int m, int k, float* out) {
    parallel((m + 15) / 16, [=](long begin, long end) {
        for (long r = begin * 16; r < std::min(end * 16, long(m)); r++) {
            float scale = rms_scale(x + r * k, k, eps);
            for (int i = 0; i < k; i++) out[r * k + i] = x[r * k + i] * scale * weight[i];
        }
    });
}

// Normalises `groups` groups of k columns of each row separately, each with its own part of the weight. An RMS norm, or with
// `centered` a layer norm without bias. `out` may be x.
void ember_norm(const float* x, long stride, const float* weight, float eps, int m, int groups, int k, int centered, float* out,
                long out_stride) {
    parallel((m + 15) / 16, [=](long begin, long end) {
        for (long r = begin * 16; r < std::min(end * 16, long(m)); r++)
            for (long g = 0; g < groups; g++) {
                const float *from = x + r * stride + g * k, *w = weight + g * k;
                float* to = out + r * out_stride + g * k;
                float mean = centered ? lane_sum(k, [from](int i) { return from[i]; }) / float(k) : 0.0f;
                float squares = lane_sum(k, [from, mean](int i) { return (from[i] - mean) * (from[i] - mean); });
                float scale = 1.0f / std::sqrt(squares / float(k) + eps);
                for (int i = 0; i < k; i++) to[i] = (from[i] - mean) * scale * w[i];
            }
    });
}

void ember_soft_cap(float* x, long count, float cap) {
    constexpr long kPiece = 4096;
    parallel((count + kPiece - 1) / kPiece, [=](long begin, long end) {
        for (long i = begin * kPiece; i < std::min(end * kPiece, count); i++) x[i] = soft_cap(x[i], cap);
    });
}

void ember_set_threads(int threads) { set_threads(threads); }
int ember_threads() { return threads(); }
long ember_progress() { return progress(); }
// Whether bf16 weights are packed as kTiles.
int ember_has_bf16() { return amx::available() || bf16_dot::available(); }
const char* ember_isa() { return amx::available() ? amx::kIsa : bf16_dot::available() ? bf16_dot::kIsa : kIsa; }
}
