"""Codec: lossless compression of keys and values on the wire and on a disk. What it made carries its own checksums.

The exponents of keys and values have about 2.7 bits of entropy; a prefix code takes 11 of 16 bits for a bfloat16 in all
(docs/unweight-format.md, section 6). Native only: where the library could not be built, bytes travel as they are.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from emberline.core.errors import InvalidRequest

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of an element of what a cache in main memory can hold
CHOICES = ("auto", "none", "uw")
STRETCH = 262144  # elements that share a code
HEAD = 512  # bytes that a stretch needs at most besides these
WORST = 1.25  # by which they grow at most before it is seen that they do


class Codec(Protocol):
    name: str

    def room(self, size: int) -> int:
        """Bytes that so many may need while they are encoded."""

    def encode(self, data: memoryview, out: memoryview) -> int:
        """Into `out`, which has room. How many bytes of it."""

    def decode(self, data: memoryview, out: memoryview) -> bool:
        """Fills `out`. False: these are not the bytes that were encoded, and in `out` lies something."""


class Unweight:
    name = "uw1"

    def __init__(self, library: ctypes.CDLL, width: int) -> None:
        assert width in WIDTHS.values()
        self._library = library
        self._width = width

    def room(self, size: int) -> int:
        return int(size * WORST) + HEAD * (size // (STRETCH * self._width) + 1)

    def encode(self, data: memoryview, out: memoryview) -> int:
        count, odd = divmod(len(data), self._width)
        assert not odd and len(out) >= self.room(len(data)) and not out.readonly
        return int(self._library.ember_kv_pack(_at(data), count, self._width, _at(out)))

    def decode(self, data: memoryview, out: memoryview) -> bool:
        count, odd = divmod(len(out), self._width)
        assert not odd and not out.readonly
        return not self._library.ember_kv_unpack(_at(data), len(data), count, self._width, _at(out))


def codec_of(choice: str, library: ctypes.CDLL | None, dtype: str) -> Codec | None:
    """For a cache whose elements are of `dtype`, by torch's name. None: bytes stay as they are."""
    dtype = dtype.removeprefix("torch.")
    if choice not in CHOICES:
        raise InvalidRequest(f"kv_codec is {choice!r}; it is auto, none or uw", param="kv_codec")
    if choice == "none":
        return None
    if library is not None and dtype in WIDTHS:
        return Unweight(library, WIDTHS[dtype])
    if choice == "uw":
        why = "there is no native library (install g++)" if library is None else f"the codec does not know {dtype}"
        raise InvalidRequest(f"keys and values cannot be coded: {why}", param="kv_codec", hint="use --kv-codec auto")
    return None


def _at(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
