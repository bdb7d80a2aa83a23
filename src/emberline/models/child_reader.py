"""ChildProcessReader: a FileReader that reads in a child process, to keep imports here fast.

Reader threads in this process would compete with the import of torch for the GIL and for the kernel's lock of the
address space, into which the import maps libraries. The child process has its own GIL and address space. The parent
copies chunks out of the child's memory with process_vm_readv, not through shared memory: shared memory cannot use huge
pages, and allocating it takes longer than reading from the disk. Messages of the child wait in a pipe until a method of
the reader handles them. Only the prefetched ranges are read by threads of this process, before the import; the child
starts to read the weights after that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from emberline.core.errors import ModelError, ModelFileError
from emberline.core.freememory import free_memory
from emberline.models.direct_io import DirectIOFile, FileChunk, Memory, ReadBuffer
from emberline.models.reader import CHUNK_BYTES, RING_BUFFERS, STALL_TIMEOUT_S, FileReader, ReadStats
from emberline.models.reader_process import PROBE_BYTES

MIN_CHILD_READ_BYTES = 1 << 30  # smaller models are read by threads of this process
NUM_CHILD_THREADS = 6
MAX_READ_BYTES = 2 << 20  # of one read call: other reads of the disk queue behind all outstanding calls
PREFETCH_THREADS = 12
CHILD_START_TIMEOUT_S = 2.0
KILLED_HINT = "check whether the kernel killed the reading process for lack of memory (dmesg)"
CHILD_SCRIPT = "import sys; sys.path.insert(0, sys.argv[1]); from emberline.models.reader_process import main; main()"


def start_reader(paths: Sequence[Path], prefetch: Sequence[tuple[str, int, int]] = ()) -> FileReader:
    """Start reading the files. Large files are read in a child process, if one can be started."""
    with contextlib.suppress(OSError, AttributeError):  # if a file is the problem, FileReader.start reports it
        if sys.executable and sum(path.stat().st_size for path in paths) >= MIN_CHILD_READ_BYTES:
            return ChildProcessReader.spawn(paths, prefetch=prefetch)
    return FileReader.start(paths, prefetch=prefetch)


class ChildBuffer(ReadBuffer):
    """A buffer in the memory of the child process."""

    def __init__(self, number: int, size: int, process: int, address: int) -> None:
        self.number = number
        self.size = size
        self._process, self._address = process, address
        self._copy: bytearray | None = None

    @property
    def memory(self) -> Memory:
        """A copy of the child's buffer in this process, made at the first access."""
        if self._copy is None:
            self._copy = bytearray(self.size)
            self.copy_to(ctypes.addressof(ctypes.c_char.from_buffer(self._copy)), self.size)
        return memoryview(self._copy)

    def copy_to(self, address: int, length: int) -> None:
        try:
            _copy_from_process(self._process, self._address, address, length)
        except OSError as e:
            raise ModelError(
                f"cannot copy weights from the child process that reads them: {e.strerror}", hint=KILLED_HINT
            ) from e


