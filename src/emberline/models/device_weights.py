"""DeviceWeights: a checkpoint's tensors straight from disk to where they are used.

A tensor asked for is allocated on the device in its final shape and stays empty until `finish`, which reads the files
once, in order, and copies each piece's bytes to the places they belong to. Where bytes cannot land as they are (another
dtype, rows that are mixed with another matrix's), they land in a staged copy and a copy on the device does the rest.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emberline.core.errors import ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.tiles import GATED_ROWS
from emberline.models.pinned import host_bytes, pin, unpin
from emberline.models.reader import STALL, Piece, Reader, ReadStats, files_of
from emberline.models.weights import DTYPES, Weights

MOVERS, SLOTS = 6, 8  # threads that move bytes to pinned memory, and pieces of it


@dataclass(frozen=True, slots=True)
class LoadTimes:
    read: ReadStats
    wait_seconds: float  # `finish` stood waiting for the disk
    copy_seconds: float  # `finish` was copying: pinning included
    pin_seconds: float
    unread_bytes: int  # when `finish` began

    def __str__(self) -> str:
        return (
            f"read {self.read.bytes / 1e9:.2f} GB in {self.read.seconds:.2f} s ({self.read.rate:.2f} GB/s, "
            f"{self.read.direct_bytes / max(1, self.read.bytes):.0%} direct), waited {self.wait_seconds:.2f} s, "
            f"copied {self.copy_seconds:.2f} s (pinning {self.pin_seconds:.2f} s); "
            f"{self.unread_bytes / 1e9:.2f} GB were still unread at first"
        )


class DeviceWeights(Weights):
    times: LoadTimes | None = None  # once finished

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        reader: Reader | None = None,
    ) -> None:
        """`reader`: one that was started on the checkpoint's files before; `finish` closes it."""
        super().__init__(checkpoint, dtype)
        self.device = torch.device(device)
        self._reader = reader
        self._arrivals: list[_Arrival] = []

    def vector(self, name: str, size: int) -> Tensor:
        return self.stack_vectors([(name, size)])

    def stack_vectors(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        whole = torch.empty(sum(size for _, size in parts), dtype=torch.float32, device=self.device)
        at = 0
        for name, size in parts:
            self._expect(name, (size,), whole[at : at + size])
            at += size
        return whole

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.stack([(name, rows)], columns)

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        """`gated`: groups of rows of the gate and of the up take turns, if their number can be divided so."""
        dtype = self._stack_dtype(parts, columns)
        rows = [count for _, count in parts]
        whole = torch.empty(sum(rows), columns, dtype=dtype, device=self.device)
        if gated and rows[0] % GATED_ROWS == 0:
            assert len(parts) == 2 and rows[0] == rows[1]
            places = list(whole.view(rows[0] // GATED_ROWS, 2, GATED_ROWS, columns).unbind(1))
        else:
            places = list(whole.split(rows))
        for (name, count), place in zip(parts, places, strict=True):
            self._expect(name, (count, columns), place)
        return whole

    def table(self, name: str, rows: int, columns: int) -> Tensor | ops.PackedWeight:
        return self.matrix(name, rows, columns)

    def finish(self, ignorable: str) -> None:
        """Returns when every tensor has its values."""
        try:
            super().finish(ignorable)
            self._files.clear()
            self._reader = self._reader or Reader.start(files_of(self.checkpoint), ahead=0)
            self.times = self._fill(self._reader)
        finally:
            if self._reader is not None:
                self._reader.close()

    def _stack_dtype(self, parts: Sequence[tuple[str, int]], columns: int) -> torch.dtype:
        """Checks every part before anything is allocated."""
        kept = [self._file_dtype(name, (rows, columns)) for name, rows in parts]
        widest = kept[0]
        for dtype in kept[1:]:
            widest = torch.promote_types(widest, dtype)
        return self.dtype or (torch.float32 if widest == torch.float16 else widest)

    def _file_dtype(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        self._check(name, shape)
        return DTYPES[self.checkpoint.info(name).dtype]

    def _expect(self, name: str, shape: tuple[int, ...], place: Tensor) -> None:
        self._check(name, shape)
        info = self.checkpoint.info(name)
        self._take(name, place)
        end = info.offset + info.nbytes
        self._arrivals.append(_Arrival(name, info.file, info.offset, end, DTYPES[info.dtype], place))

    def _fill(self, reader: Reader) -> LoadTimes:
        places = _Places(self._arrivals)
        assert reader.files >= {arrival.file for arrival in self._arrivals}, "the reader reads other files"
        waited = copied = 0.0
        unread = sum(file.stat().st_size for file in reader.files) - reader.stats.bytes
        with _Carrier(reader, self.device) as carrier:
            while True:
                began = time.perf_counter()
                if not reader.ready():
                    carrier.flush()  # the ring may be waiting for what is still being copied
                flushed = time.perf_counter()
                piece = reader.take()
                taken = time.perf_counter()
                if piece is None:
                    carrier.flush()
                else:
                    carrier.carry(piece, places.of(piece))
                copied += flushed - began + time.perf_counter() - taken
                waited += taken - flushed
                if piece is None:
                    break
        missing = [arrival for arrival in self._arrivals if arrival.left]
        if missing:
            raise ModelFileError(
                f"{missing[0].file} does not hold all of tensor {missing[0].name!r}", hint="download the file again"
            )
        return LoadTimes(reader.stats, waited, copied, carrier.pin_seconds, max(0, unread))


class _Arrival:
    """Bytes [start, end) of a file on their way to `place`, which holds as many elements, in the same order."""

    def __init__(self, name: str, file: Path, start: int, end: int, dtype: torch.dtype, place: Tensor) -> None:
        self.name = name
        self.file = file
        self.start = start
        self.end = end
        self.left = end - start
        self.place = place
        self._dtype = dtype
        self._staged = place.dtype != dtype or not place.is_contiguous()
        self._landing: Tensor | None = None  # uint8, flat; made when the first bytes come

    def land(self, at: int, source: Tensor) -> None:
        """`at`: the offset in the file of source's first byte."""
        if self._landing is None:
            self._landing = (
                torch.empty(self.end - self.start, dtype=torch.uint8, device=self.place.device)
                if self._staged
                else self.place.view(-1).view(torch.uint8)
            )
        self._landing[at - self.start : at - self.start + len(source)].copy_(source, non_blocking=True)
        self.left -= len(source)
        if self.left == 0:
            if self._staged:
                self.place.copy_(self._landing.view(self._dtype).view(self.place.shape))
            self._landing = None


class _Places:
    """Which arrivals a piece of a file has bytes for."""

    def __init__(self, arrivals: Sequence[_Arrival]) -> None:
        self._by_file: dict[Path, list[_Arrival]] = {}
        for arrival in sorted(arrivals, key=lambda one: one.start):
            if arrival.left:
                self._by_file.setdefault(arrival.file, []).append(arrival)
        self._starts = {file: [one.start for one in found] for file, found in self._by_file.items()}

    def of(self, piece: Piece) -> list[_Arrival]:
        found = self._by_file.get(piece.file, [])
        first = max(0, bisect_right(self._starts.get(piece.file, []), piece.offset) - 1)
        end = piece.offset + piece.length
        last = bisect_right(self._starts.get(piece.file, []), end - 1)
        return [arrival for arrival in found[first:last] if arrival.end > piece.offset]


class _Carrier:
    """Copies pieces to the device and gives their buffers back when the copies are done.

    All on one stream, so that a staged copy is whole before it is used and its memory comes back in order; one stream
    fills the link. Buffers that will be used again are pinned when they first come by. Pinning the others would take
    longer than to move their bytes to pinned ones, and several threads do that as fast as the link.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self.pin_seconds = 0.0
        self._reader = reader
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, Tensor] = {}  # by the buffer's number
        self._flying: deque[tuple[torch.cuda.Event, Piece, Tensor]] = deque()
        self._lock = threading.Lock()  # of the stream, the arrivals and what flies
        self._movers = ThreadPoolExecutor(MOVERS, "mover")
        self._moving: deque[Future[None]] = deque()
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._slots.put(_Slot())

    def __enter__(self) -> _Carrier:
        if self._stream is not None:  # memory the places lie in may still be in use by work queued before
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error too: the device may still be reading the buffers."""
        self._movers.shutdown(cancel_futures=kind is not None)
        if kind is not None:
            self._moving.clear()
        slots = [self._slots.get_nowait() for _ in range(SLOTS)]
        with contextlib.suppress(ModelError) if kind is not None else contextlib.nullcontext():
            self.flush()
            for slot in slots:
                self._await(slot.sent)
        for memory in (*self._pinned.values(), *(slot.memory for slot in slots if slot.memory is not None)):
            unpin(memory)
        self._pinned.clear()
        if self._stream is not None:
            torch.cuda.empty_cache()  # staged copies: no other stream could use their memory

    def carry(self, piece: Piece, arrivals: Sequence[_Arrival]) -> None:
        if self._stream is None:
            _land(piece, arrivals, torch.frombuffer(piece.buffer.memory, dtype=torch.uint8))
            self._reader.give_back(piece)
        elif piece.buffer.number in self._pinned or self._reader.reuses(piece):
            memory = torch.frombuffer(piece.buffer.memory, dtype=torch.uint8)
            self._pin(piece.buffer.number, memory)
            with self._lock:
                self._flying.append((self._send(piece, arrivals, memory), piece, memory))
                while self._flying and self._flying[0][0].query():
                    self._reader.give_back(self._flying.popleft()[1])
        else:
            self._moving.append(self._movers.submit(self._move, piece, arrivals))
            while self._moving[0].done():
                self._moving.popleft().result()
                if not self._moving:
                    break

    def flush(self) -> None:
        """Waits until every buffer is given back."""
        while self._moving:
            self._moving.popleft().result()
        while self._flying:
            self._await(self._flying[0][0])
            self._reader.give_back(self._flying.popleft()[1])

    def _move(self, piece: Piece, arrivals: Sequence[_Arrival]) -> None:
        """In a thread of its own."""
        slot = self._slots.get()
        try:
            self._await(slot.sent)
            if slot.memory is None:
                slot.memory = self._timed_pin(host_bytes(piece.buffer.size))
            piece.buffer.copy_to(slot.memory.data_ptr(), piece.length)
            self._reader.give_back(piece)
            with self._lock:
                slot.sent = self._send(piece, arrivals, slot.memory)
        finally:
            self._slots.put(slot)

    def _send(self, piece: Piece, arrivals: Sequence[_Arrival], memory: Tensor) -> torch.cuda.Event:
        """Under the lock."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            _land(piece, arrivals, memory)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _await(self, event: torch.cuda.Event | None) -> None:
        deadline = time.monotonic() + STALL
        while event is not None:
            with self._lock:
                if event.query():
                    return
            if time.monotonic() > deadline:
                raise ModelError(f"the device took no weights for {STALL:.0f} s", hint="see nvidia-smi")
            time.sleep(50e-6)

    def _pin(self, number: int, memory: Tensor) -> None:
        if number not in self._pinned:
            self._pinned[number] = self._timed_pin(memory)

    def _timed_pin(self, memory: Tensor) -> Tensor:
        began = time.perf_counter()
        pin(memory)
        self.pin_seconds += time.perf_counter() - began  # a sum over threads: a statistic, not exact
        return memory


@dataclass(slots=True)
class _Slot:
    """Pinned memory, and when it was last read."""

    memory: Tensor | None = None
    sent: torch.cuda.Event | None = None


def _land(piece: Piece, arrivals: Sequence[_Arrival], memory: Tensor) -> None:
    for arrival in arrivals:
        start, end = max(arrival.start, piece.offset), min(arrival.end, piece.offset + piece.length)
        arrival.land(start, memory[start - piece.offset : end - piece.offset])
