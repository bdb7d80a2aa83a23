"""FileReader: threads that read files into memory in chunks, in order, at the speed of the disk.

It needs only the standard library, so that a process can start it first and import torch while the disk is busy; reads
release the GIL. Chunks wait in buffers until they are taken. The first `ring` buffers are reused, so pinning them pays.
Until the first chunk is taken, up to `read_ahead_bytes` more are read into extra buffers, which are used once. Before
all that, ranges of other files (`prefetch`) can be read into the page cache. The states of a buffer are:

    claimed by a thread -> filled -> next_chunk() -> release_chunk() -> claimed ...
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberline.core.errors import ModelError, ModelFileError
from emberline.core.freememory import free_memory
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.models.direct_io import (
    DIRECT_IO_ALIGN_BYTES,
    HUGE_PAGE_BYTES,
    ByteRanges,
    DirectIOFile,
    FileChunk,
    ReadBuffer,
)

CHUNK_BYTES = 32 << 20
NUM_THREADS = 12
RING_BUFFERS = 24
PREFETCH_CALL_BYTES = 1 << 20
STALL_TIMEOUT_S = 60.0  # time without a new chunk after which loading fails


def weight_file_paths(checkpoint: Checkpoint) -> list[Path]:
    """Return the weight files that are read in chunks. GGUF files are not: their tensors are read from a memory map."""
    return sorted({info.file for info in checkpoint.tensors.values() if not isinstance(info, GGUFTensorInfo)})


@dataclass(frozen=True, slots=True)
class ReadStats:
    bytes: int
    seconds: float  # time during which at least one read was running
    direct_bytes: int  # bytes read without the page cache

    @property
    def gigabytes_per_second(self) -> float:
        """Average rate in GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class FileReader:
    """Threads that read files into buffers.

    One caller takes chunks, gives them back, and closes the reader."""

    def __init__(
        self,
        files: Sequence[DirectIOFile],
        *,
        threads: int,
        chunk_bytes: int,
        ring: int,
        read_ahead_bytes: int,
        prefetch: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        assert chunk_bytes > 0 and chunk_bytes % DIRECT_IO_ALIGN_BYTES == 0 and ring > 0 and threads > 0
        self.files = {file.path for file in files}
        self.ring = ring
        self._files = files
        self._chunk_bytes = chunk_bytes
        self._max_buffers = ring + read_ahead_bytes // chunk_bytes  # before the first chunk is taken
        self._jobs = deque((file, *chunk) for file in files for chunk in file.list_chunks(chunk_bytes))
        self._num_remaining = len(self._jobs)
        self._changed = threading.Condition()
        self._filled: deque[FileChunk] = deque()
        self._free: list[ReadBuffer] = []
        self._num_buffers = 0
        self._error: BaseException | None = None
        self._closed = False
        self._in_flight = 0
        self._busy_since = self._busy_seconds = 0.0
        self._read_bytes = 0
        self._prefetch = deque(
            (path, at, min(at + PREFETCH_CALL_BYTES, end))
            for path, begin, end in prefetch
            for at in range(begin, max(end, begin + 1), PREFETCH_CALL_BYTES)
        )
        self._prefetching_threads = threads  # threads that have not finished prefetching
        self._zero_fd = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        self._threads = [threading.Thread(target=self._run_thread, name="reader", daemon=True) for _ in range(threads)]

    @staticmethod
    def start(
        paths: Sequence[Path],
        *,
        threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        ring: int = RING_BUFFERS,
        read_ahead_bytes: int | None = None,
        prefetch: Sequence[tuple[str, int, int]] = (),
        ranges: Mapping[Path, ByteRanges] | None = None,
    ) -> FileReader:
        """Open the files and start reading them, or only these ranges of them.

        `read_ahead_bytes` limits what is read before the first chunk is taken, in addition to the `ring` buffers. The
        default is the size of all files, but at most half of the free memory. `prefetch` are ranges (path, begin, end)
        that are read into the page cache first; an empty range only opens the file.
        """
        files: list[DirectIOFile] = []
        try:
            for path in paths:
                files.append(DirectIOFile(path, ranges=None if ranges is None else ranges.get(path, ())))
        except ModelFileError:
            for file in files:
                file.close()
            raise
        read_ahead_bytes = (
            min(sum(file.size + chunk_bytes for file in files), free_memory() // 2)
            if read_ahead_bytes is None
            else read_ahead_bytes
        )
        reader = FileReader(
            files,
            threads=threads,
            chunk_bytes=chunk_bytes,
            ring=ring,
            read_ahead_bytes=read_ahead_bytes,
            prefetch=prefetch,
        )
        reader.start_threads()
        return reader

    def start_threads(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_prefetch(self, timeout_s: float) -> bool:
        """Wait until the prefetched ranges are in the page cache; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._prefetching_threads == 0 or self._closed, timeout_s)

    def is_ready(self) -> bool:
        """Return whether the next call of `next_chunk` will not wait."""
        with self._changed:
            return bool(self._filled) or self._error is not None or self._num_remaining == 0

    def next_chunk(self, timeout_s: float = STALL_TIMEOUT_S) -> FileChunk | None:
        """Return a chunk whose read has ended, or None after the last chunk. Chunks may be out of order.

        Raises the error of a reading thread, or ModelFileError if no chunk arrives within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._max_buffers = 0  # from now on, no buffers besides the ring
            while True:
                if self._error is not None:
                    raise self._error
                if self._filled:
                    self._num_remaining -= 1
                    return self._filled.popleft()
                if self._num_remaining == 0:
                    return None
                assert not self._closed, "taken from a closed reader"
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._stalled_error(timeout_s)
                self._changed.wait(remaining)

    def _stalled_error(self, timeout_s: float) -> ModelFileError:
        names = ", ".join(sorted(str(file) for file in self.files))
        return ModelFileError(
            f"no data from the disk for {timeout_s:.0f} s while reading {names[:200]}",
            hint="check the disk, or the network of a network file system",
        )

    def will_reuse_buffer(self, chunk: FileChunk) -> bool:
        """Return whether the chunk's buffer will be filled again later, so that pinning it pays."""
        with self._changed:
            return chunk.buffer.number < self.ring and bool(self._jobs)

    def release_chunk(self, chunk: FileChunk) -> None:
        """Give the chunk's buffer back to the reader, which may then overwrite it."""
        with self._changed:
            if chunk.buffer.number < self.ring:
                self._free.append(chunk.buffer)
                self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads after their current reads, and free the files and buffers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            if self._zero_fd >= 0:
                os.close(self._zero_fd)
                self._zero_fd = -1
            for file in self._files:
                file.close()
            self._filled.clear()
            self._free.clear()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> ReadStats:
        with self._changed:
            busy = self._busy_seconds + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)
            return ReadStats(self._read_bytes, busy, sum(file.direct_bytes for file in self._files))

    def _run_thread(self) -> None:
        try:
            self._run_prefetch()
            while (claimed := self._claim_chunk()) is not None:
                file, piece = claimed
                if self._chunk_bytes >= HUGE_PAGE_BYTES and not piece.buffer.is_faulted_in:
                    piece.buffer.fault_in_pages(self._zero_fd)
                file.read(piece)
                self._finish_read(piece)
        except BaseException as e:
            with self._changed:
                self._error = self._error or e
                self._closed = True
                self._changed.notify_all()

    def _run_prefetch(self) -> None:
        memory = bytearray(PREFETCH_CALL_BYTES if self._prefetch else 0)
        while self._prefetch and not self._closed:
            # IndexError: another thread took the last range. OSError: a file is missing, but prefetching is optional.
            with contextlib.suppress(IndexError, OSError):
                path, begin, end = self._prefetch.popleft()
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # read only the given range, without read-ahead
                    with memoryview(memory)[: end - begin] as part:
                        os.preadv(fd, [part], begin)
                except IsADirectoryError:
                    list(Path(path).iterdir())
                finally:
                    os.close(fd)
        with self._changed:
            self._prefetching_threads -= 1
            self._changed.notify_all()

    def _claim_chunk(self) -> tuple[DirectIOFile, FileChunk] | None:
        with self._changed:
            while self._jobs and not self._closed:
                buffer = self._acquire_buffer()
                if buffer is None:
                    self._changed.wait()  # until the caller gives a buffer back or closes the reader
                    continue
                file, offset, length = self._jobs.popleft()
                if self._in_flight == 0:
                    self._busy_since = time.perf_counter()
                self._in_flight += 1
                return file, FileChunk(file.path, offset, length, buffer)
        return None

    def _acquire_buffer(self) -> ReadBuffer | None:
        if self._free:
            return self._free.pop()  # the most recently used one, whose pages are allocated
        if self._num_buffers >= max(self.ring, self._max_buffers):
            return None
        try:
            buffer = ReadBuffer(self._num_buffers, self._chunk_bytes)
        except OSError as e:
            raise ModelError(f"cannot allocate memory to read the weights into: {e.strerror or e}") from e
        self._num_buffers += 1
        return buffer

    def _finish_read(self, chunk: FileChunk) -> None:
        with self._changed:
            self._read_bytes += chunk.length
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_seconds += time.perf_counter() - self._busy_since
            self._filled.append(chunk)
            self._changed.notify_all()
