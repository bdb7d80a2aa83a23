// CRC-32 as in zlib. Folds 64 bytes at a time with carry-less multiplication if the CPU supports it.
#pragma once
#include <cstdint>

namespace ember {
uint32_t crc32(const uint8_t* data, long size, uint32_t before = 0);
}
