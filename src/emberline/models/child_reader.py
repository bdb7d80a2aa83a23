"""ChildProcessReader: a FileReader that reads in a child process, so that imports here are not slowed down.

Reader threads in this process would compete with the import of torch for the lock of the address space, into which the
import maps libraries, and for the GIL. The child process has its own. Its chunks are copied out of its memory with
process_vm_readv: private memory can use huge pages, whereas shared memory cannot, and allocating it takes longer than
reading from the disk. Messages of the child wait in a pipe until a method here reads them. Only the prefetched ranges
are read by threads of this process, before the import; the child starts to read the weights after that.
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
from emberline.models.reader import PIECE, RING, STALL, Buffer, File, Memory, Piece, Reader, ReadStats
from emberline.models.reader_process import HELLO

WORTH = 1 << 30  # smaller models are read by threads of this process
THREADS = 6
STEP = 2 << 20  # of one read call: other reads of the disk queue behind all outstanding calls
FIRST_THREADS = 12
HELLO_SECONDS = 2.0
KILLED = "check whether the kernel killed the reading process for lack of memory (dmesg)"
CODE = "import sys; sys.path.insert(0, sys.argv[1]); from emberline.models.reader_process import main; main()"


def start_reader(paths: Sequence[Path], first: Sequence[tuple[str, int, int]] = ()) -> Reader:
    """Start reading the files, in a child process if they are large and one can be started."""
    with contextlib.suppress(OSError, AttributeError):  # if a file is the problem, FileReader.start reports it
        if sys.executable and sum(path.stat().st_size for path in paths) >= WORTH:
            return ChildReader.spawn(paths, first=first)
    return Reader.start(paths, first=first)


class RemoteBuffer(Buffer):
    """A buffer in the memory of the child process."""

    def __init__(self, number: int, size: int, process: int, address: int) -> None:
        self.number = number
        self.size = size
        self._process, self._address = process, address
        self._copy: bytearray | None = None

    @property
    def memory(self) -> Memory:
        """A copy of the buffer, made at the first access."""
        if self._copy is None:
            self._copy = bytearray(self.size)
            self.copy_to(ctypes.addressof(ctypes.c_char.from_buffer(self._copy)), self.size)
        return memoryview(self._copy)

    def copy_to(self, address: int, length: int) -> None:
        try:
            _copy(self._process, self._address, address, length)
        except OSError as e:
            raise ModelError(f"cannot copy weights from the reading process: {e.strerror}", hint=KILLED) from e


class ChildReader(Reader):
    """Reads files in a child process, which waits for a buffer to be given back once all are in use."""

    def __init__(
        self,
        sizes: dict[Path, int],
        process: subprocess.Popen[bytes],
        *,
        piece: int,
        ring: int,
        first: Sequence[tuple[str, int, int]],
    ) -> None:
        super().__init__([], threads=FIRST_THREADS, piece=piece, ring=ring, ahead=0, first=first)
        self.files = set(sizes)
        self.process = process
        self._paths = list(sizes)
        self._sizes = sizes
        self._untaken = sum(-(-size // piece) for size in sizes.values())
        self._said = b""
        self._hello = 0  # of PROBE_BYTES in the child; 0 until it has started
        self._read_stats = ReadStats(0, 0.0, 0)
        self._waiting = True
        self._open = True

    @staticmethod
    def spawn(
        paths: Sequence[Path],
        *,
        threads: int = THREADS,
        piece: int = PIECE,
        ahead: int | None = None,
        first: Sequence[tuple[str, int, int]] = (),
    ) -> ChildReader:
        """Start a child process that reads the files after the prefetch.

        `read_ahead_bytes`: memory of the child's buffers, at least one chunk; by default half of the free memory.
        Raises OSError if the child cannot be started or its memory cannot be read.
        """
        sizes = {}
        for path in paths:
            file = File(path)
            sizes[path] = file.size
            file.close()
        count = sum(-(-size // piece) for size in sizes.values())
        most = max(RING * piece, free_memory() // 2) if ahead is None else ahead
        ring = max(1, min(count, most // piece))
        command = [sys.executable, "-I", "-S", "-c", CODE, str(Path(__file__).parents[2])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        reader = ChildReader(sizes, process, piece=piece, ring=ring, first=first)
        try:
            reader.begin()
            settings = {"piece": piece, "buffers": ring, "threads": threads, "step": STEP}
            reader._tell(json.dumps(settings | {"files": [(str(path), size) for path, size in sizes.items()]}))
            reader._try()
        except BaseException:
            reader.close()
            raise
        return reader

    def wait_first(self, timeout: float) -> bool:
        """Wait for the prefetch, as FileReader does, and let the child start reading."""
        done = super().wait_first(timeout)
        self._go()
        return done

    def ready(self) -> bool:
        self._go()
        with self._change:
            self._listen()
            return bool(self._filled) or self._error is not None or self._untaken == 0

    def take(self, timeout: float = STALL) -> Piece | None:
        deadline = time.monotonic() + timeout
        while not self.ready():
            assert not self._closed, "taken from a closed reader"
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._nothing_came(timeout)
            select.select([self._output], [], [], remaining)
        with self._change:
            if self._filled:  # chunks that arrived before an error are valid
                self._untaken -= 1
                return self._filled.popleft()
            if self._error is not None:
                raise self._error
            return None

    def reuses(self, piece: Piece) -> bool:
        """Return False: pinning does not help, because a chunk is copied once and given back at once."""
        return False

    def give_back(self, piece: Piece) -> None:
        self._tell(str(piece.buffer.number))

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        with self._change:
            self._open = False
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk read can delay the exit
            self.process.wait(timeout)

    @property
    def stats(self) -> ReadStats:
        with self._change:
            self._listen()
            return self._read_stats

    @property
    def _output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def _try(self) -> None:
        """Wait for the child to start and test that its memory can be read. Raises OSError if not."""
        deadline = time.monotonic() + HELLO_SECONDS
        while not self._hello:
            select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            with self._change:
                self._listen()
            if self._error is not None or time.monotonic() > deadline:
                raise OSError(errno.ECHILD, "the child process for reading weights does not start")
        copy = ctypes.create_string_buffer(len(HELLO))
        _copy(self.process.pid, self._hello, ctypes.addressof(copy), len(HELLO))
        if copy.raw != HELLO:
            raise OSError(errno.EPERM, "the memory of the child process cannot be read")

    def _go(self) -> None:
        with self._change:
            first_call, self._waiting = self._waiting, False
        if first_call:
            self._tell("")

    def _tell(self, line: str) -> None:
        """Send a line to the child. Does nothing if the child has ended: `take` reports that."""
        with self._change, contextlib.suppress(BrokenPipeError):
            if self._open:
                assert self.process.stdin is not None
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()

    def _listen(self) -> None:
        """Handle all messages that have arrived. The caller holds the lock."""
        while self._error is None and self._open and select.select([self._output], [], [], 0)[0]:
            data = os.read(self._output, 1 << 16)
            if not data:
                if len(self._filled) < self._untaken:
                    self._error = ModelError("the child process that reads the weights has ended early", hint=KILLED)
                return
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, said: dict[str, str] | list[int]) -> None:
        if isinstance(said, dict):
            kind = ModelFileError if said["file"] else ModelError
            self._error = kind(said["message"], hint=said["hint"])
            return
        if len(said) == 1:
            self._hello = said[0]
            return
        file, offset, number, address, seconds, direct = said
        path = self._paths[file]
        length = min(self._size, self._sizes[path] - offset)
        buffer = RemoteBuffer(number, self._size, self.process.pid, address)
        self._filled.append(Piece(path, offset, length, buffer))
        self._read_stats = ReadStats(self._read_stats.bytes + length, seconds, direct)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _copy(process: int, source: int, target: int, length: int) -> None:
    """Copy memory of another process, with the GIL released. Raises OSError."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype, one = ctypes.c_ssize_t, ctypes.c_ulong(1)
    while length:
        local, remote = _Range(target, length), _Range(source, length)
        count = read(process, ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0))
        if count <= 0:
            code = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(code, os.strerror(code))
        source, target, length = source + count, target + count, length - count
