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

from emberline.core.cpus import core_count
from emberline.core.errors import ModelError
from emberline.models.coded_tensor_load import MAX_RUN_BYTES, CodedRun, CodedTensorLoad
from emberline.models.direct_io import FileChunk
from emberline.models.pinned import allocate_host_bytes, pin, unpin
from emberline.models.reader import STALL_TIMEOUT_S, FileReader
from emberline.models.tensor_load import TensorLoad, copy_chunk, slice_overlapping_bytes

MOVER_THREADS, STAGING_SLOTS = 6, 8  # threads that copy chunks to pinned memory, and pinned buffers for chunks
MAX_DECODER_THREADS, DECODE_SLOTS = 12, 18  # threads that decode, and pinned buffers for decoded runs of blocks
POLL_INTERVAL_S = 1e-3


class WeightUploader:
    """Copies chunks to the device and gives their buffers back when the copies are done.

    All copies run in order on one CUDA stream, which is enough to saturate the link to the device. Buffers that the
    reader reuses are pinned at their first use. Pinning a buffer that is used once would take longer than copying its
    bytes to a pinned buffer, which several mover threads do at link speed.

    A chunk with coded (compressed) tensors is also copied to a pinned buffer first, so that the reader can reuse its
    own buffer. Decoder threads then decode runs of blocks, each into another pinned buffer. The mover thread waits
    until all runs of its chunk are decoded, which bounds the memory in use.
    """

    def __init__(self, reader: FileReader, device: torch.device) -> None:
        self.pin_seconds = self.decode_seconds = 0.0  # summed over threads
        self.decoded_bytes = 0
        self._reader = reader
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, Tensor] = {}  # by buffer number
        self._in_flight: deque[tuple[torch.cuda.Event | None, FileChunk]] = deque()
        self._lock = threading.Lock()  # guards the stream, the tensor loads and the statistics
        self._movers = ThreadPoolExecutor(MOVER_THREADS, "mover")
        self._decoders = ThreadPoolExecutor(min(MAX_DECODER_THREADS, core_count()), "decoder")
        self._moves: deque[Future[None]] = deque()
        self._staging_slots = _make_slot_queue(STAGING_SLOTS)
        self._decode_slots = _make_slot_queue(DECODE_SLOTS)

    def __enter__(self) -> WeightUploader:
        if self._stream is not None:  # queued work may still use the memory that the weights are copied to
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all copies, even after an error: the device may still be reading the buffers."""
        self._movers.shutdown(cancel_futures=kind is not None)
        self._decoders.shutdown()
        if kind is not None:
            self._moves.clear()
        slots = [
            *(self._staging_slots.get_nowait() for _ in range(STAGING_SLOTS)),
            *(self._decode_slots.get_nowait() for _ in range(DECODE_SLOTS)),
        ]
        with contextlib.suppress(ModelError) if kind is not None else contextlib.nullcontext():
            self.flush()
            for slot in slots:
                self._wait_for_event(slot.last_copy)
        if self._stream is not None:
            for memory in (*self._pinned.values(), *(slot.memory for slot in slots if slot.memory is not None)):
                unpin(memory)
            torch.cuda.empty_cache()  # frees staging tensors, whose memory is reserved for this stream
        self._pinned.clear()

    def upload(self, chunk: FileChunk, loads: Sequence[TensorLoad]) -> None:
        """Start to copy the bytes of a chunk to the tensors of all `loads`."""
        coded = any(isinstance(arrival, CodedTensorLoad) for arrival in loads)
        used_again = chunk.buffer.number in self._pinned or self._reader.will_reuse_buffer(chunk)
        if coded or (self._stream is not None and not used_again):
            self._moves.append(self._movers.submit(self._copy_via_pinned_buffer, chunk, loads))
        else:
            memory = torch.frombuffer(chunk.buffer.memory, dtype=torch.uint8)
            if self._stream is not None and chunk.buffer.number not in self._pinned:
                self._pinned[chunk.buffer.number] = self._pin(memory)
            self._in_flight.append((self._enqueue_copy(partial(copy_chunk, chunk, loads, memory)), chunk))
        self._collect_finished()

    def wait_for_chunk(self) -> None:
        """Wait until the reader has a chunk or no copy is running, and give back buffers meanwhile.

        The reader may have no chunk because all of its buffers are still being copied.
        """
        while not self._reader.is_ready() and (self._in_flight or self._moves):
            if self._in_flight:
                self._wait_for_event(self._in_flight[0][0])
            else:
                wait_for([self._moves[0]], timeout=POLL_INTERVAL_S)
            self._collect_finished()

    def flush(self) -> None:
        """Wait until all copies are done and every buffer has been given back to the reader."""
        while self._moves:
            self._moves.popleft().result()
        while self._in_flight:
            self._wait_for_event(self._in_flight[0][0])
            self._reader.release_chunk(self._in_flight.popleft()[1])

    def _collect_finished(self) -> None:
        """Give back the buffers whose copies have completed."""
        while self._moves and self._moves[0].done():
            self._moves.popleft().result()
        while self._in_flight and self._is_complete(self._in_flight[0][0]):
            self._reader.release_chunk(self._in_flight.popleft()[1])

    def _copy_via_pinned_buffer(self, chunk: FileChunk, loads: Sequence[TensorLoad]) -> None:
        """Copy a chunk to a pinned buffer and from there to the device. Runs in a mover thread."""
        slot = self._staging_slots.get()
        try:
            memory = self._acquire_memory(slot, chunk.buffer.size)
            chunk.buffer.copy_to(memory.data_ptr(), chunk.length)
            self._reader.release_chunk(chunk)
            coded = [load for load in loads if isinstance(load, CodedTensorLoad)]
            plain = [load for load in loads if not isinstance(load, CodedTensorLoad)]
            if plain:
                slot.last_copy = self._enqueue_copy(partial(copy_chunk, chunk, plain, memory))
            parts = [(load, *slice_overlapping_bytes(chunk, load, memory)) for load in coded]
            self._decode_runs(
                [run for load, offset, part in parts for run in load.add_coded_bytes(offset, part.numpy())]
            )
        finally:
            self._staging_slots.put(slot)

    def _decode_runs(self, runs: Sequence[CodedRun]) -> None:
        """Decode the runs in the decoder threads and wait until all of them are decoded."""
        decoding = [self._decoders.submit(self._decode_run, run) for run in runs]
        wait_for(decoding)
        for future in decoding:
            future.result()

    def _decode_run(self, run: CodedRun) -> None:
        """Decode a run into a pinned buffer and copy it to the device. Runs in a decoder thread."""
        slot = self._decode_slots.get()
        try:
            memory = self._acquire_memory(slot, MAX_RUN_BYTES)
            began = time.perf_counter()
            begin, end = run.decode(memory.numpy())
            spent = time.perf_counter() - began
            slot.last_copy = self._enqueue_copy(partial(run.load.copy_part, begin, memory[: end - begin]))
            with self._lock:
                self.decode_seconds += spent
                self.decoded_bytes += end - begin
        finally:
            self._decode_slots.put(slot)

    def _enqueue_copy(self, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """Enqueue a copy on the stream.

        Return the event after which the source of the copy may be overwritten.
        """
        with self._lock:
            if self._stream is None:
                copy()
                return None
            with torch.cuda.stream(self._stream):
                copy()
            event = torch.cuda.Event()
            event.record(self._stream)
            return event

    def _is_complete(self, event: torch.cuda.Event | None) -> bool:
        if event is None:
            return True
        with self._lock:
            return bool(event.query())

    def _wait_for_event(self, event: torch.cuda.Event | None) -> None:
        deadline = time.monotonic() + STALL_TIMEOUT_S
        while not self._is_complete(event):
            if time.monotonic() > deadline:
                raise ModelError(
                    f"no copy of weights to the GPU completed within {STALL_TIMEOUT_S:.0f} s",
                    hint="check nvidia-smi and dmesg",
                )
            time.sleep(50e-6)

    def _acquire_memory(self, slot: _PinnedSlot, size: int) -> Tensor:
        """Wait for the last copy from the slot's pinned memory, then return that memory (`size` bytes)."""
        self._wait_for_event(slot.last_copy)
        if slot.memory is None:
            memory = allocate_host_bytes(size)
            slot.memory = memory if self._stream is None else self._pin(memory)
        return slot.memory

    def _pin(self, memory: Tensor) -> Tensor:
        began = time.perf_counter()
        pin(memory)
        with self._lock:
            self.pin_seconds += time.perf_counter() - began
        return memory


@dataclass(slots=True)
class _PinnedSlot:
    """A pinned buffer, and the event of the last copy from it."""

    memory: Tensor | None = None
    last_copy: torch.cuda.Event | None = None


def _make_slot_queue(count: int) -> queue.SimpleQueue[_PinnedSlot]:
    slots: queue.SimpleQueue[_PinnedSlot] = queue.SimpleQueue()
    for _ in range(count):
        slots.put(_PinnedSlot())
    return slots
