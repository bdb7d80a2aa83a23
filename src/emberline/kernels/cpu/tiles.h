// The tile registers of AMX, x86's matrix unit: 16 rows by 64 bytes. Its instruction adds 32 bf16 products to each float32 sum in
// a fixed order.
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

constexpr int kSide = 16, kDepth = 32;  // rows (or columns) and k of a tile register
constexpr int kBlock = 2 * kSide;       // rows and columns whose sums fill four tile registers
constexpr int kPrefetchBytes = 8 * 1024;        // prefetch distance in bytes of weights, by the first rows that use them
static_assert(kPanel == kBlock, "a panel is two tiles wide");

struct alignas(64) TileConfig {  // the layout that the CPU defines
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Owns the tile registers of this thread during its lifetime and configures them: earlier users, torch included, leave them in
// an unknown state. 0 to 3 are sums (upper left, upper right, lower left, lower right), 4 and 5 inputs (upper, lower), 6 and 7
// weights.
class TileRegisters {
public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;
    ~TileRegisters() { _tile_release(); }

    // Configures the registers for a block of `rows` rows. Rows beyond are neither read nor multiplied.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        TileConfig config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = kSide;
        for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(std::min(rows, kSide));
        for (int tile : {2, 3, 5}) config.rows[tile] = uint8_t(std::max(1, rows - kSide));
        asm volatile("" : : "r"(&config) : "memory");  // some compilers assume that the next line reads only the first bytes
        _tile_loadconfig(&config);
    }

private:
    int rows_ = 0;
};

// Addresses of two rows (or columns) of tiles: the strides to the neighbouring tile, to the next tile along k, and between the
// rows of a tile.
struct Operand {
    const bf16* data;
    long neighbour, step, row;
};

// Computes one block of sums, with a row stride of `width` floats: a times b over `steps` steps of k.
template <bool Tall>
void multiply(Operand a, Operand b, long steps, float* sums, long width, bool from_zero, bool prefetch) {
    long stride = width * long(sizeof(float)), a_row = a.row * 2, b_row = b.row * 2;
    float* below = sums + kSide * width;
    asm volatile("" : : : "memory");  // tile loads do not declare their reads: complete earlier stores first
    if (from_zero) {
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
    for (long s = 0; s < steps; s++, a.data += a.step, b.data += b.step) {
        if (prefetch)
            for (int line = 0; line < 32; line++)
                __builtin_prefetch(reinterpret_cast<const char*>(b.data) + kPrefetchBytes + 64 * line);
        _tile_loadd(6, b.data, b_row);
        _tile_loadd(4, a.data, a_row);
        _tile_loadd(7, b.data + b.neighbour, b_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Tall) {
            _tile_loadd(5, a.data + a.neighbour, a_row);
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

// The same for `rows` rows, which may be fewer than a block.
inline void multiply(TileRegisters& tiles, int rows, Operand a, Operand b, long steps, float* sums, long width,
                     bool from_zero = true, bool prefetch = false) {
    tiles.configure(rows);
    if (rows > kSide) multiply<true>(a, b, steps, sums, width, from_zero, prefetch);
    else multiply<false>(a, b, steps, sums, width, from_zero, prefetch);
}

// Rounds kDepth numbers to bf16.
inline void round_to_bf16(const float* from, bf16* to) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kSide), _mm512_loadu_ps(from));
    std::memcpy(to, &both, sizeof both);
#else
    for (int i = 0; i < kDepth; i++) to[i] = round_bf16(from[i]);
#endif
}

// Interleaves two rows.
inline void pair(const bf16* a, const bf16* b, int count, bf16* to) {
    int j = 0;
#if defined(__AVX512F__)
    auto wide = [](const bf16* data) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data))); };
    for (; j + 16 <= count; j += 16)
        _mm512_storeu_si512(to + 2 * j, _mm512_or_si512(wide(a + j), _mm512_slli_epi32(wide(b + j), 16)));
#endif
    for (; j < count; j++) to[2 * j] = a[j], to[2 * j + 1] = b[j];
}

// Interleaves rows in pairs, as AMX reads its second operand: [rows / 2][count][2], with a stride of `to_stride` pairs.
inline void pair_rows(const bf16* from, long from_stride, int rows, int count, bf16* to, long to_stride) {
    for (int r = 0; r < rows; r += 2, from += 2 * from_stride, to += 2 * to_stride) pair(from, from + from_stride, count, to);
}

}  // namespace ember::amx
#endif
