"""Checksum: CRC-32 of a buffer as zlib has it; by our kernels where they could be built, several times as fast."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable

Checksum = Callable[[memoryview], int]


def checksum_of(library: ctypes.CDLL | None) -> Checksum:
    if library is None:
        return zlib.crc32

    def crc32(buffer: memoryview) -> int:
        """Of memory that may be written: ctypes gives no address of any other."""
        return int(library.ember_crc32(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), 0))

    return crc32
