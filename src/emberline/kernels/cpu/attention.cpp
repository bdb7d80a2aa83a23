// Causal attention over a paged cache.
//
// Keys are split into tiles of kTile from position 0. For each row (query, head) a tile gives the largest score, the sum of
// exponentials and the weighted values, and the tiles are merged into the row's result in order. So the result is determined by
// the row's position only: chunked prefill, the rest of the batch and the number of threads do not change it.
#include <algorithm>
#include <limits>
#include <vector>

#include "amx.h"
#include "entries.h"
#include "exp.h"
#include "micro.h"
#include "pool.h"

namespace ember {
namespace {

constexpr int kTile = 64;
constexpr int kUnitRows = 96;  // rows that share one widened tile of keys and values
constexpr float kMasked = -std::numeric_limits<float>::infinity();

struct Attention {
    const float* qkv;
    const void *keys, *values;
    long key_stride, value_stride;  // elements from one block to the next
    const int *tables, *query_start, *context;
    int table_stride, window, q_heads, kv_heads, dim, block_size;
    int latent;    // values are this many last elements of the keys, and `values` is null; 0: own values
    bool chunked;  // whether the window is the chunk of `window` positions that a query is in, up to the query
    float scale, softcap;  // `softcap` limits scores smoothly to (-softcap, softcap); 0: no limit
    const float* sinks;    // for each query head, a score that joins the sum of exponentials and has no value; null: none
    float* out;

