#include "unweight.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "crc32.h"
#include "huffman.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ember {
namespace {

static_assert(std::endian::native == std::endian::little, "elements and indices are little-endian");

constexpr int kBlock = 65536, kStreams = 4, kSegment = kBlock / kStreams, kIndex = 12;  // the same as in format.py
constexpr int kLookups = 5;              // lookups in the 56 bits that a refill guarantees
constexpr int kSlack = 16;               // a store of 8 bytes may extend beyond a segment's end
static_assert(kLookups * kBits <= 56);

template <int W>
using Word = std::conditional_t<W == 1, uint8_t, std::conditional_t<W == 2, uint16_t, uint32_t>>;

inline uint64_t load64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

// The symbol is the 8 bits below an element's sign: in bf16 and float32 its exponent. The sign and the bits below the symbol form
// the rest, which is split into planes of bytes. An 8-bit element consists of its symbol only.
template <int W>
void split(const void* elements, long count, uint8_t* symbols, uint8_t* planes, long stride) {
    using T = Word<W>;
    auto* from = static_cast<const T*>(elements);
    if constexpr (W == 1) return void(std::memcpy(symbols, from, size_t(count)));
    constexpr int below = 8 * W > 9 ? 8 * W - 9 : 0;
    for (long i = 0; i < count; i++) {
        symbols[i] = uint8_t(from[i] >> below);
        T rest = T(from[i] >> (8 * W - 1) << below | (from[i] & ((1u << below) - 1)));
        for (int p = 0; p < W - 1; p++) planes[p * stride + i] = uint8_t(rest >> 8 * p);
    }
}

template <int W>
void merge(const uint8_t* symbols, const uint8_t* planes, long stride, long count, void* elements) {
    using T = Word<W>;
    auto* to = static_cast<T*>(elements);
    if constexpr (W == 1) return void(std::memcpy(to, symbols, size_t(count)));
    constexpr int below = 8 * W > 9 ? 8 * W - 9 : 0;
    long i = 0;
#if defined(__aarch64__)
    if constexpr (W == 2)
        for (; i + 16 <= count; i += 16) {
            uint8x16_t symbol = vld1q_u8(symbols + i), rest = vld1q_u8(planes + i);
            uint8x16_t high = vsriq_n_u8(rest, symbol, 1), low = vsliq_n_u8(rest, symbol, 7);
            vst1q_u8(reinterpret_cast<uint8_t*>(to + i), vzip1q_u8(low, high));
            vst1q_u8(reinterpret_cast<uint8_t*>(to + i + 8), vzip2q_u8(low, high));
        }
#endif
    for (; i < count; i++) {
        T rest = 0;
        for (int p = 0; p < W - 1; p++) rest = T(rest | T(planes[p * stride + i]) << 8 * p);
        to[i] = T(T(rest >> below) << (8 * W - 1) | T(symbols[i]) << below | (rest & ((1u << below) - 1)));
    }
}

template <int W>
void count_symbols(const void* elements, long count, uint64_t* counts) {
    uint8_t symbols[4096], planes[3 * 4096];
    uint32_t lanes[4][256] = {};  // neighbours are often equal, so each lane has its own counters
    for (long at = 0; at < count; at += 4096) {
        int n = int(std::min(4096L, count - at)), i = 0;
        split<W>(static_cast<const uint8_t*>(elements) + at * W, n, symbols, planes, 4096);
        for (; i + 4 <= n; i += 4)
            for (int l = 0; l < 4; l++) lanes[l][symbols[i + l]]++;
        for (; i < n; i++) lanes[0][symbols[i]]++;
    }
    for (int s = 0; s < 256; s++)
        for (auto& lane : lanes) counts[s] += lane[s];
}

// A stream being written: bits are inserted at the top, and whole bytes are stored. Each store writes 8 bytes, beyond its end.
struct Sink {
    uint8_t* to;
    uint64_t bits = 0;
    int bit_count = 0;

    void put(uint32_t code) {  // code | length << 16
        bits |= uint64_t(code & 0xFFFF) << bit_count;
        bit_count += int(code >> 16);
    }

    void flush() {
        std::memcpy(to, &bits, 8);
        to += bit_count / 8;
        bits >>= bit_count / 8 * 8;
        bit_count %= 8;
    }

    void put_rest(const uint8_t* symbols, const uint8_t* end, const Encoder& encoder) {
        for (; symbols < end; symbols++) put(encoder.codes[*symbols]), flush();
        if (bit_count) *to++ = uint8_t(bits);
    }
};

struct Segment {
    long begin, count;

