"""BlockFileIO: writes and reads one KV block per file, in the format of `blockformat.py`.

Compressed blocks are padded to a multiple of 1/32 of the buffer size. So nearly all files have the same length, and a
new block can overwrite the file of an old one.

A file is written under a temporary name and renamed when it is complete, so that a reader never sees part of a block.
The file of an evicted block is overwritten instead of deleted, because freeing disk space is slow (measured: nine times
slower on a file system with discard). The file is renamed before it is overwritten. A reader checks after its last byte
that the file still has its name.

There is no fsync. The cache may lose blocks when the power fails, and a file that was written only in part does not
match its checksum. Reads and writes bypass the page cache if the file system supports it (measured: twice as fast for
blocks that are not cached, and no block is in memory twice).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from emberline.kv.tiers.base import PAGE_BYTES
from emberline.kv.tiers.blockformat import BlockFormat
from emberline.kv.tiers.coding_gain import BlockReadTiming

NUM_CODED_LENGTHS = 32  # an encoded block is padded to one of so many lengths
O_DIRECT = getattr(os, "O_DIRECT", 0)
# Another program may have created the file: follow no links, do not block on pipes.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_VectorIO = Callable[[int, Sequence[memoryview]], int]  # os.readv or os.writev


@dataclass(slots=True)
class BlockFileIO:
    """Writes and reads block files of one memory layout."""

    format: BlockFormat
    uses_direct_io: bool = field(default=bool(O_DIRECT))  # cleared when the file system rejects it
    _scratch_buffers: list[memoryview] = field(default_factory=list)  # unused ones, kept for the next call

    def write(
        self, path: Path, temporary_path: Path, block_hash: bytes, buffer: memoryview, *, encode: bool = False
    ) -> int:
        """Write a block to `temporary_path`, rename the file to `path`, and return the file's length.

        `temporary_path` may be an old file, which is overwritten.
        """
        with self._scratch_buffer() as scratch:
            payload = self.format.write(
                block_hash, buffer, scratch, encode=encode, max_encoded_bytes=len(buffer) - self._padding_unit_bytes
            )
            size = self._padded_length(len(payload))
            body = buffer
            if payload is not buffer:
                body = scratch[PAGE_BYTES : PAGE_BYTES + size]
                body[len(payload) :] = bytes(size - len(payload))
            try:
                self._write_file(temporary_path, [scratch[:PAGE_BYTES], body])
                temporary_path.rename(path)
            except OSError:
                temporary_path.unlink(missing_ok=True)
                raise
            return PAGE_BYTES + len(body)

    def read(self, path: Path, block_hash: bytes, buffer: memoryview) -> BlockReadTiming | None:
        """Read a block into the buffer and return how long reading and decoding took.

        Return None if the file is damaged or contains a different block; the buffer's content is then undefined. Raises
        FileNotFoundError if the file does not exist or was evicted during the read.
        """
        began, handle = time.perf_counter(), self._open(path, READ_FLAGS)
        try:
            with self._scratch_buffer() as scratch:
                status = os.fstat(handle)
                plain = status.st_size == self.format.uncompressed_bytes
                body = buffer if plain else scratch[PAGE_BYTES : max(PAGE_BYTES, status.st_size)]
                complete = self.is_valid_file_length(status.st_size)
                complete = (
                    complete and self._run_vector_io(os.readv, handle, [scratch[:PAGE_BYTES], body]) == status.st_size
                )
                if not os.path.samestat(status, path.lstat()):
                    raise FileNotFoundError(errno.ENOENT, "the block file was evicted while it was read", str(path))
                seconds = time.perf_counter() - began
                if not complete or not self.format.read(block_hash, scratch[:PAGE_BYTES], body, buffer):
                    return None
            os.utime(handle)  # after a restart, blocks are evicted in the order of these times
            return BlockReadTiming(status.st_size, seconds, 0.0 if plain else time.perf_counter() - began - seconds)
        finally:
            os.close(handle)

    def is_valid_file_length(self, size: int) -> bool:
        """Return whether a complete block file can have this length."""
        coded = (
            PAGE_BYTES < size < self.format.uncompressed_bytes
            and self._padded_length(size - PAGE_BYTES) == size - PAGE_BYTES
        )
        return size == self.format.uncompressed_bytes or (coded and self.format.codec is not None)

    @property
    def _padding_unit_bytes(self) -> int:
        return -(-self.format.buffer_bytes // (NUM_CODED_LENGTHS * PAGE_BYTES)) * PAGE_BYTES

    def _padded_length(self, size: int) -> int:
        return -(-size // self._padding_unit_bytes) * self._padding_unit_bytes

    @contextmanager
    def _scratch_buffer(self) -> Iterator[memoryview]:
        try:
            scratch = self._scratch_buffers.pop()
        except IndexError:
            scratch = memoryview(mmap.mmap(-1, self.format.scratch_bytes))
        yield scratch
        self._scratch_buffers.append(scratch)

    def _write_file(self, path: Path, parts: list[memoryview]) -> None:
        handle = self._open(path, WRITE_FLAGS)
        try:
            size, written = sum(map(len, parts)), self._run_vector_io(os.writev, handle, parts)
            if written != size:  # a disk that fills up writes a part
                raise OSError(errno.ENOSPC, f"only {written} of {size} bytes of a block file were written", str(path))
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
        finally:
            os.close(handle)

    def _open(self, path: Path, flags: int) -> int:
        if self.uses_direct_io:
            try:
                return os.open(path, flags | O_DIRECT, 0o600)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self.uses_direct_io = False
                if flags & os.O_CREAT:  # some file systems create the file before they reject O_DIRECT
                    path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600)

    def _run_vector_io(self, vector_io: _VectorIO, descriptor: int, buffers: list[memoryview]) -> int:
        try:
            return vector_io(descriptor, buffers)
        except OSError as e:
            if e.errno != errno.EINVAL or not self.uses_direct_io:
                raise
            self.uses_direct_io = False  # O_DIRECT was accepted at open, but not for buffers of this alignment
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~O_DIRECT)
        return vector_io(descriptor, buffers)
