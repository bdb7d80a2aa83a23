// GGUF's quantised blocks, rearranged into panels of kPanel columns: [n / kPanel][k / 32 / blocks of a group] groups.
//
// A group is one block of 32 weights for each column, or eight for the K formats:
//     d [kPanel] (16 bits), with minima m [kPanel] (16 bits)
//     for each block, in K formats: scales [kPanel] and minima [kPanel], or two rows of scales (8 bits)
//                     the codes of each vector of kLanes columns
// A vector's codes in a block are eight steps of four codes for each column, from the low and the high halves of four vectors of
// bytes: step s is the low half of vector s, or the high half of vector s - 4. Fifth bits: bit s of one more vector belongs to step
// s. Fifth and sixth bits: bits 2s and 2s + 1 of one more vector for steps 0 to 3, and the same for steps 4 to 7.
#pragma once
#include <utility>

#include "entries.h"
#include "int8.h"

namespace ember {

constexpr int kBlock = 32;  // weights, and inputs, that share a scale
constexpr int kSteps = kBlock / 4;

enum ScaleKind { kFloat16, kBfloat16 };

struct BlockFormat {
    int blocks;      // of a group
    int bits;        // of a code
    bool minima;     // whether a weight is d * code + m
    int run;         // consecutive codes with the same scale
    int offset;      // of stored codes
    CodeRange range = kSmall;
    bool table = false;  // whether codes are indices of a table
    ScaleKind scale = kFloat16;
    bool paired = false;  // whether unpacked codes are arranged for blocks_i8mm.h

    constexpr int header_bytes() const { return (minima ? 4 : 2) * kPanel; }
    constexpr int scale_bytes() const { return blocks > 1 ? 2 * kPanel : 0; }
    constexpr int vector_bytes() const { return bits * kLanes * 4; }
    constexpr int block_bytes() const { return scale_bytes() + vector_bytes() * kVecs; }
    constexpr int group_bytes() const { return header_bytes() + blocks * block_bytes(); }
    constexpr long panel_bytes(long k) const { return k / kBlock / blocks * group_bytes(); }
    constexpr int runs() const { return kBlock / run; }
};

constexpr BlockFormat block_format(int layout) {
    switch (layout) {
        case kQ4_0: return {1, 4, false, 32, 8};
        case kQ4_1: return {1, 4, true, 32, 0};
        case kQ5_0: return {1, 5, false, 32, 16};
        case kQ5_1: return {1, 5, true, 32, 0};
        case kQ4_K: return {8, 4, true, 32, 0};
        case kQ5_K: return {8, 5, true, 32, 0};
        case kQ6_K: return {8, 6, false, 16, 32};
        case kIq4Nl: return {1, 4, false, 32, kWholeOffset, kWhole, true};
        case kMxfp4: return {1, 4, false, 32, 12, kSmall, true, kBfloat16};
        default: return {1, 8, false, 32, kWholeOffset, kWhole};
    }
}

// Stored codes of the formats whose codes are indices; load_table() reads 16 bytes.
inline const uint8_t* code_table(CodeRange range) {
    constexpr int o = kWholeOffset;
    alignas(16) static constexpr uint8_t iq4[16] = {
        uint8_t(o - 127), uint8_t(o - 104), uint8_t(o - 83), uint8_t(o - 65), uint8_t(o - 49), uint8_t(o - 35),
        uint8_t(o - 22), uint8_t(o - 10), uint8_t(o + 1), uint8_t(o + 13), uint8_t(o + 25), uint8_t(o + 38),
        uint8_t(o + 53), uint8_t(o + 69), uint8_t(o + 89), uint8_t(o + 113)};
    alignas(16) static constexpr uint8_t doubled_e2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return range == kWhole ? iq4 : doubled_e2m1;
}

// Returns the codes of one step. `p` has those of one vector of columns in one block.
template <BlockFormat F, int Step>
inline __attribute__((always_inline)) Codes codes_of_step(const uint8_t* p) {
    if constexpr (F.bits == 8) {
        return load_codes(p + Step * kCodeBytes);
    } else {
        Codes both = load_codes(p + Step % 4 * kCodeBytes), codes = Step < 4 ? low_nibbles(both) : high_nibbles(both);
        if constexpr (F.bits == 5) codes = join_bits<Step, 1>(codes, load_codes(p + 4 * kCodeBytes));
        if constexpr (F.bits == 6) codes = join_bits<Step % 4 * 2, 2>(codes, load_codes(p + (4 + Step / 4) * kCodeBytes));
        if constexpr (F.table) codes = look_up(load_table(code_table(F.range)), codes);
        return codes;
    }
}

// The scales of one vector of columns in one block.
template <BlockFormat F>
struct BlockScales {
    Vec scale[F.runs()], minimum;
};

// Returns the scales of vector v. `header` is the header of its group, `block` its own data.
template <BlockFormat F>
inline __attribute__((always_inline)) BlockScales<F> load_scales(const uint8_t* header, const uint8_t* block, int v) {
    BlockScales<F> to;
    const auto* d = reinterpret_cast<const uint16_t*>(header) + v * kLanes;
    to.scale[0] = F.scale == kBfloat16 ? load_bf16(d) : load_f16(d);
    if constexpr (F.minima) to.minimum = load_f16(d + kPanel);
    if constexpr (F.blocks > 1) {
        const uint8_t *first = block + v * kLanes, *second = first + kPanel;
        if constexpr (F.minima) {
            to.scale[0] = mul(to.scale[0], load_u8(first));
            to.minimum = mul(to.minimum, load_u8(second));
        } else {
            to.scale[1] = mul(to.scale[0], load_i8(second));
            to.scale[0] = mul(to.scale[0], load_i8(first));
        }
    }
    return to;
}

// Calls body(std::integral_constant<int, layout>) for a layout of blocks.
template <class Body>
inline auto with_layout(int layout, Body body) {
    switch (layout) {
        case kQ4_0: return body(std::integral_constant<int, kQ4_0>{});
        case kQ4_1: return body(std::integral_constant<int, kQ4_1>{});
        case kQ5_0: return body(std::integral_constant<int, kQ5_0>{});
        case kQ5_1: return body(std::integral_constant<int, kQ5_1>{});
        case kQ4_K: return body(std::integral_constant<int, kQ4_K>{});
        case kQ5_K: return body(std::integral_constant<int, kQ5_K>{});
        case kQ6_K: return body(std::integral_constant<int, kQ6_K>{});
        case kIq4Nl: return body(std::integral_constant<int, kIq4Nl>{});
        case kMxfp4: return body(std::integral_constant<int, kMxfp4>{});
        default: return body(std::integral_constant<int, kQ8_0>{});
    }
}

// Linear layers with such weights, and rows of such a table (blocks_linear.cpp, blocks_pack.cpp).
struct Linear;
void run_blocks(const Linear& op, int layout, const uint8_t* weights);
void embed_blocks(const long* ids, long count, int layout, const uint8_t* table, long k, float* out);

}  // namespace ember
