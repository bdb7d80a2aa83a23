// Linear layers whose weights are blocks of codes (blocks.h). The inputs of a row are rounded to int8, each 32 with a common scale.
//
// A block's sum of products of integers is exact. An output adds its blocks in the order of k, each with one fused multiply-add, and
// one more for the minimum. So its bits depend on its own row and column only, as in micro.h.
#include <algorithm>
#include <utility>

#include "blocks.h"
#include "linear.h"
#include "micro.h"
#include "pool.h"

namespace ember {
namespace {

constexpr int kDirectRows = 4;              // up to so many rows, a tile unpacks codes in registers; more share an unpacked copy
constexpr int kTileRows = 8;                // rows of a tile that reads the copy
constexpr int kPieceBlocks = 48;            // blocks of one vector of columns that are unpacked at once and stay in L1
constexpr long kGroupBytes = 256 * 1024;    // rounded inputs that stay in L2 while all panels are multiplied
constexpr long kSerialInputs = 16 * 1024;   // up to so many, waking a thread costs more than rounding them
constexpr float kSmallest = 1e-30f;         // blocks of smaller inputs count as zero: their scale has no inverse

// Rounded inputs: for each row, k codes, and for each block its scale, the sums of its runs at the start, and scale * sum of codes.
struct Rounded {
    const int8_t* codes;
    const float *scale, *total;
    const int32_t* start;
    long stride, blocks, runs;

    Rounded from(long row, long block) const {
        long at = row * blocks + block;
        return {codes + row * stride + block * kBlock, scale + at, total + at, start + at * runs, stride, blocks, runs};
    }
};

// Rounds 32 inputs and returns their scale. NaN and infinity make the scale NaN or infinity.
inline float round_block(const float* x, int8_t* codes) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlock; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float size;
    std::memcpy(&size, &largest, 4);
    bool none = size < kSmallest;
    float inverse = none ? 0.0f : 127.0f / size;
    for (int i = 0; i < kBlock; i++) {
        float shifted = x[i] * inverse + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        codes[i] = int8_t(bits);
    }
    return none ? 0.0f : size / 127.0f;
}

Rounded round_inputs(const Linear& op, BlockFormat format) {
    long blocks = op.k / kBlock, runs = format.runs(), stride = op.k + 64;
    long words = stride / 4 + blocks * (2 + runs);
    float* memory = scratch(kInputs, op.m * words);
    auto* codes = reinterpret_cast<int8_t*>(memory);
    float *scale = memory + op.m * (stride / 4), *total = scale + op.m * blocks;
    auto* start = reinterpret_cast<int32_t*>(total + op.m * blocks);
    auto round_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++) {
            const float* x = op.x + r * op.k;
            float norm_scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
            for (long b = 0; b < blocks; b++) {
                float values[kBlock];
                for (int i = 0; i < kBlock; i++)
                    values[i] = op.norm ? x[b * kBlock + i] * norm_scale * op.norm[b * kBlock + i] : x[b * kBlock + i];
                int8_t* to = codes + r * stride + b * kBlock;
                long at = r * blocks + b;
                scale[at] = round_block(values, to);
                int sum = 0;
                for (long u = 0; u < runs; u++) {
                    int part = 0;
                    for (int i = 0; i < format.run; i++) part += to[u * format.run + i];
                    start[at * runs + u] = -format.offset * part;
                    sum += part;
                }
                total[at] = scale[at] * float(sum);
            }
        }
    };
    if (long(op.m) * op.k <= kSerialInputs) round_rows(0, op.m);
    else parallel(op.m, round_rows);
    return {codes, scale, total, start, stride, blocks, runs};
}

template <CodeRange Range, int First, int... S>
inline __attribute__((always_inline)) Ints dot_run(Ints sum, const Codes* codes, const InputBlock& inputs,
                                                   std::integer_sequence<int, S...>) {
    ((sum = dot<Range, First + S>(sum, codes[First + S], inputs)), ...);
    return sum;
}

// Adds the products of one block to the sums of one row.
template <BlockFormat F, int... U>
inline __attribute__((always_inline)) Vec add_block(Vec sum, const UnpackedBlock<F.runs()>& w, const Rounded& in,
                                                    std::integer_sequence<int, U...>) {
    constexpr int steps = F.run / 4;
    InputBlock inputs = load_inputs(in.codes);
    float scale = *in.scale;
    ((sum = fma(to_float(dot_run<F.range, U * steps>(splat_ints(F.offset ? in.start[U] : 0), w.codes, inputs,
                                                     std::make_integer_sequence<int, steps>{})),
                mul(w.scale[U], splat<Vec>(scale)), sum)),
     ...);
    if constexpr (F.minima) sum = fma(w.minimum, splat<Vec>(*in.total), sum);
    return sum;
}

// Multiplies R rows by one panel, whose codes are unpacked in registers.
template <BlockFormat F, int R>
void multiply_direct(const uint8_t* panel, const Rounded& in, int first, float* sums) {
    Vec sum[R][kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < R * kVecs; i++) sum[i / kVecs][i % kVecs] = splat<Vec>(0.0f);
    for (long b = 0; b < in.blocks; panel += F.group_bytes())
        for (int sub = 0; sub < F.blocks; sub++, b++) {
            const uint8_t* block = panel + F.header_bytes() + sub * F.block_bytes();
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; v++) {
                UnpackedBlock<F.runs()> w;
                unpack<F>(panel, block, v, w);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    sum[r][v] = add_block<F>(sum[r][v], w, in.from(first + r, b), std::make_integer_sequence<int, F.runs()>{});
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < R * kVecs; i++) store(sums + i / kVecs * kPanel + i % kVecs * kLanes, sum[i / kVecs][i % kVecs]);
}

