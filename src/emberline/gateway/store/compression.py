"""Compression of log payloads with deflate, at its fastest level.

Most payloads are small, and then preparing the compressor takes longer than compressing. A small window and little
memory reduce that time to a third, with results of the same size. The smallest payloads are not compressed: saving a
third of so few bytes is not worth the time.
"""

from __future__ import annotations

import zlib

COMPRESSION_LEVEL = 1
SMALL_PAYLOAD_BYTES, MIN_COMPRESSED_BYTES = 4096, 512
UNCOMPRESSED_MARK = b"\0"  # first byte of uncompressed data; compressed data never begins with it


def compress_payload(data: bytes) -> bytes:
    if len(data) < MIN_COMPRESSED_BYTES:
        return UNCOMPRESSED_MARK + data
    if len(data) > SMALL_PAYLOAD_BYTES:
        return zlib.compress(data, COMPRESSION_LEVEL)
    compressor = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, 12, 5)
    return compressor.compress(data) + compressor.flush()


def decompress_payload(data: bytes) -> bytes:
    return data[1:] if data[:1] == UNCOMPRESSED_MARK else zlib.decompress(data)
