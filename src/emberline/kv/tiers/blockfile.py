"""BlockFile: one block as a file, in the form of `blockform.py`. Coded blocks are padded to 1/32 of the buffer: nearly
all files are then equally long, and one can be written over with another.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from emberline.kv.tiers.base import PAGE
from emberline.kv.tiers.blockform import BlockForm
from emberline.kv.tiers.gain import Reading

STEPS = 32  # lengths that a coded block can have
DIRECT = getattr(os, "O_DIRECT", 0)
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a name may be a stranger's: no links, no pipes
WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_Vector = Callable[[int, Sequence[memoryview]], int]  # os.readv or os.writev


@dataclass(slots=True)
class BlockFiles:
    """How the files of one layout are written and read."""

    form: BlockForm
    direct: bool = field(default=bool(DIRECT))  # until the file system refuses
    _scratch: list[memoryview] = field(default_factory=list)  # that nobody uses now

    def write(self, path: Path, temporary: Path, digest: bytes, buffer: memoryview, *, coded: bool = False) -> int:
        """`temporary` may be an old file. How long the new one is."""
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
        """None: the file is not what its name says. In the buffer lies something, then. FileNotFoundError: there is
        none, or none any more."""
        began, handle = time.perf_counter(), self._open(path, READ)
        try:
            with self._room() as room:
                status = os.fstat(handle)
                plain = status.st_size == self.form.most_bytes
                body = buffer if plain else room[PAGE : max(PAGE, status.st_size)]
                whole = self.is_length(status.st_size)
                whole = whole and self._vector(os.readv, handle, [room[:PAGE], body]) == status.st_size
                if not os.path.samestat(status, path.lstat()):
                    raise FileNotFoundError(errno.ENOENT, "evicted while it was read", str(path))
                seconds = time.perf_counter() - began
                if not whole or not self.form.read(digest, room[:PAGE], body, buffer):
                    return None
            os.utime(handle)  # those used last survive a restart longest
            return Reading(status.st_size, seconds, 0.0 if plain else time.perf_counter() - began - seconds)
        finally:
            os.close(handle)

    def is_length(self, size: int) -> bool:
        """Whether a whole file can be so long."""
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
            if written != size:  # a disk that fills up writes what it can
                raise OSError(errno.ENOSPC, "only a part could be written", str(path))
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
