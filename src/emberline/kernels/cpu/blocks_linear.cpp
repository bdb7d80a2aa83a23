// Linear layers whose weights are blocks of codes (blocks.h). The inputs of a row are rounded to int8, each 32 with a common scale.
//
// A block's sum of products of integers is exact. An output adds its blocks in the order of k, each with one fused multiply-add, and
// one more for the minimum. So its bits depend on its own row and column only, as in micro.h.
#include <algorithm>
#include <utility>

#include "amx.h"
#include "blocks.h"
#include "blocks_amx.h"
#include "blocks_i8mm.h"
#include "linear.h"
#include "micro.h"
#include "pool.h"

namespace ember {
namespace {

constexpr int kPrefetchBytes = 1024;
constexpr int kPieceBlocks = 30 * 1024 / (kVecs * 10 * kCodeBytes);  // blocks of a panel that are unpacked at once and stay in L1
constexpr int kPastBlocks = 4;              // blocks after these, or after a row of inputs, that may be read but are not used
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

struct RoundedRow {
    int8_t* codes;
    float *scale, *total;
    int32_t* start;
};

void round_row(const Linear& op, const float* x, BlockFormat format, RoundedRow to) {
    float norm_scale = op.norm ? rms_scale(x, op.k, op.eps) : 1.0f;
    for (int at = 0; at < op.k; at += kBlock, x += kBlock, to.codes += kBlock) {
        float values[kBlock];
        if (op.norm)
            for (int i = 0; i < kBlock; i += kLanes)
                store(values + i, mul(mul(load(x + i), splat<Vec>(norm_scale)), load(op.norm + at + i)));
        const float* from = op.norm ? values : x;
        // NaN and infinity make the scale NaN or infinity.
        float size = largest_size(from), inverse = size < kSmallest ? 0.0f : 127.0f / size;
        float scale = size < kSmallest ? 0.0f : size * (1.0f / 127.0f);
        int first = round_half(from, inverse, to.codes), second = round_half(from + kBlock / 2, inverse, to.codes + kBlock / 2);
        *to.scale++ = scale;
        *to.total++ = scale * float(first + second);
        if (format.runs() == 2) *to.start++ = kSumStart - format.offset * first;
        *to.start++ = kSumStart - format.offset * (format.runs() == 2 ? second : first + second);
    }
}

Rounded round_inputs(const Linear& op, BlockFormat format) {
    long blocks = op.k / kBlock, runs = format.runs(), stride = op.k + kPastBlocks * kBlock;
    float* memory = scratch(kInputs, op.m * (stride / 4 + blocks * (2 + runs)));
    auto* codes = reinterpret_cast<int8_t*>(memory);
    float *scale = memory + op.m * (stride / 4), *total = scale + op.m * blocks;
    auto* start = reinterpret_cast<int32_t*>(total + op.m * blocks);
    auto round_rows = [&](long begin, long end) {
        for (long r = begin; r < end; r++)
            round_row(op, op.x + r * op.k, format,
                      {codes + r * stride, scale + r * blocks, total + r * blocks, start + r * blocks * runs});
    };
    if (long(op.m) * op.k <= kSerialInputs) round_rows(0, op.m);
    else parallel(op.m, round_rows);
    return {codes, scale, total, start, stride, blocks, runs};
}

// Adds the products of one step to the sums of R rows and V vectors of columns.
template <BlockFormat F, int Step, int R, int V>
inline __attribute__((always_inline)) void add_step(Ints (&sum)[R][V], const uint8_t* codes, const HalfBlock (&inputs)[R]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        Codes some = codes_of_step<F, Step>(codes + v * F.vector_bytes());
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r][v] = dot<F.range, Step % 4>(sum[r][v], some, inputs[r]);
    }
}

// Adds the products of half a block, in which all codes of a column have the same scale.
template <BlockFormat F, int Half, int R, int V>
inline __attribute__((always_inline)) void add_half(Ints (&sum)[R][V], const uint8_t* codes, const Rounded& in) {
    HalfBlock inputs[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) inputs[r] = load_half(in.codes + r * in.stride + Half * kBlock / 2);
    add_step<F, 4 * Half>(sum, codes, inputs);
    add_step<F, 4 * Half + 1>(sum, codes, inputs);
    add_step<F, 4 * Half + 2>(sum, codes, inputs);
    add_step<F, 4 * Half + 3>(sum, codes, inputs);
}