    int group() const { return q_heads / kv_heads; }
    int value_dim() const { return latent ? latent : dim; }
    int padded() const { return (value_dim() + kPanel - 1) / kPanel * kPanel; }
    int first_key(int position) const {
        if (!window) return 0;
        return chunked ? position / window * window : std::max(0, position + 1 - window);
    }
};

// Consecutive queries of one sequence with one KV head. Row r is query r / group, head r % group.
struct Unit {
    int sequence, head, query, rows, position;  // `query`: index in the batch; `position`: index in the sequence
    int tiles;                                  // tiles up to the last key that its last row attends to
};

struct Partial {  // the result of some keys for each row: largest score, sum of exponentials, sum of weighted values
    float *top, *sum, *value;
    Partial(float* at, int rows) : top(at), sum(at + rows), value(at + 2 * rows) {}
    static long floats(int rows, int padded) { return long(rows) * (padded + 2); }
};

std::vector<Unit> make_units(const Attention& op, int sequences) {
    std::vector<Unit> units;
    int group = op.group(), step = std::max(1, kUnitRows / group);
    for (int s = 0; s < sequences; s++)
        for (int q = op.query_start[s]; q < op.query_start[s + 1]; q += step)
            for (int h = 0; h < op.kv_heads; h++) {
                int queries = std::min(step, op.query_start[s + 1] - q);
                int position = op.context[s] + q - op.query_start[s];
                units.push_back({s, h, q, queries * group, position, (position + queries - 1) / kTile + 1});
            }
    return units;
}

template <class Q>
const Q* scaled_queries(const Attention& op, const Unit& unit) {
    int group = op.group(), heads = op.q_heads + (op.latent ? 1 : 2) * op.kv_heads;
    Q* to = reinterpret_cast<Q*>(scratch(kQueries, long(unit.rows) * op.dim));
    for (int r = 0; r < unit.rows; r++) {
        const float* q = op.qkv + (long(unit.query + r / group) * heads + unit.head * group + r % group) * op.dim;
        for (int d = 0; d < op.dim; d++) narrow(q[d] * op.scale, to[long(r) * op.dim + d]);
    }
    return to;
}

// Calls body(keys, values, done) for each run of cached tokens in [start, start + count) that is within a block and a panel.
template <class B, class Body>
void for_each_run(const Attention& op, const Unit& unit, int start, int count, Body body) {
    const int* table = op.tables + long(unit.sequence) * op.table_stride;
    int size = op.block_size, run = std::min(size, kPanel);
    for (int done = 0; done < count; done += run) {
        int block = table[(start + done) / size], offset = (start + done) % size;
        long head = long(unit.head) * size * op.dim;
        const B* keys = static_cast<const B*>(op.keys) + block * op.key_stride + head + offset;
        if (op.latent) body(keys, keys, done);  // no values of their own
        else body(keys, static_cast<const B*>(op.values) + block * op.value_stride + head + long(offset) * op.dim, done);
    }
}

// Copies the values inside `count` widened keys, a panel [dim][kPanel], to rows [count][padded].
inline void transpose_values(const Attention& op, const float* panel, int count, float* values) {
    const float* from = panel + long(op.dim - op.latent) * kPanel;
    int padded = op.padded();
    for (int j = 0; j < count; j++) {
        for (int d = 0; d < op.latent; d++) values[long(j) * padded + d] = from[d * kPanel + j];
        std::fill(values + long(j) * padded + op.latent, values + long(j + 1) * padded, 0.0f);
    }
}

// Widens the tile's keys to panels [kTile / kPanel][dim][kPanel] and its values to [kTile][padded]. The last run is copied whole,
// beyond `count`: attend_rows masks those keys and never multiplies those values.
template <class B>
void gather(const Attention& op, const Unit& unit, int start, int count, float* keys, float* values) {
    int size = op.block_size, dim = op.dim, padded = op.padded(), run = std::min(size, kPanel);
    for_each_run<B>(op, unit, start, count, [&](const B* k, const B* v, int done) {
        float* panel = keys + done / kPanel * dim * kPanel + done % kPanel;
        widen_rows(k, size, dim, run, panel, kPanel);
        if (op.latent) transpose_values(op, panel, run, values + long(done) * padded);
        else widen_rows(v, dim, run, dim, values + long(done) * padded, padded);
    });
}

// Prefetches the next tile. Blocks are at arbitrary addresses, so the hardware prefetcher cannot predict them.
template <class B>
void prefetch(const Attention& op, const Unit& unit, int start, int count) {
    long bytes = long(std::min(op.block_size, kPanel)) * op.dim * long(sizeof(B));
    for_each_run<B>(op, unit, start, count, [&](const B* k, const B* v, int) {
        for (long at = 0; at < bytes; at += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(k) + at);
            __builtin_prefetch(reinterpret_cast<const char*>(v) + at);
        }
    });
}

// Turns one row of scores into softmax weights. Only the keys [from, to) are visible; the others get a weight of exactly 0.
inline void softmax_row(float* score, int from, int to, float& top, float& sum) {
    auto fill_masked = [&](float with) {
        for (int j = 0; j < from; j++) score[j] = with;
        for (int j = to; j < kTile; j++) score[j] = with;
    };
    fill_masked(kMasked);
    Vec max_score = load(score), all = splat<Vec>(0.0f);
    for (int j = kLanes; j < kTile; j += kLanes) max_score = max(max_score, load(score + j));
    top = largest(max_score);
    Vec shift = splat<Vec>(top);
    for (int j = 0; j < kTile; j += kLanes) store(score + j, exp_negative(sub(load(score + j), shift)));
    fill_masked(0.0f);
    for (int j = 0; j < kTile; j += kLanes) all = add(all, load(score + j));
    sum = total(all);
}

// A tile's keys and values, widened to float, for many rows.
struct WidenedTile {
    const Attention& op;
    const float *keys, *values;

    void scores(int rows, const float* query, int visible, float* score) const {
        for (int j = 0; j < visible; j += kPanel)
            run_tile(rows, Product<float>{query, op.dim, keys + j * op.dim, kPanel, op.dim, score + j, kTile});
    }
    void mix(int rows, const float* score, int visible, float* value) const {
        int padded = op.padded();
        for (int d = 0; d < padded; d += kPanel)
            run_tile(rows, Product<float>{score, kTile, values + d, padded, visible, value + d, padded});
    }
};

// A tile's keys and values read directly from the cache, which saves a copy, for few rows. Blocks and heads must be whole panels.
// A sum over values crosses blocks, so each block continues the chain of the previous one: kTile is within a span.
template <class B>
struct InPlaceTile {
    const Attention& op;
    const Unit& unit;
    int start;

