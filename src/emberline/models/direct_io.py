"""DirectIOFile: reads chunks of a file into buffers, without the page cache where the file system allows it.

It needs only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberline.core.errors import ModelFileError

DIRECT_IO_ALIGN_BYTES = 4096  # of offsets, lengths and memory
HUGE_PAGE_BYTES = 2 << 20
MAX_READ_GAP_BYTES = 64 << 10  # between two ranges that are read as one
Memory = mmap.mmap | memoryview
ByteRanges = Sequence[tuple[int, int]]  # (begin, end)


class ReadBuffer:
    """A buffer for one chunk. It is reused if its `number` is below the number of ring buffers."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_faulted_in = False
        pages = self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a kernel without huge pages is only slower
            pages.madvise(mmap.MADV_HUGEPAGE)

    @property
    def memory(self) -> Memory:
        return self._pages

    def copy_to(self, address: int, length: int) -> None:
        """Copy the first `length` bytes to the caller's memory, with the GIL released."""
        ctypes.memmove(address, (ctypes.c_char * 1).from_buffer(self.memory), length)

    def fault_in_pages(self, zero_fd: int) -> None:
        """Allocate the buffer's pages by reading from /dev/zero into each.

        A read with direct I/O would allocate them under the kernel's lock of the address space, and delay an import in
        another thread, which needs that lock for each library that it maps.
        """
        self.is_faulted_in = True
        with memoryview(self.memory) as memory, contextlib.ExitStack() as parts:
            os.readv(
                zero_fd, [parts.enter_context(memory[at : at + 1]) for at in range(0, len(memory), HUGE_PAGE_BYTES)]
            )


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Bytes [offset, offset + length) of a file, in the first bytes of a buffer."""

    file: Path
    offset: int
    length: int
    buffer: ReadBuffer


class DirectIOFile:
    """A file opened twice: with O_DIRECT if the file system allows it, and normally for unaligned reads."""

    def __init__(
        self, path: Path, *, size: int | None = None, max_read_bytes: int = 0, ranges: ByteRanges | None = None
    ) -> None:
        """Open the file. `size` is its size, if known. `max_read_bytes` limits one read call; 0 is no limit.

        `ranges`: the only bytes that are needed; None: all."""
        self.path = path
        self._ranges = ranges
        self.max_read_bytes = max_read_bytes
        self.direct_bytes = 0  # a statistic, updated by several threads without a lock
        try:
            plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(plain).st_size if size is None else size
        except OSError as e:
            raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e
        self._plain: int | None = plain
        self._direct: int | None = None
        self._is_direct_refused = False
        with contextlib.suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def list_chunks(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the offsets and lengths of the chunks to read, in order, of up to `chunk_bytes` bytes."""
        for begin, end in [(0, self.size)] if self._ranges is None else merge_ranges(self._ranges, self.size):
            yield from ((at, min(chunk_bytes, end - at)) for at in range(begin, end, chunk_bytes))

    def close(self) -> None:
        """Close the file; repeated calls do nothing."""
        descriptors = [fd for fd in (self._plain, self._direct) if fd is not None]
        self._plain = self._direct = None
        for fd in descriptors:
            os.close(fd)

    def read(self, chunk: FileChunk) -> None:
        """Read the chunk into its buffer, with direct I/O where possible. Raises ModelFileError on failure."""
        try:
            self._read_plain(chunk, self._read_direct(chunk))
        except OSError as e:
            raise ModelFileError(f"cannot read {self.path}: {e.strerror or e}") from e

    def _read_direct(self, chunk: FileChunk) -> int:
        """Read with direct I/O and return how many bytes were read, fewer than the chunk if a read failed."""
        done, step = 0, self.max_read_bytes or chunk.buffer.size
        end = -(-chunk.length // DIRECT_IO_ALIGN_BYTES) * DIRECT_IO_ALIGN_BYTES  # nothing after the chunk is read
        with memoryview(chunk.buffer.memory) as memory:
            while (
                done < chunk.length
                and done % DIRECT_IO_ALIGN_BYTES == 0
                and self._direct is not None
                and not self._is_direct_refused
            ):
                try:
                    with memory[done : min(done + step, end)] as part:
                        count = os.preadv(self._direct, [part], chunk.offset + done)
                except OSError as e:
                    if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._is_direct_refused = True
                    break
                if count == 0:
                    break
                done = min(done + count, chunk.length)
        self.direct_bytes += done
        return done

    def _read_plain(self, chunk: FileChunk, bytes_done: int) -> None:
        assert self._plain is not None
        with memoryview(chunk.buffer.memory) as memory:
            while bytes_done < chunk.length:
                with memory[bytes_done : chunk.length] as part:
                    count = os.preadv(self._plain, [part], chunk.offset + bytes_done)
                if count == 0:
                    raise ModelFileError(
                        f"{self.path} ended at byte {chunk.offset + bytes_done} of {self.size} while it was read",
                        hint="download the file again",
                    )
                bytes_done += count


def merge_ranges(ranges: ByteRanges, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file, sorted, aligned for direct I/O, and joined where the gap between two is small."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin = begin // DIRECT_IO_ALIGN_BYTES * DIRECT_IO_ALIGN_BYTES
        end = min(size, -(-end // DIRECT_IO_ALIGN_BYTES) * DIRECT_IO_ALIGN_BYTES)
        if merged and begin - merged[-1][1] <= MAX_READ_GAP_BYTES:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