class ChildProcessReader(FileReader):
    """Reads files in a child process.

    When all its buffers are in use, the child waits until one is given back.
    """

    def __init__(
        self,
        sizes: dict[Path, int],
        process: subprocess.Popen[bytes],
        *,
        chunk_bytes: int,
        ring: int,
        prefetch: Sequence[tuple[str, int, int]],
    ) -> None:
        super().__init__(
            [], threads=PREFETCH_THREADS, chunk_bytes=chunk_bytes, ring=ring, read_ahead_bytes=0, prefetch=prefetch
        )
        self.files = set(sizes)
        self.process = process
        self._paths = list(sizes)
        self._sizes = sizes
        self._num_remaining = sum(-(-size // chunk_bytes) for size in sizes.values())
        self._partial_line = b""
        self._probe_address = 0  # of PROBE_BYTES in the child; 0 until it has started
        self._read_stats = ReadStats(0, 0.0, 0)
        self._is_waiting_for_prefetch = True
        self._is_open = True

    @staticmethod
    def spawn(
        paths: Sequence[Path],
        *,
        threads: int = NUM_CHILD_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        read_ahead_bytes: int | None = None,
        prefetch: Sequence[tuple[str, int, int]] = (),
    ) -> ChildProcessReader:
        """Start a child process that reads the files once the `prefetch` ranges are read.

        `read_ahead_bytes`: memory of the child's buffers, at least one chunk; by default half of the free memory.
        Raises OSError if the child cannot be started or its memory cannot be read.
        """
        sizes = {}
        for path in paths:
            file = DirectIOFile(path)
            sizes[path] = file.size
            file.close()
        count = sum(-(-size // chunk_bytes) for size in sizes.values())
        max_bytes = (
            max(RING_BUFFERS * chunk_bytes, free_memory() // 2) if read_ahead_bytes is None else read_ahead_bytes
        )
        ring = max(1, min(count, max_bytes // chunk_bytes))
        command = [sys.executable, "-I", "-S", "-c", CHILD_SCRIPT, str(Path(__file__).parents[2])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        reader = ChildProcessReader(sizes, process, chunk_bytes=chunk_bytes, ring=ring, prefetch=prefetch)
        try:
            reader.start_threads()
            settings = {"piece": chunk_bytes, "buffers": ring, "threads": threads, "step": MAX_READ_BYTES}
            reader._send_line(json.dumps(settings | {"files": [(str(path), size) for path, size in sizes.items()]}))
            reader._check_memory_access()
        except BaseException:
            reader.close()
            raise
        return reader

    def wait_for_prefetch(self, timeout_s: float) -> bool:
        """Wait until the prefetched ranges are read, then let the child start.

        Return False after the timeout.
        """
        done = super().wait_for_prefetch(timeout_s)
        self._start_reading_weights()
        return done

    def is_ready(self) -> bool:
        self._start_reading_weights()
        with self._changed:
            self._receive_lines()
            return bool(self._filled) or self._error is not None or self._num_remaining == 0

    def next_chunk(self, timeout_s: float = STALL_TIMEOUT_S) -> FileChunk | None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            assert not self._closed, "taken from a closed reader"
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._stalled_error(timeout_s)
            select.select([self._stdout_fd], [], [], remaining)
        with self._changed:
            if self._filled:  # chunks that arrived before an error are valid
                self._num_remaining -= 1
                return self._filled.popleft()
            if self._error is not None:
                raise self._error
            return None

    def will_reuse_buffer(self, chunk: FileChunk) -> bool:
        """Return False, so that the caller does not pin the buffer, which is copied only once."""
        return False

    def release_chunk(self, chunk: FileChunk) -> None:
        self._send_line(str(chunk.buffer.number))

    def close(self, timeout_s: float = 5.0) -> None:
        super().close(timeout_s)
        with self._changed:
            self._is_open = False
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk read can delay the exit
            self.process.wait(timeout_s)

    @property
    def stats(self) -> ReadStats:
        with self._changed:
            self._receive_lines()
            return self._read_stats

    @property
    def _stdout_fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def _check_memory_access(self) -> None:
        """Wait for the child to start and test that its memory can be read. Raises OSError if not."""
        deadline = time.monotonic() + CHILD_START_TIMEOUT_S
        while not self._probe_address:
            select.select([self._stdout_fd], [], [], max(0.0, deadline - time.monotonic()))
            with self._changed:
                self._receive_lines()
            if self._error is not None or time.monotonic() > deadline:
                raise OSError(errno.ECHILD, "the child process that reads weights did not start")
        copy = ctypes.create_string_buffer(len(PROBE_BYTES))
        _copy_from_process(self.process.pid, self._probe_address, ctypes.addressof(copy), len(PROBE_BYTES))
        if copy.raw != PROBE_BYTES:
            raise OSError(errno.EPERM, "cannot read the memory of the child process that reads weights")

    def _start_reading_weights(self) -> None:
        with self._changed:
            first_call, self._is_waiting_for_prefetch = self._is_waiting_for_prefetch, False
        if first_call:
            self._send_line("")

    def _send_line(self, line: str) -> None:
        """Send a line to the child. If the child has ended, this does nothing, and `next_chunk` reports the error."""
        with self._changed, contextlib.suppress(BrokenPipeError):
            if self._is_open:
                assert self.process.stdin is not None
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()

    def _receive_lines(self) -> None:
        """Handle all messages of the child that have arrived. The caller must hold the lock."""
        while self._error is None and self._is_open and select.select([self._stdout_fd], [], [], 0)[0]:
            data = os.read(self._stdout_fd, 1 << 16)
            if not data:
                if len(self._filled) < self._num_remaining:
                    self._error = ModelError(
                        "the child process that reads the weights has ended early", hint=KILLED_HINT
                    )
                return
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._handle_message(json.loads(line))

    def _handle_message(self, message: dict[str, str] | list[int]) -> None:
        if isinstance(message, dict):
            kind = ModelFileError if message["file"] else ModelError
            self._error = kind(message["message"], hint=message["hint"])
            return
        if len(message) == 1:
            self._probe_address = message[0]
            return
        file, offset, number, address, seconds, direct = message
        path = self._paths[file]
        length = min(self._chunk_bytes, self._sizes[path] - offset)
        buffer = ChildBuffer(number, self._chunk_bytes, self.process.pid, address)
        self._filled.append(FileChunk(path, offset, length, buffer))
        self._read_stats = ReadStats(self._read_stats.bytes + length, seconds, direct)


class _IOVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _copy_from_process(process: int, source: int, target: int, length: int) -> None:
    """Copy memory of another process with the GIL released. Raises OSError if that is not permitted."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype, one = ctypes.c_ssize_t, ctypes.c_ulong(1)
    while length:
        local, remote = _IOVec(target, length), _IOVec(source, length)
        count = read(process, ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0))
        if count <= 0:
            code = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(code, os.strerror(code))
        source, target, length = source + count, target + count, length - count