    static bool fits(const Attention& op) { return !op.latent && op.block_size % kPanel == 0 && op.dim % kPanel == 0; }

    void scores(int rows, const float* query, int visible, float* score) const {
        for_each_run<B>(op, unit, start, visible, [&](const B* k, const B*, int done) {
            run_tile(rows, Product<B>{query, op.dim, k, op.block_size, op.dim, score + done, kTile});
        });
    }
    static constexpr Start kContinue = kTile <= kSpan ? kChain : kSpans;
    void mix(int rows, const float* score, int visible, float* value) const {
        for_each_run<B>(op, unit, start, visible, [&](const B*, const B* v, int done) {
            int count = std::min(kPanel, visible - done);
            for (int d = 0; d < op.dim; d += kPanel)
                run_tile(rows, Product<B>{score + done, kTile, v + d, op.dim, count, value + d, op.dim, done ? kContinue : kFresh});
        });
    }
};
// The spans are the same as in the widened tile: the tile is one span, or each run is one.
static_assert(kTile <= kSpan || kPanel == kSpan);

#if EMBER_AMX
// A tile's keys and values for AMX, rows interleaved in pairs: keys [dim / 2][kTile][2], values [kTile / 2][dim][2]. Queries and
// weights are rounded to bf16. Masked keys have weight 0 and missing values are 0, so neither changes the bits of the result.
struct AmxTile {
    const Attention& op;
    amx::TileRegisters& tiles;
    bf16 *keys, *values;

    static bool fits(const Attention& op) { return !op.latent && amx::available() && op.dim % amx::kDepth == 0; }

