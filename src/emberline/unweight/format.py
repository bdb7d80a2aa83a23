"""Constants of the packed file format (docs/unweight-format.md).

`kernels/cpu/unweight.cpp` has the same constants.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

BLOCK_ELEMENTS = 1 << 16
BLOCK_STREAMS = 4
INDEX_ENTRY_BYTES = 12  # per block: u16 size of each stream, u32 CRC-32 of the block
MAX_CODE_BITS = 11
MAX_LOOKUP_SYMBOLS = 6
ALIGN_BYTES = 64  # the size of a coded tensor is a multiple of this
ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}  # other dtypes are stored raw
MIN_ELEMENTS = 4096  # smaller tensors are stored raw
MAX_CODED_RATIO = 0.98  # a tensor is coded only if its coded size is at most this share of its size


def count_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK_ELEMENTS)


def stream_bounds(num_elements: int) -> NDArray[np.int64]:
    """Return the bounds at which a block of this many elements is split into its BLOCK_STREAMS streams.

    Stream i has the elements [bounds[i], bounds[i + 1]).
    """
    return np.minimum(np.arange(BLOCK_STREAMS + 1) * -(-num_elements // BLOCK_STREAMS), num_elements)


def max_coded_bytes(num_elements: int, element_bytes: int) -> int:
    """Return an upper bound of the bytes that encoding writes. The encoder writes streams in units of 8 bytes."""
    return (
        (element_bytes - 1) * num_elements
        + -(-num_elements * MAX_CODE_BITS // 8)
        + 8 * BLOCK_STREAMS * count_blocks(num_elements)
    )
