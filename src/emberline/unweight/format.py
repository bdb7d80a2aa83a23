"""Constants of the packed file format (docs/unweight-format.md); kernels/cpu/unweight.cpp repeats them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

BLOCK = 1 << 16
STREAMS = 4
INDEX = 12  # per block: u16 size of each stream, u32 CRC-32 of the block
BITS = 11
SYMBOLS = 6
ALIGN = 64  # the size of a coded tensor is a multiple of this
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}  # other dtypes are stored raw
LEAST = 4096  # smaller tensors are stored raw
GAIN = 0.98  # a tensor is coded if this shrinks it at least to this part of its size


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def segments(count: int) -> NDArray[np.int64]:
    """Return where each stream's part of a block of `count` elements begins, and where the last part ends."""
    return np.minimum(np.arange(STREAMS + 1) * -(-count // STREAMS), count)


def most_coded(count: int, width: int) -> int:
    """Return the most bytes that encoding `count` elements writes; a stream is written 8 bytes at a time."""
    return (width - 1) * count + -(-count * BITS // 8) + 8 * STREAMS * blocks_of(count)