// Computes the sums of a run: of half a block if a block has two of them, otherwise of a block.
template <BlockFormat F, int Run, int R, int V>
inline __attribute__((always_inline)) void sum_run(Ints (&sum)[R][V], const uint8_t* codes, const Rounded& in) {
    auto start = [&](int r) { return splat_ints(F.offset ? in.start[r * in.blocks * F.runs() + Run] : kSumStart); };
#if EMBER_I8MM
    if constexpr (F.paired) {
        sum_pairs<Run, F.runs() == 2 ? Run + 1 : 2>(sum, codes, in.codes, in.stride);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r][0] = vaddq_s32(sum[r][0], start(r));
        return;
    }
#endif
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[r][v] = start(r);
    add_half<F, Run>(sum, codes, in);
    if constexpr (F.runs() == 1) add_half<F, 1>(sum, codes, in);
}

template <BlockFormat F, int Run, int R, int V, int Width>
inline __attribute__((always_inline)) void finish_run(Vec (&total)[R][Width], int first, const Ints (&sum)[R][V],
                                                      const BlockScales<F> (&scales)[V], const Rounded& in) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Vec scale = mul(scales[v].scale[Run], splat<Vec>(in.scale[r * in.blocks]));
            total[r][first + v] = fma(to_float(sum[r][v]), scale, total[r][first + v]);
        }
}

// Adds the products of one block to the totals of R rows and the V vectors of columns from `first`.
template <BlockFormat F, int V, int R, int Width>
inline __attribute__((always_inline)) void add_block(Vec (&total)[R][Width], int first, const uint8_t* codes,
                                                     const BlockScales<F> (&scales)[V], const Rounded& in) {
    Ints sum[R][V];
    sum_run<F, 0>(sum, codes, in);
    finish_run<F, 0>(total, first, sum, scales, in);
    if constexpr (F.runs() == 2) {
        sum_run<F, 1>(sum, codes, in);
        finish_run<F, 1>(total, first, sum, scales, in);
    }
    if constexpr (F.minima)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                total[r][first + v] = fma(scales[v].minimum, splat<Vec>(in.total[r * in.blocks]), total[r][first + v]);
}

