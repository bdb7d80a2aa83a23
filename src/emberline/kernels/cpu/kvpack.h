// Keys and values on the wire and on a disk: docs/unweight-format.md, section 6.
#pragma once
#include <cstdint>

extern "C" {

// Bytes written to `packed`, which has room for the worst case. `width`: bytes of an element, 1, 2 or 4.
long ember_kv_pack(const void* elements, long count, int width, uint8_t* packed);

// The way back: 0, or 1 if anything is not as it was packed. Reads nothing outside `packed` [size] and writes nothing outside
// `elements`, whatever they hold.
long ember_kv_unpack(const uint8_t* packed, long size, long count, int width, void* elements);
}
