// Canonical prefix codes over bytes, with code words no longer than one table lookup: docs/unweight-format.md, section 3.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

namespace ember {

constexpr int kBits = 11, kSymbols = 6;  // of one table lookup: bits, and the most symbols that it decodes

// Calls body(symbol, code, length) for each code word. Codes are canonical: ordered by length, then by symbol. The first bit of a
// code word is stored as the lowest.
template <class F>
void for_codes(const uint8_t* lengths, const F& body) {
    for (uint32_t length = 1, code = 0; length <= kBits; length++, code <<= 1)
        for (int symbol = 0; symbol < 256; symbol++)
            if (lengths[symbol] == length) {
                uint32_t first_lowest = 0;
                for (uint32_t bit = 0; bit < length; bit++) first_lowest |= (code >> bit & 1) << (length - 1 - bit);
                body(symbol, first_lowest, length);
                code++;
            }
}

struct Encoder {
    uint32_t codes[256] = {};  // code | length << 16

    explicit Encoder(const uint8_t* lengths) {
        for_codes(lengths, [&](int symbol, uint32_t code, uint32_t length) { codes[symbol] = code | length << 16; });
    }
};

struct Decoder {
    const uint8_t* lengths;
    uint64_t table[1 << kBits];  // bits consumed | decoded symbols << 8 | number of symbols << 56

    explicit Decoder(const uint8_t* code_lengths) : lengths(code_lengths) {
        uint8_t first[1 << kBits] = {};  // symbol whose code word these bits begin with
        for_codes(lengths, [&](int symbol, uint32_t code, uint32_t length) {
            // A code with a single symbol of one bit is incomplete: the other bit decodes to it too.
            uint32_t step = length == 1 && std::count(lengths, lengths + 256, 0) == 255 ? 1 : 1u << length;
            for (uint32_t i = code; i < 1 << kBits; i += step) first[i] = uint8_t(symbol);
        });
        for (uint32_t i = 0; i < 1 << kBits; i++) {
            uint64_t consumed = 0, symbols = 0, number = 0;
            for (; number < kSymbols; number++) {
                uint8_t symbol = first[i >> consumed];
                if (consumed + lengths[symbol] > kBits) break;
                symbols |= uint64_t(symbol) << 8 * number;
                consumed += lengths[symbol];
            }
            table[i] = consumed | symbols << 8 | number << 56;
        }
    }
};

// Computes the lengths of the optimal code for symbols with these counts by the package-merge algorithm. Each list has the leaves
// and pairs of the previous list, sorted by weight. Each of the first 2n - 2 entries of the last list adds a bit to its leaves.
inline void fit_code(const uint64_t* counts, uint8_t* lengths) {
    std::pair<uint64_t, int> leaves[256];
    int n = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        if (lengths[symbol] = 0; counts[symbol]) leaves[n++] = {counts[symbol], symbol};
    if (n < 2) return void(n && (lengths[leaves[0].second] = 1));
    std::sort(leaves, leaves + n);
    uint64_t weights[2][512];
    bool is_leaf[kBits][512];
    int size = 0;
    for (int level = 0; level < kBits; level++) {
        const uint64_t* before = weights[(level + 1) % 2];
        int pairs = size / 2, leaf = 0, pair = 0;
        for (size = 0; leaf < n || pair < pairs; size++) {
            uint64_t both = pair < pairs ? before[2 * pair] + before[2 * pair + 1] : UINT64_MAX;
            bool next = is_leaf[level][size] = leaf < n && leaves[leaf].first <= both;
            weights[level % 2][size] = next ? leaves[leaf++].first : (pair++, both);
        }
    }
    for (int level = kBits - 1, consumed = 2 * n - 2; level >= 0; level--) {
        int symbols = int(std::count(is_leaf[level], is_leaf[level] + consumed, true));
        for (int leaf = 0; leaf < symbols; leaf++) lengths[leaves[leaf].second]++;
        consumed = 2 * (consumed - symbols);
    }
}

}  // namespace ember
