"""DeviceRegion: a cache on a device, as transfers see it.

Blocks are read and written where the steps use them, and pass through pinned main memory, a piece at a time:

    gather    kernels to scratch, one copy to main memory       of blocks that are published: nobody writes to them
    scatter   one copy to scratch, kernels to the blocks        after the steps that knew the blocks before

A piece has a Slot meanwhile: scratch, pinned memory and a lane beside the steps'. Whoever calls is a thread of a
transport, and waits until its piece is through. So nothing has to be copied before somebody asks for it, and what has
arrived is there for every step that is launched from then on. There are few slots: who finds none for too long gives
up, and the blocks are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor

from emberline.engine import memory
from emberline.engine.gpu.copier import WORD
from emberline.engine.gpu.device import Device
from emberline.kv.cache import KVCache
from emberline.kv.transfer.errors import BadTransfer, TransferTimeout
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.region import Ids, Region

PATIENCE = 5.0  # seconds for a slot; one is used for milliseconds, unless the device is stuck


class Slot:
    def __init__(self, size: int, device: Device) -> None:
        self.scratch = torch.zeros(size // WORD.itemsize, dtype=WORD, device=device.torch)
        self.pinned = device.pinned(size).view(WORD)
        self.lane = device.beside()
        self._bytes = self.pinned.view(torch.uint8).numpy()

    def read(self, out: memoryview) -> None:
        """By numpy: torch would have threads of its own help each thread of ours."""
        np.copyto(np.frombuffer(out, np.uint8), self._bytes[: len(out)])

    def write(self, data: memoryview) -> None:
        np.copyto(self._bytes[: len(data)], np.frombuffer(data, np.uint8))


class DeviceRegion(Region):
    def __init__(self, layout: Layout, cache: KVCache, device: Device) -> None:
        super().__init__(layout, cache.num_blocks)
        assert not layout.turned and layout.plane_bytes % WORD.itemsize == 0
        self.size = memory.moved_at_once(layout.layer_bytes // layout.tokens)
        self.device = device.torch
        self.parts = [part.flatten(1).view(WORD) for part in (cache.keys, cache.values)]  # layer, word
        self._out, self._in = SimpleQueue[Slot](), SimpleQueue[Slot]()
        for slots in (self._out, self._in):  # of their own: who sends does not wait for those who wait for steps
            for _ in range(memory.SLOTS):
                slots.put(Slot(self.size, device))
        self._steps = device.lane
        self._fence = self._steps.mark()

    def fence(self) -> None:
        """A later one than a pull needs does no harm: all steps are on one lane."""
        self._fence = self._steps.mark()

    @torch.inference_mode()
    def gather(self, piece: Piece, blocks: Ids, wire: Layout, out: memoryview) -> None:
        for layers, width, index, part in self._cuts(piece, blocks, wire, out):
            with self._slot(self._out) as slot:
                with self._at_work(slot):
                    places, scratch, pinned = self._shaped(slot, layers, width, index)
                    for i, words in enumerate(self.parts):
                        torch.index_select(_rows(words, layers, width), 1, places, out=scratch[:, i])
                    pinned.copy_(scratch, non_blocking=True)
                slot.read(part)

    @torch.inference_mode()
    def scatter(self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview) -> None:
        for layers, width, index, part in self._cuts(piece, blocks, wire, data):
            with self._slot(self._in) as slot:
                slot.write(part)
                with self._at_work(slot):
                    places, scratch, pinned = self._shaped(slot, layers, width, index)
                    scratch.copy_(pinned, non_blocking=True)
                    slot.lane.after(self._fence)
                    for i, words in enumerate(self.parts):
                        _rows(words, layers, width).index_copy_(1, places, scratch[:, i])

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Inside, the device writes to blocks by itself, after the steps that knew them before."""
        with self._slot(self._in) as slot, self._at_work(slot):
            slot.lane.after(self._fence)
            yield

    def _cuts(
        self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview
    ) -> Iterator[tuple[range, int, Ids, memoryview]]:
        """Layers that a slot holds together, elements of so many words, which of them, and their part of the data."""
        size, index = self.places(piece, blocks, wire, 0)  # the same for values, since keys are not turned
        each = len(self.parts) * size * len(index)
        if each > self.size:
            raise BadTransfer(f"a layer of {piece} has {each} bytes; {self.size} can be moved at a time")
        for top in range(piece.top, piece.bottom, self.size // each):
            bottom = min(top + self.size // each, piece.bottom)
            part = data[(top - piece.top) * each : (bottom - piece.top) * each]
            yield range(top, bottom), size // WORD.itemsize, index, part

    def _shaped(self, slot: Slot, layers: range, width: int, index: Ids) -> tuple[Tensor, Tensor, Tensor]:
        """The index on the device; scratch and pinned memory as [layer, part, element, word]."""
        shape = len(layers), len(self.parts), len(index), width
        count = len(layers) * len(self.parts) * len(index) * width
        places = torch.from_numpy(index).to(self.device)
        return places, slot.scratch[:count].view(shape), slot.pinned[:count].view(shape)

    @contextmanager
    def _slot(self, slots: SimpleQueue[Slot]) -> Iterator[Slot]:
        try:
            slot = slots.get(timeout=PATIENCE)
        except Empty:
            raise TransferTimeout(f"the device had no time for a piece within {PATIENCE:g} s") from None
        try:
            yield slot
        finally:
            slots.put(slot)

    @staticmethod
    @contextmanager
    def _at_work(slot: Slot) -> Iterator[None]:
        """Inside, its lane works. That is done at the end, also if something fails: memory is used otherwise then."""
        try:
            with slot.lane.working():
                yield
        finally:
            slot.lane.mark().wait()


def _rows(words: Tensor, layers: range, width: int) -> Tensor:
    """Some layers of a part, as elements of so many words."""
    return words[layers.start : layers.stop].view(len(layers), -1, width)