// Multiplies R rows by the vectors [first_vector, first_vector + Width) of a panel, whose codes are unpacked in registers.
template <BlockFormat F, int R, int Width>
inline __attribute__((always_inline)) void multiply_columns(const uint8_t* panel, const Rounded& in, int first_vector, float* sums) {
    constexpr int V = std::clamp(kIntVectors / (R < 3 ? R : R < 5 ? 4 : 8), 1, Width);  // vectors whose integers are summed at once
    Vec total[R][Width];
#pragma GCC unroll 16
    for (int i = 0; i < R * Width; i++) total[i / Width][i % Width] = splat<Vec>(0.0f);
    for (long b = 0; b < in.blocks; panel += F.group_bytes())
        for (int sub = 0; sub < F.blocks; sub++, b++) {
            const uint8_t *block = panel + F.header_bytes() + sub * F.block_bytes(), *codes = block + F.scale_bytes();
            if constexpr (Width > 1) {
                for (int at = 0; at < F.block_bytes(); at += 64) __builtin_prefetch(block + kPrefetchBytes + at);
            } else {  // several passes read parts of each block: the next panel should be in L2
                const uint8_t* next = block + in.blocks / F.blocks * F.group_bytes();
                if (first_vector == 0) __builtin_prefetch(next, 0, 2);
                for (int at = 0; at < F.vector_bytes(); at += 64)
                    __builtin_prefetch(next + F.scale_bytes() + first_vector * F.vector_bytes() + at, 0, 2);
            }
#pragma GCC unroll 4
            for (int at = 0; at < Width; at += V) {
                BlockScales<F> scales[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) scales[v] = load_scales<F>(panel, block, first_vector + at + v);
                add_block<F, V>(total, at, codes + (first_vector + at) * F.vector_bytes(), scales, in.from(0, b));
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < R * Width; i++)
        store(sums + i / Width * kPanel + (first_vector + i % Width) * kLanes, total[i / Width][i % Width]);
}

// Multiplies R rows by one panel, in one pass if the sums of all its columns fit into registers.
template <BlockFormat F, int R>
void multiply_direct(const uint8_t* panel, const Rounded& in, int first, float* sums) {
    if constexpr (R * kVecs <= kFloatVectors) return multiply_columns<F, R, kVecs>(panel, in.from(first, 0), 0, sums);
    for (int v = 0; v < kVecs; v++) multiply_columns<F, R, 1>(panel, in.from(first, 0), v, sums);
}

// What matters of a format once codes are unpacked to bytes. Such blocks are those of one vector of columns, with float scales.
constexpr BlockFormat unpacked_format(BlockFormat f) {
    return {1, 8, f.minima, f.run, f.offset != 0, f.range, false, kFloat16, EMBER_I8MM};
}
constexpr int unpacked_bytes(BlockFormat f) { return (kSteps + f.runs() + f.minima) * kCodeBytes; }

template <BlockFormat F, bool Signed, int... S>
inline void unpack_codes(const uint8_t* codes, uint8_t* to, std::integer_sequence<int, S...>) {
#if EMBER_AMX_INT8
    if constexpr (Signed) return (store_codes(to + S * kCodeBytes, subtract(codes_of_step<F, S>(codes), F.offset)), ...);
#elif EMBER_I8MM
    Codes step[] = {codes_of_step<F, S>(codes)...};
    for (int s = 0; s < kSteps; s += 2) pair_codes(step[s], step[s + 1]);
    return (store_codes(to + S * kCodeBytes, step[S]), ...);
#endif
    (store_codes(to + S * kCodeBytes, codes_of_step<F, S>(codes)), ...);
}

// Unpacks blocks of vector v of a panel. Signed: without the offset of the codes.
template <BlockFormat F, bool Signed>
void unpack_piece(const uint8_t* panel, int v, long first_block, long count, uint8_t* to) {
    for (long b = first_block; b < first_block + count; b++, to += unpacked_bytes(F)) {
        const uint8_t *group = panel + b / F.blocks * F.group_bytes(), *block = group + F.header_bytes() + b % F.blocks * F.block_bytes();
        unpack_codes<F, Signed>(block + F.scale_bytes() + v * F.vector_bytes(), to, std::make_integer_sequence<int, kSteps>{});
        BlockScales<F> scales = load_scales<F>(group, block, v);
        auto* floats = reinterpret_cast<float*>(to + kSteps * kCodeBytes);
        store(floats, scales.scale[0]);
        if constexpr (F.runs() > 1) store(floats + kLanes, scales.scale[1]);
        if constexpr (F.minima) store(floats + F.runs() * kLanes, scales.minimum);
    }
}

// Multiplies R rows by unpacked blocks of one vector of columns. F is an unpacked_format().
template <BlockFormat F, int R>
void multiply_unpacked(const uint8_t* blocks, long count, const Rounded& inputs, int first, long first_block, float* sums) {
    Rounded in = inputs.from(first, first_block);
    Vec total[R][1];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) total[r][0] = first_block ? load(sums + r * kPanel) : splat<Vec>(0.0f);
    for (long b = 0; b < count; b++, blocks += unpacked_bytes(F)) {
        const auto* floats = reinterpret_cast<const float*>(blocks + kSteps * kCodeBytes);
        BlockScales<F> scales[1];
        scales[0].scale[0] = load(floats);
        if constexpr (F.runs() > 1) scales[0].scale[1] = load(floats + kLanes);
        if constexpr (F.minima) scales[0].minimum = load(floats + F.runs() * kLanes);
        add_block<F, 1>(total, 0, blocks, scales, in.from(0, b));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + r * kPanel, total[r][0]);
}