    void gather(const Unit& unit, int start, int count) const {
        int size = op.block_size, dim = op.dim, run = std::min(size, kPanel);
        for_each_run<bf16>(op, unit, start, count, [&](const bf16* k, const bf16* v, int done) {
            amx::pair_rows(k, size, dim, run, keys + 2 * done, kTile);
            amx::pair_rows(v, dim, run, dim, values + long(done) * dim, dim);
        });
        if (count % 2)
            for (int d = 0; d < dim; d++) values[long(count / 2) * 2 * dim + 2 * d + 1] = bf16{};
        std::fill(values + long(count + 1) / 2 * 2 * dim, values + long(kTile) * dim, bf16{});
    }
    void scores(int rows, const bf16* query, int visible, float* score) const {
        amx::Operand a{query, long(amx::kSide) * op.dim, amx::kDepth, op.dim};
        for (int j = 0; j < visible; j += amx::kBlock) {
            amx::Operand b{keys + 2 * j, 2 * amx::kSide, amx::kDepth * kTile, 2 * kTile};
            amx::multiply(tiles, rows, a, b, op.dim / amx::kDepth, score + j, kTile);
        }
    }
    void mix(int rows, const float* score, int visible, float* value) const {
        alignas(64) bf16 weights[amx::kBlock * kTile];
        for (int i = 0; i < rows * kTile; i += amx::kDepth) amx::round_to_bf16(score + i, weights + i);
        amx::Operand a{weights, amx::kSide * kTile, amx::kDepth, kTile};
        for (int d = 0; d < op.dim; d += amx::kBlock) {
            amx::Operand b{values + 2 * d, 2 * amx::kSide, long(amx::kDepth) * op.dim, 2L * op.dim};
            amx::multiply(tiles, rows, a, b, (visible + amx::kDepth - 1) / amx::kDepth, value + d, op.dim);
        }
    }
};
#endif

// Computes the partial results of one block of rows for one tile.
template <class Q, class Tile>
void attend_rows(const Attention& op, const Unit& unit, int first, int rows, int start, const Q* queries, const Tile& tile,
                 Partial& to) {
    int group = op.group();
    int newest = unit.position + (first + rows - 1) / group, visible = std::min(kTile, newest + 1 - start);
    float* score = scratch(kScores, long(rows) * kTile);
    tile.scores(rows, queries + long(first) * op.dim, visible, score);
    if (op.softcap > 0.0f)
        for (int i = 0; i < rows * kTile; i++) score[i] = soft_cap(score[i], op.softcap);  // also of masked keys
    for (int r = 0; r < rows; r++) {
        int position = unit.position + (first + r) / group;
        int from = std::clamp(op.first_key(position) - start, 0, kTile);
        int until = std::clamp(position + 1 - start, 0, kTile);
        softmax_row(score + r * kTile, std::min(from, until), until, to.top[first + r], to.sum[first + r]);
    }
    tile.mix(rows, score, visible, to.value + long(first) * op.padded());
}

template <class Q, class Tile>
void attend_blocks(const Attention& op, const Unit& unit, RowBlocks blocks, int start, const Q* queries, const Tile& tile,
                   Partial to) {
    for (int b = 0; b < blocks.count; b++) {
        int first = blocks.start(b), rows = blocks.size(b), group = op.group();
        int last = unit.position + (first + rows - 1) / group, first_visible = op.first_key(unit.position + first / group);
        if (start > last || start + kTile <= first_visible) std::fill_n(to.top + first, rows, kMasked);
        else attend_rows(op, unit, first, rows, start, queries, tile, to);
    }
}

template <class B>
void attend(const Attention& op, const Unit& unit, int number, const float* queries, Partial to) {
    int start = number * kTile, remaining = unit.position + (unit.rows - 1) / op.group() + 1 - start;
    RowBlocks blocks(unit.rows);
    bool in_place = blocks.count == 1 && InPlaceTile<B>::fits(op);
    float* keys = scratch(kKeys, long(op.dim) * kTile);
    float* values = scratch(kValues, long(op.padded()) * kTile);
    if (!in_place) gather<B>(op, unit, start, std::min(kTile, remaining), keys, values);
    prefetch<B>(op, unit, start + kTile, std::min(kTile, remaining - kTile));
    if (in_place) attend_blocks(op, unit, blocks, start, queries, InPlaceTile<B>{op, unit, start}, to);
    else attend_blocks(op, unit, blocks, start, queries, WidenedTile{op, keys, values}, to);
}

#if EMBER_AMX
template <class B>
void attend(const Attention& op, const Unit& unit, int number, const bf16* queries, Partial to) {
    int start = number * kTile, remaining = unit.position + (unit.rows - 1) / op.group() + 1 - start;
    bf16* keys = reinterpret_cast<bf16*>(scratch(kKeys, long(op.dim) * kTile));
    bf16* values = reinterpret_cast<bf16*>(scratch(kValues, long(op.dim) * kTile));
    amx::TileRegisters tiles;
    AmxTile tile{op, tiles, keys, values};
    tile.gather(unit, start, std::min(kTile, remaining));
    prefetch<B>(op, unit, start + kTile, std::min(kTile, remaining - kTile));
    attend_blocks(op, unit, RowBlocks(unit.rows, amx::kBlock), start, queries, tile, to);
}
#endif

void merge(const Partial& tile, Partial& all, int rows, int padded) {
    for (int r = 0; r < rows; r++) {
        if (tile.top[r] == kMasked) continue;
        float difference = tile.top[r] - all.top[r], scale_down = exp_negative(-std::fabs(difference));  // e^0 is exactly 1
        float old_scale = difference > 0.0f ? scale_down : 1.0f, new_scale = difference > 0.0f ? 1.0f : scale_down;
        all.top[r] = std::max(all.top[r], tile.top[r]);
        all.sum[r] = fma(all.sum[r], old_scale, tile.sum[r] * new_scale);
        float *to = all.value + long(r) * padded, *from = tile.value + long(r) * padded;
        Vec old_scales = splat<Vec>(old_scale), new_scales = splat<Vec>(new_scale);
        for (int d = 0; d < padded; d += kLanes) store(to + d, fma(load(to + d), old_scales, mul(load(from + d), new_scales)));
    }
}

// Merges the unit's tiles, each given by `partial(tile)`, and writes the rows.
template <class Fetch>
void merge_and_write(const Attention& op, const Unit& unit, Fetch partial) {
    int padded = op.padded(), group = op.group();
    long floats = Partial::floats(unit.rows, padded);
    float* memory = scratch(kMerge, floats);
    Partial all(memory, unit.rows);
    std::fill_n(memory, floats, 0.0f);
    std::fill_n(all.top, unit.rows, kMasked);
    for (int r = 0; op.sinks && r < unit.rows; r++) all.top[r] = op.sinks[unit.head * group + r % group], all.sum[r] = 1.0f;
    for (int t = op.first_key(unit.position) / kTile; t < unit.tiles; t++) merge(partial(t), all, unit.rows, padded);
    for (int r = 0; r < unit.rows; r++) {
        float* out = op.out + (long(unit.query + r / group) * op.q_heads + unit.head * group + r % group) * op.value_dim();
        for (int d = 0; d < op.value_dim(); d++) out[d] = all.value[long(r) * padded + d] / all.sum[r];
    }
}

template <class B, class Q>
void run_units(const Attention& op, const std::vector<Unit>& units) {
    parallel(long(units.size()), [&](long begin, long end) {
        for (long u = begin; u < end; u++) {
            const Unit& unit = units[u];
            const Q* queries = scaled_queries<Q>(op, unit);
            Partial partial(scratch(kPartial, Partial::floats(unit.rows, op.padded())), unit.rows);
            merge_and_write(op, unit, [&](int tile) {
                attend<B>(op, unit, tile, queries, partial);
                return partial;
            });
        }
    });
}

// Parallelises over tiles, if there are too few units for all cores. Partial results are kept until all tiles are computed.
template <class B, class Q>
void run_tiles(const Attention& op, const std::vector<Unit>& units) {
    std::vector<std::pair<int, int>> tasks;
    std::vector<long> start{0};
    for (size_t u = 0; u < units.size(); u++) {
        for (int t = 0; t < units[u].tiles; t++) tasks.emplace_back(int(u), t);
        start.push_back(start.back() + units[u].tiles * Partial::floats(units[u].rows, op.padded()));
    }
    float* memory = scratch(kPartial, start.back());
    auto at = [&](int u, int t) {
        return Partial(memory + start[u] + t * Partial::floats(units[u].rows, op.padded()), units[u].rows);
    };
    parallel(long(tasks.size()), [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            auto [u, t] = tasks[i];
            attend<B>(op, units[u], t, scaled_queries<Q>(op, units[u]), at(u, t));
        }
    });
    for (size_t u = 0; u < units.size(); u++) merge_and_write(op, units[u], [&](int t) { return at(int(u), t); });
}

