"""The numbers of the disk form; kernels/cpu/unweight.cpp has the same."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

BLOCK = 1 << 16  # elements
STREAMS = 4  # of a block
INDEX = 12  # bytes of a block's entry: u16 size of each stream, u32 CRC-32 of the block
BITS = 11  # of the longest code
SYMBOLS = 6  # that one look-up finds at most
ALIGN = 64  # of a coded tensor's size
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}  # bytes of an element; other dtypes stay raw
LEAST = 4096  # elements of a tensor worth the trouble
GAIN = 0.98  # a tensor is coded if that makes it this small


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def segments(count: int) -> NDArray[np.int64]:
    """Where the parts of a block of so many elements begin that the streams carry, and where the last ends."""
    return np.minimum(np.arange(STREAMS + 1) * -(-count // STREAMS), count)


def most_coded(count: int, width: int) -> int:
    """Bytes that encoding so many elements may write; a stream is stored 8 bytes at a time."""
    return (width - 1) * count + -(-count * BITS // 8) + 8 * STREAMS * blocks_of(count)
