"""Carrier: pieces of files to the device, by way of pinned memory; what is coded is decoded on the way."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from emberline.core.config import core_count
from emberline.core.errors import ModelError
from emberline.models.arrival import Arrival, land, overlap
from emberline.models.coded import RUN, CodedArrival, Run
from emberline.models.pinned import host_bytes, pin, unpin
from emberline.models.reader import STALL, Piece, Reader

MOVERS, SLOTS = 6, 8  # threads that move bytes to pinned memory, and pieces of it
DECODERS, ROOMS = 12, 18  # threads that decode, at most, and pinned memory for what a run of blocks becomes
LOOK = 1e-3  # seconds between looks whether something was read


class Carrier:
    """Copies pieces to the device and gives their buffers back when the copies are done.

    All on one stream, so that a staged copy is whole before it is used and its memory comes back in order; one stream
    fills the link. Buffers that will be used again are pinned when they first come by. Pinning the others would take
    longer than to move their bytes to pinned ones, and several threads do that as fast as the link.

    A piece with coded tensors is moved too, so that its buffer is soon free for the disk. From there other threads
    decode it, a run of blocks at a time, each into pinned memory of its own. A mover waits for the runs of its piece:
    that bounds the memory.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self.pin_seconds = self.decode_seconds = 0.0  # sums over threads
        self.decoded_bytes = 0
        self._reader = reader
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, Tensor] = {}  # by the buffer's number
        self._flying: deque[tuple[torch.cuda.Event | None, Piece]] = deque()
        self._lock = threading.Lock()  # of the stream, the arrivals and the figures
        self._movers = ThreadPoolExecutor(MOVERS, "mover")
        self._decoders = ThreadPoolExecutor(min(DECODERS, core_count()), "decoder")
        self._moving: deque[Future[None]] = deque()
        self._slots = _slots(SLOTS)
        self._rooms = _slots(ROOMS)

    def __enter__(self) -> Carrier:
        if self._stream is not None:  # memory the places lie in may still be in use by work queued before
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error too: the device may still be reading the buffers."""
        self._movers.shutdown(cancel_futures=kind is not None)
        self._decoders.shutdown()
        if kind is not None:
            self._moving.clear()
        slots = [*(self._slots.get_nowait() for _ in range(SLOTS)), *(self._rooms.get_nowait() for _ in range(ROOMS))]
        with contextlib.suppress(ModelError) if kind is not None else contextlib.nullcontext():
            self.flush()
            for slot in slots:
                self._await(slot.sent)
        if self._stream is not None:
            for memory in (*self._pinned.values(), *(slot.memory for slot in slots if slot.memory is not None)):
                unpin(memory)
            torch.cuda.empty_cache()  # staged copies: no other stream could use their memory
        self._pinned.clear()

    def carry(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
        coded = any(isinstance(arrival, CodedArrival) for arrival in arrivals)
        used_again = piece.buffer.number in self._pinned or self._reader.reuses(piece)
        if coded or (self._stream is not None and not used_again):
            self._moving.append(self._movers.submit(self._move, piece, arrivals))
        else:
            memory = torch.frombuffer(piece.buffer.memory, dtype=torch.uint8)
            if self._stream is not None and piece.buffer.number not in self._pinned:
                self._pinned[piece.buffer.number] = self._pin(memory)
            self._flying.append((self._send(partial(land, piece, arrivals, memory)), piece))
        self._look()

    def wait(self) -> None:
        """Until there is a piece, or nothing more to wait for: the ring may be waiting for what is being copied."""
        while not self._reader.ready() and (self._flying or self._moving):
            if self._flying:
                self._await(self._flying[0][0])
            else:
                wait_for([self._moving[0]], timeout=LOOK)
            self._look()

    def flush(self) -> None:
        """Waits until every buffer is given back."""
        while self._moving:
            self._moving.popleft().result()
        while self._flying:
            self._await(self._flying[0][0])
            self._reader.give_back(self._flying.popleft()[1])

    def _look(self) -> None:
        """What is done by now."""
        while self._moving and self._moving[0].done():
            self._moving.popleft().result()
        while self._flying and self._sent(self._flying[0][0]):
            self._reader.give_back(self._flying.popleft()[1])

    def _move(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
        """In a thread of its own."""
        slot = self._slots.get()
        try:
            memory = self._free(slot, piece.buffer.size)
            piece.buffer.copy_to(memory.data_ptr(), piece.length)
            self._reader.give_back(piece)
            coded = [arrival for arrival in arrivals if isinstance(arrival, CodedArrival)]
            plain = [arrival for arrival in arrivals if not isinstance(arrival, CodedArrival)]
            if plain:
                slot.sent = self._send(partial(land, piece, plain, memory))
            parts = [(arrival, *overlap(piece, arrival, memory)) for arrival in coded]
            self._decode([run for arrival, at, part in parts for run in arrival.cut(at, part.numpy())])
        finally:
            self._slots.put(slot)

    def _decode(self, runs: Sequence[Run]) -> None:
        """Returns when nobody reads them any more."""
        decoding = [self._decoders.submit(self._decode_one, run) for run in runs]
        wait_for(decoding)
        for future in decoding:
            future.result()

    def _decode_one(self, run: Run) -> None:
        """In a thread of its own."""
        room = self._rooms.get()
        try:
            memory = self._free(room, RUN)
            began = time.perf_counter()
            begin, end = run.decode(memory.numpy())
            spent = time.perf_counter() - began
            room.sent = self._send(partial(run.arrival.land, begin, memory[: end - begin]))
            with self._lock:
                self.decode_seconds += spent
                self.decoded_bytes += end - begin
        finally:
            self._rooms.put(room)

    def _send(self, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """What `copy` copies from may be written again after the event."""
        with self._lock:
            if self._stream is None:
                copy()
                return None
            with torch.cuda.stream(self._stream):
                copy()
            event = torch.cuda.Event()
            event.record(self._stream)
            return event

    def _sent(self, event: torch.cuda.Event | None) -> bool:
        if event is None:
            return True
        with self._lock:
            return bool(event.query())

    def _await(self, event: torch.cuda.Event | None) -> None:
        deadline = time.monotonic() + STALL
        while not self._sent(event):
            if time.monotonic() > deadline:
                raise ModelError(f"the device took no weights for {STALL:.0f} s", hint="see nvidia-smi")
            time.sleep(50e-6)

    def _free(self, slot: _Slot, size: int) -> Tensor:
        """Its memory, once nobody reads it any more."""
        self._await(slot.sent)
        if slot.memory is None:
            memory = host_bytes(size)
            slot.memory = memory if self._stream is None else self._pin(memory)
        return slot.memory

    def _pin(self, memory: Tensor) -> Tensor:
        began = time.perf_counter()
        pin(memory)
        with self._lock:
            self.pin_seconds += time.perf_counter() - began
        return memory


@dataclass(slots=True)
class _Slot:
    """Pinned memory, and when it was last read."""

    memory: Tensor | None = None
    sent: torch.cuda.Event | None = None


def _slots(count: int) -> queue.SimpleQueue[_Slot]:
    slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
    for _ in range(count):
        slots.put(_Slot())
    return slots