    long end() const { return begin + count; }
};

inline Segment segment(long block, int s) {
    long each = (block + kStreams - 1) / kStreams, begin = std::min(block, s * each);
    return {begin, std::min(each, block - begin)};
}

// Encodes all streams interleaved: while one waits for its previous code word, the others proceed.
void encode_interleaved(const uint8_t* symbols, long count, const Encoder& encoder, Sink (&sinks)[kStreams]) {
    const uint8_t* from[kStreams];
    for (int s = 0; s < kStreams; s++) from[s] = symbols + segment(count, s).begin;
    long common = segment(count, kStreams - 1).count / kLookups * kLookups;  // the last stream is the shortest
    Sink a = sinks[0], b = sinks[1], c = sinks[2], d = sinks[3];
    for (long i = 0; i < common; i += kLookups) {
#pragma GCC unroll 8
        for (int l = 0; l < kLookups; l++) {
            a.put(encoder.codes[from[0][i + l]]), b.put(encoder.codes[from[1][i + l]]);
            c.put(encoder.codes[from[2][i + l]]), d.put(encoder.codes[from[3][i + l]]);
        }
        a.flush(), b.flush(), c.flush(), d.flush();
    }
    sinks[0] = a, sinks[1] = b, sinks[2] = c, sinks[3] = d;
    for (int s = 0; s < kStreams; s++) sinks[s].put_rest(from[s] + common, symbols + segment(count, s).end(), encoder);
}

template <int W>
uint8_t* encode_block(const void* elements, long count, const Encoder& encoder, uint8_t* to, uint8_t* index) {
    uint8_t symbols[kBlock], coded[kStreams][kSegment * kBits / 8 + kSlack];
    uint8_t planes[(W - 1) * kBlock + 1];
    split<W>(elements, count, symbols, planes, count);
    uint8_t* begin = to;
    Sink sinks[kStreams] = {{coded[0]}, {coded[1]}, {coded[2]}, {coded[3]}};
    encode_interleaved(symbols, count, encoder, sinks);
    for (int s = 0; s < kStreams; s++) {
        uint16_t length = uint16_t(sinks[s].to - coded[s]);
        std::memcpy(index + 2 * s, &length, 2);
        std::memcpy(to, coded[s], length);
        to += length;
    }
    std::memcpy(to, planes, size_t((W - 1) * count));
    to += (W - 1) * count;
    uint32_t crc = crc32(begin, to - begin);
    std::memcpy(index + 8, &crc, 4);
    return to;
}

// A stream being read. The next bits are the lowest; the position of the highest set bit tells how many were consumed.
struct Stream {
    uint64_t bits;
    const uint8_t* at;
    uint8_t* out;

    void start(const uint8_t* begin, const uint8_t* end, uint8_t* to) { at = begin, out = to, load_bits(begin, end, 0); }

    void look_up(const uint64_t* table) {
        uint64_t entry = table[bits & ((1 << kBits) - 1)];
        bits >>= entry & 63;
        uint64_t symbols_found = entry >> 8;
        std::memcpy(out, &symbols_found, 8);
        out += entry >> 56;
    }

    // Needs 8 readable bytes at the new position.
    void refill() {
        int consumed = std::countl_zero(bits);
        at += consumed / 8;
        bits = (load64(at) | 1ull << 63) >> consumed % 8;
    }

    void load_bits(const uint8_t* from, const uint8_t* end, int consumed) {
        uint64_t word = 0;
        std::memcpy(&word, from, size_t(std::clamp(long(end - from), 0L, 8L)));
        bits = (word | 1ull << 63) >> consumed;
    }

    // The same near the end of the input, beyond which bits are zero. Returns false if the position is beyond the end.
    bool refill_at_end(const uint8_t* end) {
        int consumed = std::countl_zero(bits);
        at += consumed / 8;
        if (at > end) return false;
        load_bits(at, end, consumed % 8);
        return true;
    }

