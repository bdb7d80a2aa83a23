// The compressed form of weights on disk, block by block: docs/unweight-format.md. Python reads and writes the files and the code.
#pragma once
#include <cstdint>

extern "C" {

// Adds the number of occurrences of each symbol to `counts` [256]. `width`: bytes of an element, 1, 2 or 4.
void ember_unweight_count(const void* elements, long count, int width, uint64_t* counts);

// Encodes whole blocks and a shorter one at the end. Returns the bytes written to `coded`, which must be large enough for the
// worst case. `lengths` [256]: lengths of the code words. `index`: 12 bytes per block.
long ember_unweight_encode(const void* elements, long count, int width, const uint8_t* lengths, uint8_t* coded, uint8_t* index);

// Decodes; returns -1, or the index of the first damaged block. Reads nothing outside `coded` [size] and writes nothing outside
// `elements`, whatever the data.
long ember_unweight_decode(const uint8_t* coded, long size, const uint8_t* index, long count, int width, const uint8_t* lengths,
                           int check, void* elements);

uint32_t ember_crc32(const void* data, long size, uint32_t before);
}
