"""FileReader: threads that read files into memory in chunks, in order, at the speed of the disk.

It needs only the standard library, so that a process can start it first and import torch while the disk is busy; reads
release the GIL. Chunks wait in buffers until they are taken. `ring` buffers are reused, and are worth pinning. Until
the first chunk is taken, up to `read_ahead_bytes` more go to buffers that are used once. Before that, parts of other
files (`prefetch`) can be read into the page cache.

    claimed by a thread -> filled -> take() -> give_back() -> claimed ...
"""

from __future__ import annotations

import contextlib
import ctypes
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
from emberline.core.freememory import free_memory
from emberline.hub.checkpoint import Checkpoint

ALIGN = 4096  # of offsets, lengths and memory
PIECE = 32 << 20
THREADS = 12
RING = 24
HUGE = 2 << 20
FIRST = 1 << 20
Memory = mmap.mmap | memoryview
STALL = 60.0  # time without a new chunk after which loading fails


def files_of(checkpoint: Checkpoint) -> list[Path]:
    return sorted({tensor.file for tensor in checkpoint.tensors.values()})


class Buffer:
    """A buffer of new pages. Buffers with a `number` below the ring's size are reused."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.touched = False
        pages = self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a kernel without huge pages is only slower
            pages.madvise(mmap.MADV_HUGEPAGE)

    @property
    def memory(self) -> Memory:
        return self._pages

    def copy_to(self, address: int, length: int) -> None:
        """Copy the first `length` bytes to the caller's memory, with the GIL released."""
        ctypes.memmove(address, (ctypes.c_char * 1).from_buffer(self.memory), length)

    def touch(self, zero: int) -> None:
        """Allocate the buffer's pages by reading from /dev/zero into each.

        A direct read would allocate them under the lock of the address space, for which an import in another thread
        waits at each library that it maps.
        """
        self.touched = True
        with memoryview(self.memory) as memory, contextlib.ExitStack() as parts:
            os.readv(zero, [parts.enter_context(memory[at : at + 1]) for at in range(0, len(memory), HUGE)])


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + length) of a file, in the first bytes of a buffer."""

    file: Path
    offset: int
    length: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class ReadStats:
    bytes: int
    seconds: float  # time during which at least one read was running
    direct_bytes: int  # bytes read without the page cache

    @property
    def rate(self) -> float:
        """Average rate in GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Reader:
    """Threads that fill buffers. One caller takes chunks, gives them back, and must close the reader."""

    def __init__(
        self,
        files: Sequence[File],
        *,
        threads: int,
        piece: int,
        ring: int,
        ahead: int,
        first: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        assert piece > 0 and piece % ALIGN == 0 and ring > 0 and threads > 0
        self.files = {file.path for file in files}
        self.ring = ring
        self._files = files
        self._size = piece
        self._most = ring + ahead // piece  # before the first chunk is taken
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
        self._first = deque(
            (path, at, min(at + FIRST, end))
            for path, begin, end in first
            for at in range(begin, max(end, begin + 1), FIRST)
        )
        self._first_left = threads  # threads that have not finished prefetching
        self._zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        self._threads = [threading.Thread(target=self._work, name="reader", daemon=True) for _ in range(threads)]

    @staticmethod
    def start(
        paths: Sequence[Path],
        *,
        threads: int = THREADS,
        piece: int = PIECE,
        ring: int = RING,
        ahead: int | None = None,
        first: Sequence[tuple[str, int, int]] = (),
    ) -> Reader:
        """Open the files and start reading them.

        `read_ahead_bytes`: read before the first chunk is taken, besides the ring; by default all files, but at most
        half of the free memory. `prefetch`: (path, begin, end) to read into the page cache first; an empty range only
        opens the file.
        """
        files: list[File] = []
        try:
            for path in paths:
                files.append(File(path))
        except ModelFileError:
            for file in files:
                file.close()
            raise
        ahead = min(sum(file.size + piece for file in files), free_memory() // 2) if ahead is None else ahead
        reader = Reader(files, threads=threads, piece=piece, ring=ring, ahead=ahead, first=first)
        reader.begin()
        return reader

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_first(self, timeout: float) -> bool:
        """Wait until the prefetched ranges are in the page cache; return False after the timeout."""
        with self._change:
            return self._change.wait_for(lambda: self._first_left == 0 or self._closed, timeout)

    def ready(self) -> bool:
        """Return whether `take` would return or raise without waiting."""
        with self._change:
            return bool(self._filled) or self._error is not None or self._untaken == 0

    def take(self, timeout: float = STALL) -> Piece | None:
        """Return the next chunk, in the order in which reads ended, or None after the last.

        Raises the error of a thread, or ModelFileError if no chunk arrives within the timeout.
        """
        deadline = time.monotonic() + timeout
        with self._change:
            self._most = 0  # from now on, no buffers besides the ring
            while True:
                if self._error is not None:
                    raise self._error
                if self._filled:
                    self._untaken -= 1
                    return self._filled.popleft()
                if self._untaken == 0:
                    return None
                assert not self._closed, "taken from a closed reader"
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._nothing_came(timeout)
                self._change.wait(remaining)

    def _nothing_came(self, timeout: float) -> ModelFileError:
        names = ", ".join(sorted(str(file) for file in self.files))
        return ModelFileError(
            f"no data from the disk for {timeout:.0f} s while reading {names[:200]}",
            hint="check the disk, or the network of a network file system",
        )

    def reuses(self, piece: Piece) -> bool:
        """Return whether the chunk's buffer will be filled again after it is given back."""
        with self._change:
            return piece.buffer.number < self.ring and bool(self._jobs)

    def give_back(self, piece: Piece) -> None:
        """Return the chunk's buffer, which may then be overwritten."""
        with self._change:
            if piece.buffer.number < self.ring:
                self._free.append(piece.buffer)
                self._change.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Stop the threads after their current reads, and free the files and buffers."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            if self._zero >= 0:
                os.close(self._zero)
                self._zero = -1
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
            self._read_first()
            while (job := self._claim()) is not None:
                file, piece = job
                if self._size >= HUGE and not piece.buffer.touched:
                    piece.buffer.touch(self._zero)
                file.read(piece)
                self._done(piece)
        except BaseException as e:
            with self._change:
                self._error = self._error or e
                self._closed = True
                self._change.notify_all()

    def _read_first(self) -> None:
        memory = bytearray(FIRST if self._first else 0)
        while self._first and not self._closed:
            # IndexError: another thread took the last range. OSError: a file is missing, but prefetching is optional.
            with contextlib.suppress(IndexError, OSError):
                path, begin, end = self._first.popleft()
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # read only the given range, without read-ahead
                    with memoryview(memory)[: end - begin] as part:
                        os.preadv(fd, [part], begin)
                except IsADirectoryError:
                    list(Path(path).iterdir())
                finally:
                    os.close(fd)
        with self._change:
            self._first_left -= 1
            self._change.notify_all()

    def _claim(self) -> tuple[File, Piece] | None:
        with self._change:
            while self._jobs and not self._closed:
                buffer = self._buffer()
                if buffer is None:
                    self._change.wait()  # until the caller gives a buffer back or closes the reader
                    continue
                file, offset = self._jobs.popleft()
                if self._in_flight == 0:
                    self._since = time.perf_counter()
                self._in_flight += 1
                return file, Piece(file.path, offset, min(self._size, file.size - offset), buffer)
        return None

    def _buffer(self) -> Buffer | None:
        if self._free:
            return self._free.pop()  # the most recently used one, whose pages are allocated
        if self._made >= max(self.ring, self._most):
            return None
        try:
            buffer = Buffer(self._made, self._size)
        except OSError as e:
            raise ModelError(f"cannot allocate memory to read the weights into: {e.strerror or e}") from e
        self._made += 1
        return buffer

    def _done(self, piece: Piece) -> None:
        with self._change:
            self._bytes += piece.length
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += time.perf_counter() - self._since
            self._filled.append(piece)
            self._change.notify_all()


class File:
    """A file opened twice: with O_DIRECT if the file system supports it, and normally for the rest."""

    def __init__(self, path: Path, *, size: int | None = None, step: int = 0) -> None:
        """`size`: known size of the file, if any. `max_read_bytes`: limit of one read call; 0: a whole buffer."""
        self.path = path
        self.step = step
        self.direct_bytes = 0  # a statistic, updated by several threads without a lock
        try:
            plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(plain).st_size if size is None else size
        except OSError as e:
            raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e
        self._plain: int | None = plain
        self._direct: int | None = None
        self._refused = False
        with contextlib.suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        """Close the file; repeated calls do nothing."""
        descriptors = [fd for fd in (self._plain, self._direct) if fd is not None]
        self._plain = self._direct = None
        for fd in descriptors:
            os.close(fd)

    def read(self, piece: Piece) -> None:
        """Read the chunk into its buffer, with direct I/O as far as possible. Raises ModelFileError."""
        try:
            self._rest(piece, self._directly(piece))
        except OSError as e:
            raise ModelFileError(f"cannot read {self.path}: {e.strerror or e}") from e

    def _directly(self, piece: Piece) -> int:
        """Read with direct I/O and return the bytes read: the whole chunk unless a read was short or rejected."""
        done, step = 0, self.step or piece.buffer.size
        with memoryview(piece.buffer.memory) as memory:
            while done < piece.length and done % ALIGN == 0 and self._direct is not None and not self._refused:
                try:
                    with memory[done : done + step] as part:
                        count = os.preadv(self._direct, [part], piece.offset + done)
                except OSError as e:
                    if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._refused = True
                    break
                if count == 0:
                    break
                done = min(done + count, piece.length)
        self.direct_bytes += done
        return done

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
