"""Carrier: pieces of files to the device, by way of pinned memory."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.core.errors import ModelError
from emberline.models.arrival import Arrival, land
from emberline.models.pinned import host_bytes, pin, unpin
from emberline.models.reader import STALL, Piece, Reader

MOVERS, SLOTS = 6, 8  # threads that move bytes to pinned memory, and pieces of it


class Carrier:
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

    def __enter__(self) -> Carrier:
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

    def carry(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
        if self._stream is None:
            land(piece, arrivals, torch.frombuffer(piece.buffer.memory, dtype=torch.uint8))
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

    def _move(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
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

    def _send(self, piece: Piece, arrivals: Sequence[Arrival], memory: Tensor) -> torch.cuda.Event:
        """Under the lock."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            land(piece, arrivals, memory)
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
