"""KVCodec: lossless compression of keys and values for network transfers and for blocks on disk.

Encoded data includes checksums. The exponents of keys and values have about 2.7 bits of entropy, so a prefix code
stores a bfloat16 number in about 11 of 16 bits (docs/unweight-format.md, section 6). The codec exists only in the
native library. Without the library, data is not compressed.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from emberline.core.errors import InvalidRequest

ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}  # bytes of an element, for each dtype of a cache in main memory
CODEC_CHOICES = ("auto", "none", "uw")
GROUP_ELEMENTS = 262144  # elements that share one prefix code
MAX_GROUP_HEADER_BYTES = 512  # bytes of a group besides its coded elements
MAX_EXPANSION = 1.25  # growth of incompressible data, before the encoder notices and stores it raw


class KVCodec(Protocol):
    name: str

    def max_encoded_bytes(self, size: int) -> int:
        """Return the size of the output buffer that `encode` needs for `size` bytes of input."""

    def encode(self, data: memoryview, out: memoryview) -> int:
        """Encode `data` into `out` and return the number of bytes written.

        `out` must have at least `max_encoded_bytes(len(data))` bytes.
        """

    def decode(self, data: memoryview, out: memoryview) -> bool:
        """Decode `data` and fill `out` completely.

        Return False if `data` is damaged. The content of `out` is then undefined.
        """


class UnweightKVCodec:
    name = "uw1"

    def __init__(self, library: ctypes.CDLL, element_bytes: int) -> None:
        assert element_bytes in ELEMENT_BYTES.values()
        self._library = library
        self._element_bytes = element_bytes

    def max_encoded_bytes(self, size: int) -> int:
        return int(size * MAX_EXPANSION) + MAX_GROUP_HEADER_BYTES * (size // (GROUP_ELEMENTS * self._element_bytes) + 1)

    def encode(self, data: memoryview, out: memoryview) -> int:
        count, remainder = divmod(len(data), self._element_bytes)
        assert not remainder and len(out) >= self.max_encoded_bytes(len(data)) and not out.readonly
        return int(self._library.ember_kv_pack(address_of(data), count, self._element_bytes, address_of(out)))

    def decode(self, data: memoryview, out: memoryview) -> bool:
        count, remainder = divmod(len(out), self._element_bytes)
        assert not remainder and not out.readonly
        return not self._library.ember_kv_unpack(
            address_of(data), len(data), count, self._element_bytes, address_of(out)
        )


def select_kv_codec(codec_setting: str, library: ctypes.CDLL | None, dtype: str) -> KVCodec | None:
    """Return the codec for a cache with this torch dtype, or None if blocks are not compressed.

    `codec_setting` is the setting `kv_codec`. Raises InvalidRequest if it is unknown, or if it is "uw" and the codec
    cannot be used.
    """
    dtype = dtype.removeprefix("torch.")
    if codec_setting not in CODEC_CHOICES:
        raise InvalidRequest(f"kv_codec is {codec_setting!r}, but must be auto, none or uw", param="kv_codec")
    if codec_setting == "none":
        return None
    if library is not None and dtype in ELEMENT_BYTES:
        return UnweightKVCodec(library, ELEMENT_BYTES[dtype])
    if codec_setting == "uw":
        why = "the native library was not built (install g++)" if library is None else f"no support for dtype {dtype}"
        raise InvalidRequest(f"kv_codec uw cannot be used: {why}", param="kv_codec", hint="use --kv-codec auto")
    return None


def address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
