"""How payloads are kept: deflated, quickly. Most are small, and of those preparing to compress takes longer than
compressing: a small window and little memory make it a third, and not one byte larger. The smallest stay as they are:
a third less of so few bytes is not worth the time."""

from __future__ import annotations

import zlib

LEVEL = 1
SMALL, SMALLEST = 4096, 512  # bytes
PLAIN = b"\0"  # with which nothing deflated begins


def packed(data: bytes) -> bytes:
    if len(data) < SMALLEST:
        return PLAIN + data
    if len(data) > SMALL:
        return zlib.compress(data, LEVEL)
    deflating = zlib.compressobj(LEVEL, zlib.DEFLATED, 12, 5)
    return deflating.compress(data) + deflating.flush()


def unpacked(data: bytes) -> bytes:
    return data[1:] if data[:1] == PLAIN else zlib.decompress(data)
