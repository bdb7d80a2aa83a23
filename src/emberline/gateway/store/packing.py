"""How payloads are kept: deflated, quickly. Most are small, and of those preparing to compress takes longer than
compressing: a small window and little memory make it a third, and not one byte larger."""

from __future__ import annotations

import zlib

LEVEL = 1
SMALL = 4096  # bytes


def packed(data: bytes) -> bytes:
    if len(data) > SMALL:
        return zlib.compress(data, LEVEL)
    deflating = zlib.compressobj(LEVEL, zlib.DEFLATED, 12, 5)
    return deflating.compress(data) + deflating.flush()


def unpacked(data: bytes) -> bytes:
    return zlib.decompress(data)