template <class B, class Q>
void run(const Attention& op, int sequences) {
    std::vector<Unit> units = make_units(op, sequences);
    bool few_units = long(units.size()) < 4L * threads();
    bool has_many_tiles = std::any_of(units.begin(), units.end(), [](const Unit& u) { return u.tiles > 1; });
    if (few_units && has_many_tiles && threads() > 1) run_tiles<B, Q>(op, units);
    else run_units<B, Q>(op, units);
}

}  // namespace
}  // namespace ember

using namespace ember;

extern "C" void ember_attention(const float* qkv, const void* keys, const void* values, int f32, long key_stride,
                                long value_stride, const int* tables, int table_stride, const int* query_start,
                                const int* context, int sequences, float scale, int window, int chunked, int q_heads,
                                int kv_heads, int dim, int block_size, float softcap, const float* sinks, int latent,
                                float* out) {
    Attention op{qkv, keys, values, key_stride, value_stride, tables, query_start, context, table_stride,
                 window, q_heads, kv_heads, dim, block_size, latent, chunked != 0, scale, softcap, sinks, out};
    if (f32) return run<float, float>(op, sequences);
#if EMBER_AMX
    if (AmxTile::fits(op)) return run<bf16, bf16>(op, sequences);
#endif
    run<bf16, float>(op, sequences);
}
