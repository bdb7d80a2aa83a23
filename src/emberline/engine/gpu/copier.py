"""DeviceCopier: moves blocks between a cache on a device and buffers in main memory.

In a buffer lies the same as in kv/tiers/copier.py. A block is in many places, one for the keys and one for the values
of each layer. So it goes by way of a piece of scratch: kernels gather it there, or scatter it from there, several
blocks at a time and in the order of the steps; and between scratch and main memory it is one copy, on a lane of its
own, beside the model:

    save    the steps' lane: gather |--> lane out: scratch to buffers     over: the piece and the buffers are free
    load    lane in: buffers to scratch |--> the steps' lane: scatter     over: the same

A piece is used again when its last trip is over; the device waits for that, not the host. Where the driver cannot pin
the buffers, blocks also pass through pinned memory of ours, and the host waits, and copies, instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from emberline.core.plan import Copy
from emberline.engine import memory
from emberline.engine.gpu.device import Device, Lane, Mark
from emberline.engine.gpu.staging import ALIGN, Staging
from emberline.kv.cache import KVCache

WORD = torch.int64  # what kernels move at a time, whatever it means


@dataclass(slots=True)
class Trip:
    """Blocks that went together."""

    over: Mark
    due: list[tuple[Tensor, Tensor]]  # what the host has to copy then: to, from

    def end(self) -> None:
        self.over.wait()
        with torch.inference_mode():
            for to, source in self.due:
                to.copy_(source)
        self.due.clear()


class Piece:
    """Scratch for a few blocks, in the form they have in buffers: keys of all layers, then values."""

    def __init__(self, blocks: int, layers: int, words: int, device: torch.device) -> None:
        self.memory = torch.zeros(blocks, 2, layers, words, dtype=WORD, device=device)
        self.rows = self.memory.flatten(1).view(torch.uint8)
        self.pinned: Tensor | None = None  # the same in main memory, if buffers are out of the device's reach
        self.trip: Trip | None = None  # its last


class DeviceCopier:
    def __init__(self, cache: KVCache, device: Device) -> None:
        self._device = device
        self._size = cache.shape.block_bytes
        self._at_once = at_once = memory.copied_at_once(self._size)
        halves = (half.flatten(2).view(WORD) for half in (cache.keys, cache.values))
        self._halves = [half.transpose(0, 1) for half in halves]  # block, layer, word
        _, layers, words = self._halves[0].shape
        self._pieces = [Piece(at_once, layers, words, device.torch) for _ in range(memory.PIECES)]
        self._next_out, self._next_in = cycle(self._pieces[::2]), cycle(self._pieces[1::2])
        self._steps, self._out, self._in = device.lane, device.beside(), device.beside()
        self._numbers = Staging(2 * (8 * cache.num_blocks + ALIGN), device)  # of blocks
        self._area: Tensor | None = None

    def reach(self, area: memoryview) -> None:
        """All buffers lie in this area. It is pinned until `let_go`, if that can be."""
        assert self._area is None
        self._area = torch.frombuffer(area, dtype=torch.uint8)
        if not self._device.pin(self._area):
            for piece in self._pieces:
                piece.pinned = self._device.pinned(piece.rows.numel()).view_as(piece.rows)

    def let_go(self) -> None:
        """The area may go."""
        assert self._area is not None
        for piece in self._pieces:
            if piece.trip is not None:
                piece.trip.over.wait()
        if self._pieces[0].pinned is None:
            self._device.unpin(self._area)
        self._area = None

    def launch(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> Callable[[], None]:
        """Saves, then loads, where the steps' lane is now. The call it gives back waits until all buffers are done
        with."""
        assert self._area is not None
        # A block may change hands while a plan is made: who was to have it first will not miss it.
        loads = list({copy.block: copy for copy in loads}.values())
        sheet = self._numbers.sheet()
        from_here, to_here = (sheet.put(np.array([c.block for c in copies], np.int64)) for copies in (saves, loads))
        sheet.send()
        trips = [self._save(*part) for part in self._parts(saves, from_here)]
        trips += [self._load(*part) for part in self._parts(loads, to_here)]

        def finish() -> None:
            for trip in trips:
                trip.end()

        return finish

    def forget(self) -> None:
        self._numbers.forget()

    def buffers(self) -> list[Tensor]:
        return [self._numbers.device, *(piece.memory for piece in self._pieces)]

    def _parts(self, copies: Sequence[Copy], places: Tensor) -> Iterator[tuple[Sequence[Copy], Tensor]]:
        for i in range(0, len(copies), self._at_once):
            yield copies[i : i + self._at_once], places[i : i + self._at_once]

    def _save(self, copies: Sequence[Copy], places: Tensor) -> Trip:
        piece = self._vacated(next(self._next_out), self._steps)
        for at, half in enumerate(self._halves):
            torch.index_select(half, 0, places, out=piece.memory[: len(copies), at])
        self._out.after(self._steps.mark())
        with self._out.working():
            buffers, due = [self._buffer(copy) for copy in copies], []
            if piece.pinned is not None:
                piece.pinned[: len(copies)].copy_(piece.rows[: len(copies)], non_blocking=True)
                due = list(zip(buffers, piece.pinned, strict=False))
            else:
                for buffer, row in zip(buffers, piece.rows, strict=False):
                    buffer.copy_(row, non_blocking=True)
            piece.trip = Trip(self._out.mark(), due)
        return piece.trip

    def _load(self, copies: Sequence[Copy], places: Tensor) -> Trip:
        piece = self._vacated(next(self._next_in), self._in)
        buffers = [self._buffer(copy) for copy in copies]
        if piece.pinned is not None:
            for row, buffer in zip(piece.pinned, buffers, strict=False):
                row.copy_(buffer)
            buffers = list(piece.pinned[: len(copies)])
        with self._in.working():
            for row, buffer in zip(piece.rows, buffers, strict=False):
                row.copy_(buffer, non_blocking=True)
            self._steps.after(self._in.mark())
        for at, half in enumerate(self._halves):
            half.index_copy_(0, places, piece.memory[: len(copies), at])
        piece.trip = Trip(self._steps.mark(), [])
        return piece.trip

    @staticmethod
    def _vacated(piece: Piece, lane: Lane) -> Piece:
        """What the lane does next may overwrite it."""
        if piece.trip is not None:
            if piece.pinned is not None:
                piece.trip.end()
            lane.after(piece.trip.over)
        return piece

    def _buffer(self, copy: Copy) -> Tensor:
        return torch.frombuffer(copy.buffer, dtype=torch.uint8, count=self._size)
