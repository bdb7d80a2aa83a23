// Rearranges GGUF's blocks from the order of the file to panels (blocks.h), and reads single rows back as floats.
#include <algorithm>
#include <atomic>

#include "blocks.h"
#include "linear.h"
#include "pool.h"

namespace ember {
namespace {

// A group of one column, with the bytes of codes in the order of a panel.
struct ColumnGroup {
    uint16_t d = 0, m = 0;
    uint8_t scales[8][2] = {};
    uint8_t codes[8][kBlock] = {};
};

inline uint16_t read16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

// Stores 32 codes of 4, 5 or 6 bits.
template <int Bits>
inline void store_block(const uint8_t* code, uint8_t* to) {
    for (int i = 0; i < 16; i++) to[i] = uint8_t((code[i] & 15) | code[16 + i] << 4);
    if (Bits == 5)
        for (int i = 0; i < 4; i++) {
            int high = 0;
            for (int s = 0; s < kSteps; s++) high |= (code[4 * s + i] >> 4 & 1) << s;
            to[16 + i] = uint8_t(high);
        }
    if (Bits == 6)
        for (int i = 0; i < 8; i++) {
            int high = 0;
            for (int s = 0; s < 4; s++) high |= (code[16 * (i / 4) + 4 * s + i % 4] >> 4 & 3) << 2 * s;
            to[16 + i] = uint8_t(high);
        }
}

// The formats with blocks of 32: in the file, the high halves of 16 bytes follow the low halves, as here.
template <BlockFormat F>
inline void read_plain(const uint8_t* from, ColumnGroup& to) {
    to.d = read16(from), from += 2;
    if (F.minima) to.m = read16(from), from += 2;
    if (F.bits == 8) {
        for (int i = 0; i < kBlock; i++) to.codes[0][i] = uint8_t(from[i] + kWholeOffset);
        return;
    }
    if (F.bits == 5) {
        uint32_t fifth;
        std::memcpy(&fifth, from, 4);
        from += 4;
        uint8_t code[kBlock];
        for (int i = 0; i < kBlock; i++) code[i] = uint8_t((from[i % 16] >> i / 16 * 4 & 15) | (fifth >> i & 1) << 4);
        return store_block<5>(code, to.codes[0]);
    }
    std::copy_n(from, 16, to.codes[0]);
}

// A power of two in eight bits, of the doubled values; as bf16, whose smallest numbers are subnormal.
inline void read_mxfp4(const uint8_t* from, ColumnGroup& to) {
    int exponent = from[0] - 1;  // 2^(exponent - 127)
    to.d = uint16_t(exponent > 0 ? exponent << 7 : 0x40 >> -exponent);
    std::copy_n(from + 1, 16, to.codes[0]);
}

// Q4_K and Q5_K: d, m, eight scales and minima of six bits, then, of Q5_K, the fifth bits: bit b of byte i belongs to code i of block
// b. Each 32 bytes of codes hold the low halves of one block and the high halves of the next.
template <BlockFormat F>
inline void read_k(const uint8_t* from, ColumnGroup& to) {
    to.d = read16(from), to.m = uint16_t(read16(from + 2) ^ 0x8000);  // minima are subtracted
    const uint8_t *low = from + 4, *mid = low + 4, *high = low + 8, *fifth = from + 16, *codes = fifth + (F.bits == 5 ? 32 : 0);
    for (int b = 0; b < 8; b++) {
        int j = b % 4;
        to.scales[b][0] = uint8_t(b < 4 ? low[j] & 63 : (high[j] & 15) | low[j] >> 6 << 4);
        to.scales[b][1] = uint8_t(b < 4 ? mid[j] & 63 : high[j] >> 4 | mid[j] >> 6 << 4);
        uint8_t code[kBlock];
        for (int i = 0; i < kBlock; i++) {
            code[i] = uint8_t(codes[b / 2 * 32 + i] >> b % 2 * 4 & 15);
            if (F.bits == 5) code[i] = uint8_t(code[i] | (fifth[i] >> b & 1) << 4);
        }
        store_block<F.bits>(code, to.codes[b]);
    }
}

// Q6_K: the low four bits, the high two bits, sixteen scales, d. Each half of the bytes holds four blocks.
inline void read_q6_k(const uint8_t* from, ColumnGroup& to) {
    to.d = read16(from + 208);
    for (int b = 0; b < 8; b++) {
        to.scales[b][0] = from[192 + 2 * b], to.scales[b][1] = from[193 + 2 * b];
        const uint8_t *low = from + b / 4 * 64 + b % 2 * 32, *high = from + 128 + b / 4 * 32;
        uint8_t code[kBlock];
        for (int i = 0; i < kBlock; i++) code[i] = uint8_t((low[i] >> b % 4 / 2 * 4 & 15) | (high[i] >> b % 4 * 2 & 3) << 4);
        store_block<6>(code, to.codes[b]);
    }
}

template <int L>
inline void read_group(const uint8_t* from, ColumnGroup& to) {
    if constexpr (L == kMxfp4) read_mxfp4(from, to);
    else if constexpr (L == kQ6_K) read_q6_k(from, to);
    else if constexpr (block_format(L).blocks > 1) read_k<block_format(L)>(from, to);
    else read_plain<block_format(L)>(from, to);
}

constexpr int file_bytes(int layout) {
    switch (layout) {
        case kQ4_1: return 20;
        case kQ5_0: return 22;
        case kQ5_1: return 24;
        case kQ8_0: return 34;
        case kQ4_K: return 144;
        case kQ5_K: return 176;
        case kQ6_K: return 210;
        case kMxfp4: return 17;
        default: return 18;
    }
}

// Calls copy(bytes of the panel's group, bytes of the column's group, count) for each piece of the column's data.
template <BlockFormat F, class Byte, class Copy>
inline void for_pieces(Byte* group, int column, ColumnGroup& of_column, Copy copy) {
    copy(group + 2 * column, reinterpret_cast<uint8_t*>(&of_column.d), 2);
    if (F.minima) copy(group + 2 * (kPanel + column), reinterpret_cast<uint8_t*>(&of_column.m), 2);
    for (int b = 0; b < F.blocks; b++) {
        Byte* block = group + F.header_bytes() + b * F.block_bytes();
        if (F.blocks > 1)
            for (int i = 0; i < 2; i++) copy(block + i * kPanel + column, &of_column.scales[b][i], 1);
        Byte* at = block + F.scale_bytes() + column / kLanes * F.vector_bytes() + column % kLanes * 4;
        for (int word = 0; word < F.bits; word++) copy(at + word * kCodeBytes, &of_column.codes[b][4 * word], 4);
    }
}

// Returns whether the scale and the minimum of a group are finite.
template <BlockFormat F>
inline bool has_finite_scales(const ColumnGroup& group) {
    if (F.scale == kBfloat16) return group.d < 0xfe << 7;  // read_mxfp4() makes that of 255, which stands for NaN
    constexpr int kExponent = 0x7c00;                      // all bits of a float16's exponent: infinity or NaN
    return (group.d & kExponent) != kExponent && (!F.minima || (group.m & kExponent) != kExponent);
}

// Returns whether all scales are finite.
template <int L>
bool pack(const uint8_t* from, uint8_t* to, long n, long k, bool gated) {
    constexpr BlockFormat F = block_format(L);
    long groups = k / kBlock / F.blocks;
    std::atomic<bool> is_finite{true};
    parallel((n + kPanel - 1) / kPanel, [=, &is_finite](long begin, long end) {
        bool are_finite = true;
        for (long p = begin; p < end; p++)
            for (int column = 0; column < kPanel; column++) {
                long row = source_row(p, column, n, gated);
                for (long g = 0; g < groups; g++) {
                    ColumnGroup group;
                    if (row >= 0) read_group<L>(from + (row * groups + g) * file_bytes(L), group);
                    are_finite &= has_finite_scales<F>(group);
                    for_pieces<F>(to + p * F.panel_bytes(k) + g * F.group_bytes(), column, group,
                                  [](uint8_t* panel, const uint8_t* piece, int count) { std::memcpy(panel, piece, size_t(count)); });
                }
            }
        if (!are_finite) is_finite = false;
    });
    return is_finite;
}

template <BlockFormat F>
inline int stored_code(const uint8_t* codes, int i) {
    if (F.bits == 8) return codes[i];
    int s = i / 4, low = codes[i % 16] >> i / 16 * 4 & 15;
    if (F.bits == 5) low |= (codes[16 + i % 4] >> s & 1) << 4;
    if (F.bits == 6) low |= (codes[16 + s / 4 * 4 + i % 4] >> s % 4 * 2 & 3) << 4;
    return F.table ? code_table(F.range)[low] : low;
}

// Writes the weights of a group as floats, with the roundings of the format's definition.
template <BlockFormat F>
inline void dequantise(const ColumnGroup& group, float* out) {
    float d = F.scale == kBfloat16 ? widen(bf16{group.d}) : widen(f16{group.d}), m = F.minima ? widen(f16{group.m}) : 0.0f;
    for (int b = 0; b < F.blocks; b++)
        for (int i = 0; i < kBlock; i++) {
            float scale = d, minimum = m;
            if (F.blocks > 1 && F.minima) scale *= float(group.scales[b][0]), minimum *= float(group.scales[b][1]);
            else if (F.blocks > 1) scale *= float(int8_t(group.scales[b][i / F.run]));
            int code = stored_code<F>(group.codes[b], i);
            float value = scale * float((F.range == kWhole ? int(int8_t(code - F.offset)) : code - F.offset));
            *out++ = F.minima ? value + minimum : value;
        }
}

template <int L>
void embed(const long* ids, long count, const uint8_t* table, long k, float* out) {
    constexpr BlockFormat F = block_format(L);
    parallel((count + 15) / 16, [=](long begin, long end) {
        for (long t = begin * 16; t < std::min(end * 16, count); t++)
            for (long g = 0; g < k / kBlock / F.blocks; g++) {
                ColumnGroup group;
                for_pieces<F>(table + ids[t] / kPanel * F.panel_bytes(k) + g * F.group_bytes(), int(ids[t] % kPanel), group,
                              [](const uint8_t* panel, uint8_t* piece, int size) { std::memcpy(piece, panel, size_t(size)); });
                dequantise<F>(group, out + t * k + g * F.blocks * kBlock);
            }
    });
}

}  // namespace

void embed_blocks(const long* ids, long count, int layout, const uint8_t* table, long k, float* out) {
    with_layout(layout, [=](auto l) { embed<l>(ids, count, table, k, out); });
}

}  // namespace ember

using namespace ember;

extern "C" {

long ember_blocks_bytes(int layout, int n, int k) {
    return (n + kPanel - 1) / kPanel * block_format(layout).panel_bytes(k);
}

// Returns 1 if all scales are finite, otherwise 0.
long ember_pack_blocks(const void* from, void* to, int layout, int n, int k, int gated) {
    return with_layout(layout, [=](auto l) { return pack<l>(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), n, k, gated); });
}
}
