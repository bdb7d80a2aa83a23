"""BlockFormat: the byte format of a stored block. It is a header page, then the plain or compressed content.

offset  type  header field         offset  type  header field
0       8s    magic                36      16s   block hash
8       u32   version              52      u64   content bytes after the page, without padding
12      8s    codec name, zeros    60      u32   CRC-32 of the content
              for plain content    64      u32   CRC-32 of the header up to here
20      16s   layout hash
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from emberline.kv.checksum import Crc
from emberline.kv.codec import KVCodec
from emberline.kv.tiers.base import PAGE_BYTES

MAGIC = b"EMBERKV\0"
VERSION = 2
HEADER_FIELDS = struct.Struct("<8sI8s16s16sQI")
HEADER_CRC = struct.Struct("<I")


def layout_hash(layout: str) -> bytes:
    return blake2b(layout.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The format of stored blocks of one memory layout."""

    layout: bytes
    buffer_bytes: int
    crc: Crc
    codec: KVCodec | None = None

    @property
    def uncompressed_bytes(self) -> int:
        """The length of an uncompressed block with its header page. No stored block is longer."""
        return PAGE_BYTES + self.buffer_bytes

    @property
    def scratch_bytes(self) -> int:
        """The size of the scratch memory that `write` needs, and that a stored block can be read into."""
        return PAGE_BYTES + max(self.buffer_bytes, self.codec.max_encoded_bytes(self.buffer_bytes) if self.codec else 0)

    def write(
        self, block_hash: bytes, buffer: memoryview, scratch: memoryview, *, encode: bool, max_encoded_bytes: int
    ) -> memoryview:
        """Write the header page to `scratch` and return the content that must follow it.

        With `encode`, the content is compressed into `scratch` behind the page, unless the result is longer than
        `max_encoded_bytes`. Otherwise the content is the buffer itself.
        """
        assert max_encoded_bytes < self.buffer_bytes
        payload, name = buffer, b""
        if encode and self.codec is not None:
            size = self.codec.encode(buffer, scratch[PAGE_BYTES:])
            if size <= max_encoded_bytes:
                payload, name = scratch[PAGE_BYTES : PAGE_BYTES + size], self.codec.name.encode()
        header = self._pack_header(name, block_hash, len(payload), self.crc(payload, 0))
        scratch[:PAGE_BYTES] = header.ljust(PAGE_BYTES, b"\0")
        return payload

    def read(self, block_hash: bytes, header_page: memoryview, body: memoryview, buffer: memoryview) -> bool:
        """Check a stored block, decode it into the buffer and return True.

        Return False if the block is damaged or has a different hash. For an uncompressed block, `body` may be the
        buffer itself.
        """
        *_, length, _ = HEADER_FIELDS.unpack(header_page[: HEADER_FIELDS.size])
        plain, codec = len(body) == self.buffer_bytes, self.codec
        if length > len(body) or (codec is None and not plain):
            return False
        name = codec.name.encode() if codec and not plain else b""
        header = self._pack_header(name, block_hash, length, self.crc(body[:length], 0))
        if header_page[: len(header)] != header:
            return False
        if codec and not plain:
            return codec.decode(body[:length], buffer)
        if body is not buffer:
            buffer[:] = body
        return True

    def _pack_header(self, codec_name: bytes, block_hash: bytes, length: int, crc: int) -> bytes:
        header = HEADER_FIELDS.pack(MAGIC, VERSION, codec_name, self.layout, block_hash, length, crc)
        return header + HEADER_CRC.pack(self.crc(memoryview(bytearray(header)), 0))
