"""BlockFile: one block as a file: a page that says what it is, then the buffer.

    0   8s   magic            36  16s  the block's hash
    8   u32  version          52  u64  bytes that follow the page
    12  u64  reserved, 0      60  u32  CRC-32 of these
    20  16s  layout's hash    64  u32  CRC-32 of all above

A file comes into being under another name and is renamed when it is complete: whoever opens it sees all of it or none.
Files of evicted blocks are written over instead of removed, since giving room back is what a disk is slow at (measured:
nine times as slow where the file system discards). They lose their name before that, and who reads one sees after the
last byte whether it still had its name.

There is no fsync: a cache may lose blocks when the power fails, and what a crash has torn does not match its CRC. Reads
and writes go around the page cache where the file system allows it (measured: twice as fast for cold blocks; and
nothing is kept in memory twice).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from emberline.kv.checksum import Crc
from emberline.kv.tiers.base import PAGE

MAGIC = b"EMBERKV\0"
VERSION = 1
FIELDS = struct.Struct("<8sIQ16s16sQI")
SEAL = struct.Struct("<I")
DIRECT = getattr(os, "O_DIRECT", 0)
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a name may be a stranger's: no links, no pipes
WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_Vector = Callable[[int, Sequence[memoryview]], int]  # os.readv or os.writev


def layout_hash(layout: str) -> bytes:
    return blake2b(layout.encode(), digest_size=16).digest()


@dataclass(slots=True)
class BlockFiles:
    """How the files of one layout are written and read."""

    layout: bytes
    buffer_bytes: int
    crc: Crc
    direct: bool = field(default=bool(DIRECT))  # until the file system refuses

    @property
    def file_bytes(self) -> int:
        return PAGE + self.buffer_bytes

    def write(self, path: Path, temporary: Path, digest: bytes, buffer: memoryview) -> None:
        """`temporary` may be an old file, as long as any."""
        page = memoryview(mmap.mmap(-1, PAGE))
        head = self._head(digest, self.crc(buffer, 0))
        page[: len(head)] = head
        try:
            handle = self._open(temporary, WRITE)
            try:
                written = self._vector(os.writev, handle, [page, buffer])
            finally:
                os.close(handle)
            if written != self.file_bytes:  # a disk that fills up writes what it can
                raise OSError(errno.ENOSPC, "only a part could be written", str(temporary))
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, path: Path, digest: bytes, buffer: memoryview) -> bool:
        """False: the file is not what its name says. In the buffer lies something, then. FileNotFoundError: there is
        none, or none any more."""
        page = memoryview(mmap.mmap(-1, PAGE))
        handle = self._open(path, READ)
        try:
            status = os.fstat(handle)
            whole = status.st_size == self.file_bytes
            whole = whole and self._vector(os.readv, handle, [page, buffer]) == self.file_bytes
            if not os.path.samestat(status, path.lstat()):
                raise FileNotFoundError(errno.ENOENT, "evicted while it was read", str(path))
            if not whole:
                return False
            head = self._head(digest, self.crc(buffer, 0))
            if page[: len(head)] != head:
                return False
            os.utime(handle)  # those used last survive a restart longest
            return True
        finally:
            os.close(handle)

    def _head(self, digest: bytes, crc: int) -> bytes:
        head = FIELDS.pack(MAGIC, VERSION, 0, self.layout, digest, self.buffer_bytes, crc)
        return head + SEAL.pack(self.crc(memoryview(bytearray(head)), 0))

    def _open(self, path: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | DIRECT, 0o600)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self.direct = False
                if flags & os.O_CREAT:  # some make the file before they refuse
                    path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600)

    def _vector(self, call: _Vector, handle: int, buffers: list[memoryview]) -> int:
        try:
            return call(handle, buffers)
        except OSError as e:
            if e.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False  # opened, but not for buffers as ours are
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~DIRECT)
        return call(handle, buffers)
