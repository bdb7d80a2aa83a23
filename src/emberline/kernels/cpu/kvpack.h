// Compression of keys and values for the network and for disks: docs/unweight-format.md, section 6.
#pragma once
#include <cstdint>

extern "C" {

// Packs `count` elements and returns the bytes written to `packed`, which must be large enough for the worst case. `width`: bytes
// of an element, 1, 2 or 4.
long ember_kv_pack(const void* elements, long count, int width, uint8_t* packed);

// Unpacks; returns 0, or 1 if the data is damaged. Reads nothing outside `packed` [size] and writes nothing outside `elements`,
// whatever the data.
long ember_kv_unpack(const uint8_t* packed, long size, long count, int width, void* elements);
}
