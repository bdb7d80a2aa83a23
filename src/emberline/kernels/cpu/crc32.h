// CRC-32 as zlib has it. Carry-less products fold 64 bytes at a time where the processor has them.
#pragma once
#include <cstdint>

namespace ember {
uint32_t crc32(const uint8_t* data, long size, uint32_t before = 0);
}