// What matters of a format once codes are unpacked to bytes.
constexpr BlockFormat unpacked_format(BlockFormat f) { return {1, 8, f.minima, f.run, f.offset != 0, f.range}; }
constexpr int unpacked_bytes(BlockFormat f) { return (kSteps + f.runs() + f.minima) * kCodeBytes; }

template <BlockFormat F>
void unpack_piece(const uint8_t* panel, int v, long first_block, long count, uint8_t* to) {
    for (long b = first_block; b < first_block + count; b++, to += unpacked_bytes(F)) {
        const uint8_t* group = panel + b / F.blocks * F.group_bytes();
        UnpackedBlock<F.runs()> w;
        unpack<F>(group, group + F.header_bytes() + b % F.blocks * F.block_bytes(), v, w);
        for (int s = 0; s < kSteps; s++) store_codes(to + s * kCodeBytes, w.codes[s]);
        auto* scales = reinterpret_cast<float*>(to + kSteps * kCodeBytes);
        for (int u = 0; u < F.runs(); u++) store(scales + u * kLanes, w.scale[u]);
        if constexpr (F.minima) store(scales + F.runs() * kLanes, w.minimum);
    }
}

// Multiplies R rows by unpacked blocks of one vector of columns. F is an unpacked_format().
template <BlockFormat F, int R>
void multiply_unpacked(const uint8_t* blocks, long count, const Rounded& in, int first, long first_block, float* sums) {
    Vec sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = first_block ? load(sums + r * kPanel) : splat<Vec>(0.0f);
    for (long b = 0; b < count; b++, blocks += unpacked_bytes(F)) {
        UnpackedBlock<F.runs()> w;
#pragma GCC unroll 8
        for (int s = 0; s < kSteps; s++) w.codes[s] = load_codes(blocks + s * kCodeBytes);
        const auto* scales = reinterpret_cast<const float*>(blocks + kSteps * kCodeBytes);
        w.scale[0] = load(scales);
        if constexpr (F.runs() > 1) w.scale[1] = load(scales + kLanes);
        if constexpr (F.minima) w.minimum = load(scales + F.runs() * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            sum[r] = add_block<F>(sum[r], w, in.from(first + r, first_block + b), std::make_integer_sequence<int, F.runs()>{});
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + r * kPanel, sum[r]);
}

template <BlockFormat F, int... R>
void run_direct(int rows, const uint8_t* panel, const Rounded& in, int first, float* sums, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const uint8_t*, const Rounded&, int, float*);
    constexpr Tile all[] = {multiply_direct<F, R + 1>...};
    all[rows - 1](panel, in, first, sums);
}

template <BlockFormat F, int... R>
void run_unpacked(int rows, const uint8_t* blocks, long count, const Rounded& in, int first, long first_block, float* sums,
                  std::integer_sequence<int, R...>) {
    using Tile = void (*)(const uint8_t*, long, const Rounded&, int, long, float*);
    constexpr Tile all[] = {multiply_unpacked<F, R + 1>...};
    all[rows - 1](blocks, count, in, first, first_block, sums);
}

// Multiplies one panel by `rows` rows.
template <BlockFormat F>
void run_panel(const Linear& op, const Rounded& in, const uint8_t* panel, long number, int first, int rows) {
    float* sums = scratch(kSums, long(rows) * kPanel);
    if (rows <= kDirectRows) {
        run_direct<F>(rows, panel, in, first, sums, std::make_integer_sequence<int, kDirectRows>{});
    } else {
        RowBlocks tiles(rows, kTileRows);
        auto* copy = reinterpret_cast<uint8_t*>(scratch(kWeights, kPieceBlocks * unpacked_bytes(F) / 4));
        for (int v = 0; v < kVecs; v++)
            for (long at = 0; at < in.blocks; at += kPieceBlocks) {
                long count = std::min<long>(kPieceBlocks, in.blocks - at);
                unpack_piece<F>(panel, v, at, count, copy);
                for (int tile = 0; tile < tiles.count; tile++) {
                    int row = tiles.start(tile);
                    run_unpacked<unpacked_format(F)>(tiles.size(tile), copy, count, in, first + row, at,
                                                     sums + row * kPanel + v * kLanes,
                                                     std::make_integer_sequence<int, kTileRows>{});
                }
            }
    }
    write_outputs(op, number, first, rows, sums);
}

template <int L>
void run(const Linear& op, const uint8_t* weights) {
    constexpr BlockFormat F = block_format(L);
    Rounded in = round_inputs(op, F);
    long panels = (op.n + kPanel - 1) / kPanel, panel_bytes = F.panel_bytes(op.k);
    RowBlocks groups(op.m, int(std::max(32L, kGroupBytes / op.k)));
    parallel(groups.count * panels, [&](long begin, long end) {
        for (long task = begin; task < end; task++) {
            int group = int(task / panels);
            long panel = task % panels;
            run_panel<F>(op, in, weights + panel * panel_bytes, panel, groups.start(group), groups.size(group));
        }
    });
}

}  // namespace

void run_blocks(const Linear& op, int layout, const uint8_t* weights) {
    with_layout(layout, [&](auto l) { run<l>(op, weights); });
}

}  // namespace ember
