"""Reader: files from disk into memory as fast as the disk gives them: in pieces, in order, each byte once.

It needs only the standard library, so that a process can start it first and import torch while the disk is busy; the
reads hold no lock of the interpreter. What is read waits in buffers. `ring` of them are used again and again, and are
worth pinning; until the first piece is taken, up to `ahead` bytes more go to buffers that are used once.

    claimed by a thread -> filled -> take() -> give_back() -> claimed ...
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emberline.core.errors import ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint

ALIGN = 4096  # of offsets, lengths and memory in direct reads
PIECE = 32 << 20
AT_ONCE = 4  # pieces that one call reads until the first is taken: an import may keep the interpreter for a while
THREADS = 12
RING = 24
AHEAD = 8 << 30
STALL = 60.0  # seconds without a piece after which a disk counts as dead


def files_of(checkpoint: Checkpoint) -> list[Path]:
    return sorted({tensor.file for tensor in checkpoint.tensors.values()})


class Buffer:
    """Fresh pages. `number` is below the ring's size for those that are used again."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a kernel without huge pages is only slower
            self.memory.madvise(mmap.MADV_HUGEPAGE)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + length) of a file, at the start of the buffer."""

    file: Path
    offset: int
    length: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class ReadStats:
    bytes: int
    seconds: float  # in which at least one read was under way
    direct_bytes: int  # that went past the page cache

    @property
    def rate(self) -> float:
        """GB/s"""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Reader:
    """Threads that fill buffers. One caller takes pieces and gives them back; it must close the reader."""

    def __init__(self, files: Sequence[_File], *, threads: int, piece: int, ring: int, ahead: int) -> None:
        assert piece > 0 and piece % ALIGN == 0 and ring > 0 and threads > 0
        self.files = {file.path for file in files}
        self.ring = ring
        self._files = files
        self._size = piece
        self._most = ring + ahead // piece  # buffers ever made before the first piece is taken
        self._jobs = deque((file, offset) for file in files for offset in range(0, file.size, piece))
        self._untaken = len(self._jobs)
        self._change = threading.Condition()
        self._filled: deque[Piece] = deque()
        self._free: list[Buffer] = []
        self._made = 0
        self._error: BaseException | None = None
        self._closed = False
        self._in_flight = 0
        self._since = self._busy = 0.0
        self._bytes = 0
        self._threads = [threading.Thread(target=self._work, name="reader", daemon=True) for _ in range(threads)]

    @staticmethod
    def start(
        paths: Sequence[Path],
        *,
        threads: int = THREADS,
        piece: int = PIECE,
        ring: int = RING,
        ahead: int | None = None,
    ) -> Reader:
        """`ahead`: bytes read before anyone takes them, besides the ring; by default 8 GiB or a quarter of what is
        free."""
        files: list[_File] = []
        try:
            for path in paths:
                files.append(_File(path))
        except ModelFileError:
            for file in files:
                file.close()
            raise
        ahead = min(AHEAD, _free_memory() // 4) if ahead is None else ahead
        reader = Reader(files, threads=threads, piece=piece, ring=ring, ahead=ahead)
        for thread in reader._threads:
            thread.start()
        return reader

    def ready(self) -> bool:
        """Whether `take` would return or raise at once."""
        with self._change:
            return bool(self._filled) or self._error is not None or self._untaken == 0

    def take(self, timeout: float = STALL) -> Piece | None:
        """The next piece, in the order in which reads ended; None after the last. Raises what a thread ran into."""
        deadline = time.monotonic() + timeout
        with self._change:
            self._most = 0  # from here on only the ring
            while True:
                if self._error is not None:
                    raise self._error
                if self._filled:
                    self._untaken -= 1
                    return self._filled.popleft()
                if self._untaken == 0:
                    return None
                assert not self._closed, "taken from a closed reader"
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(sorted(str(file) for file in self.files))
                    raise ModelFileError(
                        f"nothing came from the disk for {timeout:.0f} s while reading {names[:200]}",
                        hint="is the disk, or the network it is behind, alive?",
                    )
                self._change.wait(left)

    def give_back(self, piece: Piece) -> None:
        """Its buffer will be overwritten."""
        with self._change:
            if piece.buffer.number < self.ring:
                self._free.append(piece.buffer)
                self._change.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads, each after the read it is in."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for file in self._files:
                file.close()
            self._filled.clear()
            self._free.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> ReadStats:
        with self._change:
            busy = self._busy + (time.perf_counter() - self._since if self._in_flight else 0.0)
            return ReadStats(self._bytes, busy, sum(file.direct_bytes for file in self._files))

    def _work(self) -> None:
        try:
            while (job := self._claim()) is not None:
                file, pieces = job
                file.read(pieces)
                self._done(pieces)
        except BaseException as e:
            with self._change:
                self._error = self._error or e
                self._closed = True
                self._change.notify_all()

    def _claim(self) -> tuple[_File, list[Piece]] | None:
        with self._change:
            while self._jobs and not self._closed:
                buffer = self._buffer()
                if buffer is not None:
                    return self._claimed(buffer)
                self._change.wait()  # for the caller, who gives one back or closes
        return None

    def _claimed(self, buffer: Buffer | None) -> tuple[_File, list[Piece]]:
        """As many neighbours in one file as there are buffers and one call may read."""
        file, most = self._jobs[0][0], AT_ONCE if self._most else 1
        pieces: list[Piece] = []
        while buffer is not None:
            _, offset = self._jobs.popleft()
            pieces.append(Piece(file.path, offset, min(self._size, file.size - offset), buffer))
            more = len(pieces) < most and self._jobs and self._jobs[0][0] is file
            buffer = self._buffer() if more else None
        if self._in_flight == 0:
            self._since = time.perf_counter()
        self._in_flight += 1
        return file, pieces

    def _buffer(self) -> Buffer | None:
        if self._free:
            return self._free.pop()  # the last one used: its pages are there
        if self._made >= max(self.ring, self._most):
            return None
        try:
            made = Buffer(self._made, self._size)
        except OSError as e:
            raise ModelError(f"no memory to read into: {e.strerror or e}") from e
        self._made += 1
        return made

    def _done(self, pieces: list[Piece]) -> None:
        with self._change:
            self._bytes += sum(piece.length for piece in pieces)
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += time.perf_counter() - self._since
            self._filled.extend(pieces)
            self._change.notify_all()


class _File:
    """One file, open twice: past the page cache where the file system allows, and plainly for the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct_bytes = 0  # a sum over threads: a statistic, not exact
        try:
            plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(plain).st_size
        except OSError as e:
            raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e
        self._plain: int | None = plain
        self._direct: int | None = None
        self._refused = False
        with contextlib.suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        """Once is enough, twice does no harm."""
        open_ones = [fd for fd in (self._plain, self._direct) if fd is not None]
        self._plain = self._direct = None
        for fd in open_ones:
            os.close(fd)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Pieces that follow one another, each with a whole buffer. One call reads all it can; others, the rest."""
        try:
            done = self._at_once(pieces)
            for piece in pieces:
                here = min(done, piece.length)
                done -= here
                self._rest(piece, here)
        except OSError as e:
            raise ModelFileError(f"cannot read {self.path}: {e.strerror or e}") from e

    def _at_once(self, pieces: Sequence[Piece]) -> int:
        """Bytes that a direct read of whole buffers brought: up to the file's end, if nothing cut it short."""
        if self._direct is None or self._refused:
            return 0
        try:
            count = os.preadv(self._direct, [piece.buffer.memory for piece in pieces], pieces[0].offset)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._refused = True
            return 0
        count = min(count, sum(piece.length for piece in pieces))
        self.direct_bytes += count
        return count

    def _rest(self, piece: Piece, done: int) -> None:
        assert self._plain is not None
        with memoryview(piece.buffer.memory) as memory:
            while done < piece.length:
                with memory[done : piece.length] as part:
                    count = os.preadv(self._plain, [part], piece.offset + done)
                if count == 0:
                    raise ModelFileError(
                        f"{self.path} ended at byte {piece.offset + done} of {self.size} while it was read",
                        hint="download the file again",
                    )
                done += count


def _free_memory() -> int:
    """Bytes the system, or the container's limit, leaves; 0 where neither says."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(found, default=0))
