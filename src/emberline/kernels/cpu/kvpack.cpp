#include "kvpack.h"

#include <algorithm>
#include <cstring>

#include "crc32.h"
#include "huffman.h"
#include "unweight.h"

namespace ember {
namespace {

constexpr long kSegment = 262144, kBlock = 65536;  // elements that share a code; elements of a block
constexpr long kSample = 4096;                     // elements counted out of four times as many
constexpr long kIndex = 12, kLengths = 128, kHeaderBytes = 4 + 4 + kLengths;

template <class T>
T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Finds the smallest and the largest symbol.
template <class T>
void find_range(const uint8_t* elements, long count, int& min_symbol, int& max_symbol) {
    T low = T(-1), high = 0;
    for (long i = 0; i < count; i++) {
        T value = load<T>(elements + i * long(sizeof(T)));
        if constexpr (sizeof(T) > 1) value = T(value << 1);  // the symbol is below the sign
        low = std::min(low, value), high = std::max(high, value);
    }
    constexpr int below = 8 * (sizeof(T) - 1);
    min_symbol = int(low >> below), max_symbol = int(high >> below);
}

// Fits the code to a quarter of the elements. Symbols that occur only in the others need a code word too.
void choose_code(const uint8_t* elements, long count, int width, uint8_t* lengths) {
    uint64_t counts[256] = {};
    for (long at = 0; at < count; at += 4 * kSample)
        ember_unweight_count(elements + at * width, std::min(kSample, count - at), width, counts);
    int min_symbol, max_symbol;
    if (width == 1) find_range<uint8_t>(elements, count, min_symbol, max_symbol);
    else if (width == 2) find_range<uint16_t>(elements, count, min_symbol, max_symbol);
    else find_range<uint32_t>(elements, count, min_symbol, max_symbol);
    for (int symbol = min_symbol; symbol <= max_symbol; symbol++) counts[symbol] += !counts[symbol];
    fit_code(counts, lengths);
}

bool is_code(const uint8_t* lengths) {
    long filled = 0, symbols = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        if (lengths[symbol]) {
            if (lengths[symbol] > kBits) return false;
            filled += 1L << (kBits - lengths[symbol]), symbols++;
        }
    return filled == 1L << kBits || (symbols == 1 && filled == 1L << (kBits - 1));
}

long index_bytes(long count) { return (count + kBlock - 1) / kBlock * kIndex; }

// Writes [u32 bytes of the body | u32 CRC-32 of the lengths and the body, except blocks, which have their own | lengths | body].
long pack(const uint8_t* elements, long count, int width, uint8_t* to) {
    uint8_t lengths[256], *packed = to + 8, *body = to + kHeaderBytes;
    choose_code(elements, count, width, lengths);
    for (int i = 0; i < kLengths; i++) packed[i] = uint8_t(lengths[2 * i] | lengths[2 * i + 1] << 4);
    long index = index_bytes(count), size = index, checked = kLengths + index, plain = count * width;
    size += ember_unweight_encode(elements, count, width, lengths, body + index, body);
    if (size >= plain) {
        std::memset(packed, 0, kLengths);
        std::memcpy(body, elements, size_t(plain));
        size = plain, checked = kLengths + plain;
    }
    uint32_t head[2] = {uint32_t(size), crc32(packed, checked)};
    std::memcpy(to, head, sizeof head);
    return kHeaderBytes + size;
}

// Returns the bytes consumed, or 0 if the data is damaged.
long unpack(const uint8_t* from, long room, long count, int width, uint8_t* elements) {
    if (room < kHeaderBytes) return 0;
    long size = load<uint32_t>(from), index = index_bytes(count), plain = count * width;
    const uint8_t *packed = from + 8, *body = from + kHeaderBytes;
    uint8_t lengths[256], is_coded = 0;
    for (int i = 0; i < kLengths; i++)
        is_coded |= packed[i], lengths[2 * i] = packed[i] & 15, lengths[2 * i + 1] = packed[i] >> 4;
    if (size > room - kHeaderBytes || (is_coded ? size < index : size != plain)) return 0;
    if (crc32(packed, kLengths + (is_coded ? index : plain)) != load<uint32_t>(from + 4)) return 0;
    if (!is_coded) std::memcpy(elements, body, size_t(plain));
    else if (!is_code(lengths)) return 0;
    else if (ember_unweight_decode(body + index, size - index, body, count, width, lengths, 1, elements) != -1) return 0;
    return kHeaderBytes + size;
}

}  // namespace
}  // namespace ember

using namespace ember;

long ember_kv_pack(const void* elements, long count, int width, uint8_t* packed) {
    auto* from = static_cast<const uint8_t*>(elements);
    uint8_t* to = packed;
    for (; count > 0; from += kSegment * width, count -= kSegment) to += pack(from, std::min(kSegment, count), width, to);
    return to - packed;
}

long ember_kv_unpack(const uint8_t* packed, long size, long count, int width, void* elements) {
    auto* to = static_cast<uint8_t*>(elements);
    for (; count > 0; to += kSegment * width, count -= kSegment) {
        long consumed = unpack(packed, size, std::min(kSegment, count), width, to);
        if (!consumed) return 1;
        packed += consumed, size -= consumed;
    }
    return size != 0;
}
