"""ChildReader: a Reader that leaves the reading to another process, so that an import in this one is not disturbed.

Threads that read here would take memory, page by page, in the address space into which the import maps libraries, and
the interpreter, piece by piece, from it. The other process has its own. What it has read is copied out of its memory:
that can be of large pages, and memory that is shared cannot, which is slower to get than the disk is to read. What it
says waits in a pipe until someone here asks. Only what is to be read first is read by threads here, while nothing else
happens, and the weights wait for that.
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

WORTH = 1 << 30  # bytes from which on another process is
THREADS = 6
STEP = 2 << 20  # read by one call: what all threads have asked the disk for is what another's read waits for
FIRST_THREADS = 12
HELLO_SECONDS = 2.0  # at most, for a Python to start
KILLED = "was the process that read them killed for want of memory?"
CODE = "import sys; sys.path.insert(0, sys.argv[1]); from emberline.models.reader_process import main; main()"


def start_reader(paths: Sequence[Path], first: Sequence[tuple[str, int, int]] = ()) -> Reader:
    """By another process where that is worth it and can be had."""
    with contextlib.suppress(OSError, AttributeError):  # the threads say what is wrong, if it is the files
        if sys.executable and sum(path.stat().st_size for path in paths) >= WORTH:
            return ChildReader.spawn(paths, first=first)
    return Reader.start(paths, first=first)


class RemoteBuffer(Buffer):
    """Of another process."""

    def __init__(self, number: int, size: int, process: int, address: int) -> None:
        self.number = number
        self.size = size
        self._process, self._address = process, address
        self._copy: bytearray | None = None

    @property
    def memory(self) -> Memory:
        """A copy of it."""
        if self._copy is None:
            self._copy = bytearray(self.size)
            self.copy_to(ctypes.addressof(ctypes.c_char.from_buffer(self._copy)), self.size)
        return memoryview(self._copy)

    def copy_to(self, address: int, length: int) -> None:
        try:
            _copy(self._process, self._address, address, length)
        except OSError as e:
            raise ModelError(f"what was read of the weights is lost: {e.strerror}", hint=KILLED) from e


class ChildReader(Reader):
    """Its buffers are used again only when all are in use: then the other process waits for one."""

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
        self._hello = 0  # where it is
        self._read_stats = ReadStats(0, 0.0, 0)
        self._waiting = True  # for what is to be read first
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
        """`ahead`: bytes of memory it may fill, at least one piece; by default half of what is free. OSError if the
        system allows no such process."""
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
            orders = {"piece": piece, "buffers": ring, "threads": threads, "step": STEP}
            reader._tell(json.dumps(orders | {"files": [(str(path), size) for path, size in sizes.items()]}))
            reader._try()
        except BaseException:
            reader.close()
            raise
        return reader

    def wait_first(self, timeout: float) -> bool:
        """And lets the other process begin."""
        there = super().wait_first(timeout)
        self._go()
        return there

    def ready(self) -> bool:
        self._go()
        with self._change:
            self._listen()
            return bool(self._filled) or self._error is not None or self._untaken == 0

    def take(self, timeout: float = STALL) -> Piece | None:
        deadline = time.monotonic() + timeout
        while not self.ready():
            assert not self._closed, "taken from a closed reader"
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._nothing_came(timeout)
            select.select([self._output], [], [], left)
        with self._change:
            if self._filled:  # what came before an error is good
                self._untaken -= 1
                return self._filled.popleft()
            if self._error is not None:
                raise self._error
            return None

    def reuses(self, piece: Piece) -> bool:
        """It may, but to pin it is not worth it: it is copied from, and given back right then."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer may hold it for a while
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
        """Whether its memory can be read from here."""
        deadline = time.monotonic() + HELLO_SECONDS
        while not self._hello:
            select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            with self._change:
                self._listen()
            if self._error is not None or time.monotonic() > deadline:
                raise OSError(errno.ECHILD, "the process to read the weights does not start")
        seen = ctypes.create_string_buffer(len(HELLO))
        _copy(self.process.pid, self._hello, ctypes.addressof(seen), len(HELLO))
        if seen.raw != HELLO:
            raise OSError(errno.EPERM, "the memory of a process of ours cannot be read")

    def _go(self) -> None:
        with self._change:
            tell, self._waiting = self._waiting, False
        if tell:
            self._tell("")

    def _tell(self, line: str) -> None:
        """Nothing, if it is gone: who asks for a piece is told."""
        with self._change, contextlib.suppress(BrokenPipeError):
            if self._open:
                assert self.process.stdin is not None
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()

    def _listen(self) -> None:
        """To all that was said by now, under the lock."""
        while self._error is None and self._open and select.select([self._output], [], [], 0)[0]:
            data = os.read(self._output, 1 << 16)
            if not data:
                if len(self._filled) < self._untaken:
                    self._error = ModelError("the process that reads the weights has ended", hint=KILLED)
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
    """Out of another process, with no lock of the interpreter held."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype, one = ctypes.c_ssize_t, ctypes.c_ulong(1)
    while length:
        ours, theirs = _Range(target, length), _Range(source, length)
        count = read(process, ctypes.byref(ours), one, ctypes.byref(theirs), one, ctypes.c_ulong(0))
        if count <= 0:
            code = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(code, os.strerror(code))
        source, target, length = source + count, target + count, length - count
