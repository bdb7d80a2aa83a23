// Products of rounded inputs and unpacked blocks with AMX: 16 rows by 16 columns at once, for the codes that share a scale. The sums
// of integers are exact, so the bits are those of the other tiles.
#pragma once
#include "blocks.h"
#include "tiles.h"

#if EMBER_AMX && defined(__AMX_INT8__)
#define EMBER_AMX_INT8 1
#else
#define EMBER_AMX_INT8 0
#endif

#if EMBER_AMX_INT8
namespace ember::amx {

// The tile registers of this thread: 0 to 3 are sums, 4 and 5 inputs, 6 and 7 codes.
class Int8Tiles {
public:
    Int8Tiles() = default;
    Int8Tiles(const Int8Tiles&) = delete;
    ~Int8Tiles() {
        if (rows_) _tile_release();
    }

    // Configures the registers for `rows` rows and `run` consecutive codes.
    void configure(int rows, int run) {
        if (rows == rows_ && run == run_) return;
        rows_ = rows, run_ = run;
        TileConfig config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = uint8_t(rows);
        for (int tile : {4, 5}) config.row_bytes[tile] = uint16_t(run);
        for (int tile : {6, 7}) config.rows[tile] = uint8_t(run / 4);
        asm volatile("" : : "r"(&config) : "memory");  // some compilers assume that the next line reads only the first bytes
        _tile_loadconfig(&config);
    }

private:
    int rows_ = 0, run_ = 0;
};

// Inputs and codes of consecutive runs: addresses of the first, and strides.
struct Runs {
    const int8_t* inputs;
    long input_stride;
    const uint8_t* codes;
    long block_stride;
};

// Stores the sums of runs [i, i + 4) into `to`, which has R rows of 16 for each.
template <int Run, int R>
inline void multiply_runs(const Runs& runs, long i, int32_t* to) {
    constexpr int per_block = kBlock / Run;
    auto inputs = [&](long at) { return runs.inputs + at * Run; };
    auto codes = [&](long at) { return runs.codes + at / per_block * runs.block_stride + at % per_block * (Run / 4 * 64); };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, inputs(i), runs.input_stride);
    _tile_loadd(6, codes(i), 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, inputs(i + 1), runs.input_stride);
    _tile_loadd(7, codes(i + 1), 64);
    _tile_dpbssd(1, 5, 7);
    _tile_loadd(4, inputs(i + 2), runs.input_stride);
    _tile_loadd(6, codes(i + 2), 64);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(5, inputs(i + 3), runs.input_stride);
    _tile_loadd(7, codes(i + 3), 64);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(0, to, 64);
    _tile_stored(1, to + R * 16, 64);
    _tile_stored(2, to + 2 * R * 16, 64);
    _tile_stored(3, to + 3 * R * 16, 64);
}

}  // namespace ember::amx
#endif
