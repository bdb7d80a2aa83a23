"""WeightUploader: copies weights to the device through pinned memory, decoding coded tensors."""

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

MOVERS, SLOTS = 6, 8  # threads that copy chunks to pinned memory, and pinned buffers for chunks
DECODERS, ROOMS = 12, 18  # threads that decode, and pinned buffers for decoded runs of blocks
LOOK = 1e-3


class Carrier:
    """Copies chunks to the device and gives their buffers back when the copies are done.

    All copies run on one CUDA stream, which is enough to saturate the link, so that a staging tensor is complete before
    it is used and its memory is freed in order. Buffers that the reader reuses are pinned at their first use. Pinning
    the others would take longer than copying their bytes to pinned buffers, which several threads do at link speed.

    A chunk with coded tensors is also copied to a pinned buffer first, so that the reader can reuse its own. Then other
    threads decode it, a run of blocks at a time, each into a pinned buffer. The copying thread waits for the runs of
    its chunk, which bounds the memory in use.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self.pin_seconds = self.decode_seconds = 0.0  # summed over threads
        self.decoded_bytes = 0
        self._reader = reader
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, Tensor] = {}  # by buffer number
        self._flying: deque[tuple[torch.cuda.Event | None, Piece]] = deque()
        self._lock = threading.Lock()  # guards the stream, the tensor loads and the statistics
        self._movers = ThreadPoolExecutor(MOVERS, "mover")
        self._decoders = ThreadPoolExecutor(min(DECODERS, core_count()), "decoder")
        self._moving: deque[Future[None]] = deque()
        self._slots = _slots(SLOTS)
        self._rooms = _slots(ROOMS)

    def __enter__(self) -> Carrier:
        if self._stream is not None:  # queued work may still use the memory that the weights are copied to
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all copies, even after an error: the device may still be reading the buffers."""
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
            torch.cuda.empty_cache()  # frees staging tensors, whose memory is reserved for this stream
        self._pinned.clear()

    def carry(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
        """Start copying the chunk's part of each tensor load to the device."""
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
        """Wait until the reader has a chunk or no copy is running; the reader may wait for a copied buffer."""
        while not self._reader.ready() and (self._flying or self._moving):
            if self._flying:
                self._await(self._flying[0][0])
            else:
                wait_for([self._moving[0]], timeout=LOOK)
            self._look()

    def flush(self) -> None:
        """Wait until every buffer has been given back."""
        while self._moving:
            self._moving.popleft().result()
        while self._flying:
            self._await(self._flying[0][0])
            self._reader.give_back(self._flying.popleft()[1])

    def _look(self) -> None:
        """Give back the buffers whose copies have completed."""
        while self._moving and self._moving[0].done():
            self._moving.popleft().result()
        while self._flying and self._sent(self._flying[0][0]):
            self._reader.give_back(self._flying.popleft()[1])

    def _move(self, piece: Piece, arrivals: Sequence[Arrival]) -> None:
        """Copy a chunk to a pinned buffer and from there to the device. Runs in a mover thread."""
        slot = self._slots.get()
        try:
            memory = self._free(slot, piece.buffer.size)
            piece.buffer.copy_to(memory.data_ptr(), piece.length)
            self._reader.give_back(piece)
            coded = [load for load in arrivals if isinstance(load, CodedArrival)]
            plain = [load for load in arrivals if not isinstance(load, CodedArrival)]
            if plain:
                slot.sent = self._send(partial(land, piece, plain, memory))
            parts = [(load, *overlap(piece, load, memory)) for load in coded]
            self._decode([run for load, offset, part in parts for run in load.cut(offset, part.numpy())])
        finally:
            self._slots.put(slot)

    def _decode(self, runs: Sequence[Run]) -> None:
        """Decode the runs and return when their input is no longer needed."""
        decoding = [self._decoders.submit(self._decode_one, run) for run in runs]
        wait_for(decoding)
        for future in decoding:
            future.result()

    def _decode_one(self, run: Run) -> None:
        """Decode a run into a pinned buffer and copy it to the device. Runs in a decoder thread."""
        slot = self._rooms.get()
        try:
            memory = self._free(slot, RUN)
            began = time.perf_counter()
            begin, end = run.decode(memory.numpy())
            spent = time.perf_counter() - began
            slot.sent = self._send(partial(run.arrival.land, begin, memory[: end - begin]))
            with self._lock:
                self.decode_seconds += spent
                self.decoded_bytes += end - begin
        finally:
            self._rooms.put(slot)

    def _send(self, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """Enqueue a copy on the stream; its source may be overwritten after the returned event."""
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
                raise ModelError(f"the GPU accepted no weights for {STALL:.0f} s", hint="check nvidia-smi and dmesg")
            time.sleep(50e-6)

    def _free(self, slot: _Slot, size: int) -> Tensor:
        """Return the slot's memory after its last copy has completed."""
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
    """A pinned buffer, and the event of the last copy from it."""

    memory: Tensor | None = None
    sent: torch.cuda.Event | None = None


def _slots(count: int) -> queue.SimpleQueue[_Slot]:
    slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
    for _ in range(count):
        slots.put(_Slot())
    return slots
