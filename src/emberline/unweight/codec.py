"""WeightCodec: encodes elements to blocks and decodes them, natively or with numpy.

Numpy is used if the native library was not built. Both produce the same bytes, release the GIL and are thread-safe.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.unweight.code import Code
from emberline.unweight.format import INDEX, Bytes, blocks_of, most_coded


class Codec(Protocol):
    name: str

    def count(self, elements: Bytes, width: int) -> NDArray[np.uint64]:
        """Return the number of occurrences of each symbol."""

    def encode(self, elements: Bytes, width: int, code: Code) -> tuple[Bytes, Bytes]:
        """Return the coded blocks, of which the last may be shorter, and their index entries."""

    def decode(self, coded: Bytes, index: Bytes, width: int, code: Code, out: Bytes, *, check: bool = True) -> int:
        """Decode into `out`, the size of whole blocks and perhaps a shorter last one.

        Return -1, or the number of the first damaged block. `check`: verify the CRC-32 of the blocks.
        """

    def crc32(self, data: Bytes, before: int = 0) -> int:
        """Return the CRC-32 of the data; `start`: the CRC-32 of the bytes before it."""


class NativeCodec:
    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def count(self, elements: Bytes, width: int) -> NDArray[np.uint64]:
        counts = np.zeros(256, np.uint64)
        self._library.ember_unweight_count(_at(elements), len(elements) // width, width, _at(counts))
        return counts

    def encode(self, elements: Bytes, width: int, code: Code) -> tuple[Bytes, Bytes]:
        count = len(elements) // width
        coded, index = np.empty(most_coded(count, width), np.uint8), np.empty(INDEX * blocks_of(count), np.uint8)
        size = self._library.ember_unweight_encode(
            _at(elements), count, width, _at(code.lengths), _at(coded), _at(index)
        )  # fmt: skip
        assert size <= len(coded)
        return coded[:size], index

    def decode(self, coded: Bytes, index: Bytes, width: int, code: Code, out: Bytes, *, check: bool = True) -> int:
        count = len(out) // width
        assert len(index) == INDEX * blocks_of(count) and out.flags.writeable
        return int(
            self._library.ember_unweight_decode(
                _at(coded), len(coded), _at(index), count, width, _at(code.lengths), check, _at(out)
            )
        )

    def crc32(self, data: Bytes, before: int = 0) -> int:
        return int(self._library.ember_crc32(_at(data), len(data), before))


def codec_of(library: ctypes.CDLL | None) -> Codec:
    if library is None:
        from emberline.unweight.plain import PlainCodec

        return PlainCodec()
    return NativeCodec(library)


def _at(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
