// The disk form of weights, block by block: docs/unweight-format.md. Python holds the code and the files.
#pragma once
#include <cstdint>

extern "C" {

// How often each symbol occurs, added to `counts` [256]. `width`: bytes of an element, 1, 2 or 4.
void ember_unweight_count(const void* elements, long count, int width, uint64_t* counts);

// Whole blocks, and a shorter one at the end. `lengths` [256]: of the code. `index`: 12 bytes a block. Bytes written to
// `coded`, which has room for the worst case.
long ember_unweight_encode(const void* elements, long count, int width, const uint8_t* lengths, uint8_t* coded, uint8_t* index);

// The way back. -1 if all is well, otherwise the first block that is not. Reads nothing outside `coded` [size] and writes
// nothing outside `elements`, whatever they hold.
long ember_unweight_decode(const uint8_t* coded, long size, const uint8_t* index, long count, int width, const uint8_t* lengths,
                           int check, void* elements);

uint32_t ember_crc32(const void* data, long size, uint32_t before);
}
