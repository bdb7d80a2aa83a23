"""BlockFiles: writes and reads one block per file, in the format of `blockformat.py`.

Encoded blocks are padded to a multiple of 1/32 of the buffer, so that nearly all files have the same length and can be
overwritten in place.

A file is written under a temporary name and renamed when it is complete, so a reader sees all of it or nothing. The
file of an evicted block is overwritten instead of deleted, because freeing disk space is slow (measured: nine times
slower on a file system with discard). It is renamed before that, and a reader checks after its last byte that the file
still has its name.

There is no fsync: a cache may lose blocks when the power fails, and a file torn by a crash does not match its CRC.
Reads and writes bypass the page cache if the file system supports it (measured: twice as fast for cold blocks, and no
block is in memory twice).
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

from emberline.kv.tiers.base import PAGE
from emberline.kv.tiers.blockform import BlockForm
from emberline.kv.tiers.gain import Reading

STEPS = 32  # an encoded block is padded to one of so many lengths
DIRECT = getattr(os, "O_DIRECT", 0)
# Another program may have created the file: follow no links, do not block on pipes.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_Vector = Callable[[int, Sequence[memoryview]], int]  # os.readv or os.writev


@dataclass(slots=True)
class BlockFiles:
    """Writes and reads the files of blocks of one layout."""

    form: BlockForm
    direct: bool = field(default=bool(DIRECT))  # cleared when the file system rejects it
    _scratch: list[memoryview] = field(default_factory=list)  # unused ones, kept for the next call

    def write(self, path: Path, temporary: Path, digest: bytes, buffer: memoryview, *, coded: bool = False) -> int:
        """Write a block to `temporary`, which may be an old file, rename it to `path`, and return its length."""
        with self._room() as room:
            payload = self.form.write(digest, buffer, room, coded=coded, worth=len(buffer) - self._step)
            size = self._padded(len(payload))
            body = buffer
            if payload is not buffer:
                body = room[PAGE : PAGE + size]
                body[len(payload) :] = bytes(size - len(payload))
            try:
                self._write(temporary, [room[:PAGE], body])
                temporary.rename(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            return PAGE + len(body)

    def read(self, path: Path, digest: bytes, buffer: memoryview) -> Reading | None:
        """Read a block into the buffer and return the timing; None if the file is damaged or is another block.

        After None the buffer is undefined. Raises FileNotFoundError if the file is missing or was evicted meanwhile.
        """
        began, handle = time.perf_counter(), self._open(path, READ)
        try:
            with self._room() as room:
                status = os.fstat(handle)
                plain = status.st_size == self.form.most_bytes
                body = buffer if plain else room[PAGE : max(PAGE, status.st_size)]
                complete = self.is_length(status.st_size)
                complete = complete and self._vector(os.readv, handle, [room[:PAGE], body]) == status.st_size
                if not os.path.samestat(status, path.lstat()):
                    raise FileNotFoundError(errno.ENOENT, "evicted while being read", str(path))
                seconds = time.perf_counter() - began
                if not complete or not self.form.read(digest, room[:PAGE], body, buffer):
                    return None
            os.utime(handle)  # after a restart, blocks are evicted in the order of these times
            return Reading(status.st_size, seconds, 0.0 if plain else time.perf_counter() - began - seconds)
        finally:
            os.close(handle)

    def is_length(self, size: int) -> bool:
        """Return whether a complete block file can have this length."""
        coded = PAGE < size < self.form.most_bytes and self._padded(size - PAGE) == size - PAGE
        return size == self.form.most_bytes or (coded and self.form.codec is not None)

    @property
    def _step(self) -> int:
        return -(-self.form.buffer_bytes // (STEPS * PAGE)) * PAGE

    def _padded(self, size: int) -> int:
        return -(-size // self._step) * self._step

    @contextmanager
    def _room(self) -> Iterator[memoryview]:
        try:
            room = self._scratch.pop()
        except IndexError:
            room = memoryview(mmap.mmap(-1, self.form.room_bytes))
        yield room
        self._scratch.append(room)

    def _write(self, path: Path, parts: list[memoryview]) -> None:
        handle = self._open(path, WRITE)
        try:
            size, written = sum(map(len, parts)), self._vector(os.writev, handle, parts)
            if written != size:  # a disk that fills up writes a part
                raise OSError(errno.ENOSPC, f"only {written} of {size} bytes were written", str(path))
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
        finally:
            os.close(handle)

    def _open(self, path: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | DIRECT, 0o600)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self.direct = False
                if flags & os.O_CREAT:  # some file systems create the file before they reject O_DIRECT
                    path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600)

    def _vector(self, call: _Vector, handle: int, buffers: list[memoryview]) -> int:
        try:
            return call(handle, buffers)
        except OSError as e:
            if e.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False  # O_DIRECT was accepted at open, but not for buffers of this alignment
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~DIRECT)
        return call(handle, buffers)
