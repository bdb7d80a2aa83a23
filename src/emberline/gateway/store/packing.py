"""Compression of payloads with deflate, at its fastest level.

Most payloads are small, and for these setting up the compressor takes longer than compressing. A small window and
little memory reduce the time to a third without a larger result. The smallest payloads are not compressed: saving a
third of so few bytes is not worth the time.
"""

from __future__ import annotations

import zlib

LEVEL = 1
SMALL, SMALLEST = 4096, 512
PLAIN = b"\0"  # first byte of uncompressed data; compressed data never begins with it


def packed(data: bytes) -> bytes:
    if len(data) < SMALLEST:
        return PLAIN + data
    if len(data) > SMALL:
        return zlib.compress(data, LEVEL)
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, 12, 5)
    return compressor.compress(data) + compressor.flush()


def unpacked(data: bytes) -> bytes:
    return data[1:] if data[:1] == PLAIN else zlib.decompress(data)