#if EMBER_AMX_INT8
// The same with AMX, by blocks with signed codes.
template <BlockFormat F, int R>
void multiply_amx(const uint8_t* blocks, long count, const Rounded& inputs, int first, long first_block, float* sums) {
    constexpr int kRunSums = R * kLanes;  // of a run
    alignas(64) int32_t buffer[2][4 * kRunSums];
    Rounded in = inputs.from(first, first_block);
    amx::Runs runs{in.codes, in.stride, blocks, unpacked_bytes(F)};
    Vec total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) total[r] = first_block ? load(sums + r * kPanel) : splat<Vec>(0.0f);
    amx::multiply_runs<F.run, R>(runs, 0, buffer[0]);
    for (long i = 0, n = count * F.runs(); i < n; i += 4) {
        if (i + 4 < n) amx::multiply_runs<F.run, R>(runs, i + 4, buffer[(i / 4 + 1) % 2]);
        const int32_t* from = buffer[i / 4 % 2];
        for (long j = i; j < std::min(i + 4, n); j++, from += kRunSums) {
            long b = j / F.runs(), run = j % F.runs();
            const auto* floats = reinterpret_cast<const float*>(blocks + b * unpacked_bytes(F) + kSteps * kCodeBytes);
            Vec scale = load(floats + run * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                total[r] = fma(to_float(load_ints(from + r * kLanes)), mul(scale, splat<Vec>(in.scale[r * in.blocks + b])), total[r]);
            if constexpr (F.minima) {
                Vec minimum = load(floats + F.runs() * kLanes);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) total[r] = fma(minimum, splat<Vec>(in.total[r * in.blocks + b]), total[r]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + r * kPanel, total[r]);
}

template <BlockFormat F, int... R>
void run_amx(int rows, const uint8_t* blocks, long count, const Rounded& in, int first, long first_block, float* sums,
             std::integer_sequence<int, R...>) {
    using Tile = void (*)(const uint8_t*, long, const Rounded&, int, long, float*);
    constexpr Tile all[] = {multiply_amx<F, R + 1>...};
    all[rows - 1](blocks, count, in, first, first_block, sums);
}

using AmxTiles = amx::Int8Tiles;
#else
struct AmxTiles {};
#endif

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

// Multiplies one panel by `rows` rows, which share an unpacked copy of it.
template <BlockFormat F, bool Amx>
void run_copied(const Rounded& in, const uint8_t* panel, int first, int rows, float* sums, [[maybe_unused]] AmxTiles& registers) {
    constexpr BlockFormat U = unpacked_format(F);
    constexpr int kMaxRows = Amx ? 16 : kTileRows;
    RowBlocks tiles(rows, kMaxRows);
    constexpr int kVectorBytes = (kPieceBlocks + kPastBlocks) * unpacked_bytes(F);
    auto* copy = reinterpret_cast<uint8_t*>(scratch(kWeights, kVecs * kVectorBytes / 4));
    for (long at = 0; at < in.blocks; at += kPieceBlocks) {
        long count = std::min<long>(kPieceBlocks, in.blocks - at);
        for (int v = 0; v < kVecs; v++) unpack_piece<F, Amx>(panel, v, at, count, copy + v * kVectorBytes);
        for (int i = 0; i < tiles.count * kVecs; i++) {  // the inputs of a tile stay in L1 for all its columns
            int tile = i / kVecs, v = i % kVecs, row = tiles.start(tile), size = tiles.size(tile);
            float* to = sums + row * kPanel + v * kLanes;
            constexpr std::make_integer_sequence<int, kMaxRows> sizes;
#if EMBER_AMX_INT8
            if constexpr (Amx) {
                registers.configure(size, F.run);
                run_amx<U>(size, copy + v * kVectorBytes, count, in, first + row, at, to, sizes);
                continue;
            }
#endif
            run_unpacked<U>(size, copy + v * kVectorBytes, count, in, first + row, at, to, sizes);
        }
    }
}

template <BlockFormat F>
void run_panel(const Linear& op, const Rounded& in, const uint8_t* panel, long number, int first, int rows, AmxTiles& registers) {
    float* sums = scratch(kSums, long(rows) * kPanel);
    if (rows <= kDirectRows) {
        RowBlocks tiles(rows, kDirectTile);
        for (int tile = 0; tile < tiles.count; tile++)
            run_direct<F>(tiles.size(tile), panel, in, first + tiles.start(tile), sums + tiles.start(tile) * kPanel,
                          std::make_integer_sequence<int, kDirectTile>{});
    } else if (EMBER_AMX_INT8 && amx::available()) {
        run_copied<F, EMBER_AMX_INT8>(in, panel, first, rows, sums, registers);
    } else {
        run_copied<F, false>(in, panel, first, rows, sums, registers);
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
        AmxTiles registers;
        for (long task = begin; task < end; task++) {
            int group = int(task / panels);
            long panel = task % panels;
            run_panel<F>(op, in, weights + panel * panel_bytes, panel, groups.start(group), groups.size(group), registers);
        }
    });
}

}  // namespace

void run_blocks(const Linear& op, int layout, const uint8_t* weights) {
    with_layout(layout, [&](auto l) { run<l>(op, weights); });
}

}  // namespace ember
