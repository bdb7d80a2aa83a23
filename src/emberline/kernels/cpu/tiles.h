// The tiles of x86's matrix unit (AMX): registers of 16 rows by 64 bytes. Its one product adds 32 bf16 products to each float32
// sum in an order the instruction fixes.
#pragma once
#include <algorithm>

#include "isa.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(EMBER_PORTABLE)
#define EMBER_AMX 1
#else
#define EMBER_AMX 0
#endif

#if EMBER_AMX
#include <immintrin.h>

namespace ember::amx {

constexpr int kSide = 16, kDepth = 32;  // rows (or columns) and k of a tile
constexpr int kBlock = 2 * kSide;       // rows and columns whose sums fill four tiles
constexpr int kAhead = 8 * 1024;        // bytes of weights fetched ahead by the first rows that use them
static_assert(kPanel == kBlock, "a panel is two tiles wide");

// The tiles of this thread, for as long as this lives: whoever had them before, torch included, left nothing to rely on.
// 0 to 3 are sums (upper left, upper right, lower left, lower right), 4 and 5 inputs (upper, lower), 6 and 7 weights.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // So many rows in a block. Those that are not there are neither read nor multiplied.
    void shape(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        Config config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = kSide;
        for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(std::min(rows, kSide));
        for (int tile : {2, 3, 5}) config.rows[tile] = uint8_t(std::max(1, rows - kSide));
        asm volatile("" : : "r"(&config) : "memory");  // some compilers believe the next line reads its first bytes only
        _tile_loadconfig(&config);
    }

private:
    struct alignas(64) Config {  // the processor's own layout
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(Config) == 64);
    int rows_ = 0;
};

// Where two rows (or columns) of tiles lie: from the first tile to its neighbour, to the next of k, and from row to row in it.
struct Operand {
    const bf16* at;
    long neighbour, step, row;
};

// One block of sums, `width` floats from row to row: a times b over `steps` steps of k.
template <bool Tall>
void multiply(Operand a, Operand b, long steps, float* sums, long width, bool fresh, bool fetch) {
    long stride = width * long(sizeof(float)), a_row = a.row * 2, b_row = b.row * 2;
    float* below = sums + kSide * width;
    asm volatile("" : : : "memory");  // the loads do not tell the compiler what they read: let it be written by now
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (Tall) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + kSide, stride);
        if constexpr (Tall) {
            _tile_loadd(2, below, stride);
            _tile_loadd(3, below + kSide, stride);
        }
    }
    for (long s = 0; s < steps; s++, a.at += a.step, b.at += b.step) {
        if (fetch)
            for (int line = 0; line < 32; line++) __builtin_prefetch(reinterpret_cast<const char*>(b.at) + kAhead + 64 * line);
        _tile_loadd(6, b.at, b_row);
        _tile_loadd(4, a.at, a_row);
        _tile_loadd(7, b.at + b.neighbour, b_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Tall) {
            _tile_loadd(5, a.at + a.neighbour, a_row);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + kSide, stride);
    if constexpr (Tall) {
        _tile_stored(2, below, stride);
        _tile_stored(3, below + kSide, stride);
    }
}

// The same for as many rows as the block has.
inline void multiply(Tiles& tiles, int rows, Operand a, Operand b, long steps, float* sums, long width, bool fresh = true,
                     bool fetch = false) {
    tiles.shape(rows);
    if (rows > kSide) multiply<true>(a, b, steps, sums, width, fresh, fetch);
    else multiply<false>(a, b, steps, sums, width, fresh, fetch);
}

// Rounds kDepth numbers.
inline void round_some(const float* from, bf16* to) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kSide), _mm512_loadu_ps(from));
    std::memcpy(to, &both, sizeof both);
#else
    for (int i = 0; i < kDepth; i++) to[i] = round_bf16(from[i]);
#endif
}

// Interleaves a row with the next.
inline void pair(const bf16* a, const bf16* b, int count, bf16* to) {
    int j = 0;
#if defined(__AVX512F__)
    auto wide = [](const bf16* at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); };
    for (; j + 16 <= count; j += 16)
        _mm512_storeu_si512(to + 2 * j, _mm512_or_si512(wide(a + j), _mm512_slli_epi32(wide(b + j), 16)));
#endif
    for (; j < count; j++) to[2 * j] = a[j], to[2 * j + 1] = b[j];
}

// Rows in pairs, as the unit takes its second operand: [rows / 2][count][2], `to_stride` pairs of numbers from one to the next.
inline void pair_rows(const bf16* from, long from_stride, int rows, int count, bf16* to, long to_stride) {
    for (int r = 0; r < rows; r += 2, from += 2 * from_stride, to += 2 * to_stride) pair(from, from + from_stride, count, to);
}

}  // namespace ember::amx
#endif
