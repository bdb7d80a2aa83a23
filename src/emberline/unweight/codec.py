"""WeightCodec: encodes tensor elements into compressed blocks and decodes them, in C++ or numpy.

Numpy is used if the native library was not built. Both produce the same bytes, release the GIL and are thread-safe.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.unweight.format import INDEX_ENTRY_BYTES, Bytes, count_blocks, max_coded_bytes
from emberline.unweight.prefix_code import PrefixCode


class WeightCodec(Protocol):
    name: str

    def count_symbols(self, elements: Bytes, element_bytes: int) -> NDArray[np.uint64]:
        """Return the number of occurrences of each symbol (exponent) in the elements."""

    def encode(self, elements: Bytes, element_bytes: int, code: PrefixCode) -> tuple[Bytes, Bytes]:
        """Return the coded blocks and their index entries. The last block may have fewer elements."""

    def decode(
        self, coded: Bytes, index: Bytes, element_bytes: int, code: PrefixCode, out: Bytes, *, verify_crc: bool = True
    ) -> int:
        """Decode blocks into `out`; return -1, or the index of the first damaged block.

        `out` must have the size of the decoded blocks; the last block may have fewer elements. With `verify_crc`, the
        CRC-32 of each block is verified.
        """

    def crc32(self, data: Bytes, previous_crc: int = 0) -> int:
        """Return the CRC-32 of `data`, continued from `previous_crc`, the CRC-32 of preceding bytes."""


class NativeWeightCodec:
    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def count_symbols(self, elements: Bytes, element_bytes: int) -> NDArray[np.uint64]:
        counts = np.zeros(256, np.uint64)
        self._library.ember_unweight_count(
            _address_of(elements), len(elements) // element_bytes, element_bytes, _address_of(counts)
        )
        return counts

    def encode(self, elements: Bytes, element_bytes: int, code: PrefixCode) -> tuple[Bytes, Bytes]:
        count = len(elements) // element_bytes
        coded, index = (
            np.empty(max_coded_bytes(count, element_bytes), np.uint8),
            np.empty(INDEX_ENTRY_BYTES * count_blocks(count), np.uint8),
        )
        size = self._library.ember_unweight_encode(
            _address_of(elements), count, element_bytes, _address_of(code.lengths), _address_of(coded),
            _address_of(index),
        )  # fmt: skip
        assert size <= len(coded)
        return coded[:size], index

    def decode(
        self, coded: Bytes, index: Bytes, element_bytes: int, code: PrefixCode, out: Bytes, *, verify_crc: bool = True
    ) -> int:
        count = len(out) // element_bytes
        assert len(index) == INDEX_ENTRY_BYTES * count_blocks(count) and out.flags.writeable
        return int(
            self._library.ember_unweight_decode(
                _address_of(coded),
                len(coded),
                _address_of(index),
                count,
                element_bytes,
                _address_of(code.lengths),
                verify_crc,
                _address_of(out),
            )
        )

    def crc32(self, data: Bytes, previous_crc: int = 0) -> int:
        return int(self._library.ember_crc32(_address_of(data), len(data), previous_crc))


def select_weight_codec(library: ctypes.CDLL | None) -> WeightCodec:
    if library is None:
        from emberline.unweight.numpy_codec import NumpyWeightCodec

        return NumpyWeightCodec()
    return NativeWeightCodec(library)


def _address_of(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