    long position(const uint8_t* begin) const { return (at - begin) * 8 + std::countl_zero(bits); }
};

// Decodes all streams interleaved, as long as no stream can run out of input or output space.
void decode_interleaved(Stream (&streams)[kStreams], uint8_t* const (&ends)[kStreams], const uint8_t* end, const uint64_t* table) {
    Stream a = streams[0], b = streams[1], c = streams[2], d = streams[3];
    for (;;) {
        long room = std::min({ends[0] - a.out, ends[1] - b.out, ends[2] - c.out, ends[3] - d.out}) / (kLookups * kSymbols);
        long input = (end - 8 - std::max({a.at, b.at, c.at, d.at})) / 8;
        long rounds = std::min(room, input);
        if (rounds <= 0) break;
        do {
#pragma GCC unroll 8
            for (int i = 0; i < kLookups; i++) a.look_up(table), b.look_up(table), c.look_up(table), d.look_up(table);
            a.refill(), b.refill(), c.refill(), d.refill();
        } while (--rounds);
    }
    streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
}

bool decode_rest(Stream& stream, const uint8_t* end, uint8_t* last, const Decoder& decoder) {
    while (last - stream.out >= kLookups * kSymbols) {
        for (int i = 0; i < kLookups; i++) stream.look_up(decoder.table);
        if (!stream.refill_at_end(end)) return false;
    }
    while (stream.out < last) {
        uint8_t symbol = uint8_t(decoder.table[stream.bits & ((1 << kBits) - 1)] >> 8);
        *stream.out++ = symbol;
        stream.bits >>= decoder.lengths[symbol];
        if (!stream.refill_at_end(end)) return false;
    }
    return true;
}

template <int W>
bool decode_block(const uint8_t* coded, long size, const uint16_t* sizes, long count, const Decoder& decoder,
                  uint8_t* elements) {
    uint8_t symbols[kStreams][kSegment + kSlack];
    Stream streams[kStreams];
    uint8_t* ends[kStreams];
    const uint8_t *begins[kStreams], *end = coded + size, *at = coded;
    for (int s = 0; s < kStreams; at += sizes[s++]) {
        begins[s] = at;
        ends[s] = symbols[s] + segment(count, s).count;
        streams[s].start(at, end, symbols[s]);
    }
    decode_interleaved(streams, ends, end, decoder.table);
    for (int s = 0; s < kStreams; s++) {
        if (!decode_rest(streams[s], end, ends[s], decoder)) return false;
        if ((streams[s].position(begins[s]) + 7) / 8 != sizes[s]) return false;
        Segment part = segment(count, s);
        merge<W>(symbols[s], at + part.begin, count, part.count, elements + part.begin * W);
    }
    return true;
}

template <int W>
long decode(const uint8_t* coded, long size, const uint8_t* index, long count, const Decoder& decoder, bool check,
            uint8_t* elements) {
    for (long block = 0; count > 0; block++, index += kIndex) {
        uint16_t sizes[kStreams];
        uint32_t crc;
        std::memcpy(sizes, index, sizeof sizes);
        std::memcpy(&crc, index + 8, 4);
        long block_count = std::min<long>(kBlock, count), bytes = (W - 1) * block_count;
        for (uint16_t stream : sizes) bytes += stream;
        if (bytes > size || (check && crc32(coded, bytes) != crc)) return block;
        if (!decode_block<W>(coded, bytes, sizes, block_count, decoder, elements)) return block;
        coded += bytes, size -= bytes, elements += block_count * W, count -= block_count;
    }
    return -1;
}

template <int W>
long encode(const void* elements, long count, const Encoder& encoder, uint8_t* coded, uint8_t* index) {
    auto* from = static_cast<const uint8_t*>(elements);
    uint8_t* to = coded;
    for (; count > 0; from += kBlock * W, count -= kBlock, index += kIndex)
        to = encode_block<W>(from, std::min<long>(kBlock, count), encoder, to, index);
    return to - coded;
}

// Calls body.template operator()<W>().
template <class F>
auto with_width(int width, const F& body) {
    return width == 1 ? body.template operator()<1>() : width == 2 ? body.template operator()<2>() : body.template operator()<4>();
}

}  // namespace
}  // namespace ember

using namespace ember;

void ember_unweight_count(const void* elements, long count, int width, uint64_t* counts) {
    with_width(width, [&]<int W>() { count_symbols<W>(elements, count, counts); });
}

long ember_unweight_encode(const void* elements, long count, int width, const uint8_t* lengths, uint8_t* coded, uint8_t* index) {
    Encoder encoder(lengths);
    return with_width(width, [&]<int W>() { return encode<W>(elements, count, encoder, coded, index); });
}

long ember_unweight_decode(const uint8_t* coded, long size, const uint8_t* index, long count, int width, const uint8_t* lengths,
                           int check, void* elements) {
    Decoder decoder(lengths);
    auto* to = static_cast<uint8_t*>(elements);
    return with_width(width, [&]<int W>() { return decode<W>(coded, size, index, count, decoder, check, to); });
}

uint32_t ember_crc32(const void* data, long size, uint32_t before) {
    return crc32(static_cast<const uint8_t*>(data), size, before);
}
