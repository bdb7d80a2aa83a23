"""DeviceRegion: a KV cache on a GPU as source and target of transfers.

Blocks are copied from and to the cache that the steps use, through pinned main memory, one piece at a time:

    gather    kernels to scratch, one copy to main memory     reads published blocks, which no step writes to
    scatter   one copy to scratch, kernels to the blocks      waits for the steps that used the blocks before

Each piece uses a StagingSlot: scratch, pinned memory and a stream of its own. The caller is a thread of a transport and
waits until its piece is copied, so blocks are copied only on demand, and received blocks are visible to every step that
is launched afterwards. There are few slots: a caller that gets none within SLOT_TIMEOUT_S fails, and the blocks are
recomputed.
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

PATIENCE = 5.0  # a slot is used for milliseconds, unless the device hangs


class Slot:
    def __init__(self, size: int, device: Device) -> None:
        self.scratch = torch.zeros(size // WORD.itemsize, dtype=WORD, device=device.torch)
        self.pinned = device.pinned(size).view(WORD)
        self.lane = device.beside()
        self._bytes = self.pinned.view(torch.uint8).numpy()

    def read(self, out: memoryview) -> None:
        """Copy to `out` with numpy: torch would start more threads for each of ours."""
        np.copyto(np.frombuffer(out, np.uint8), self._bytes[: len(out)])

    def write(self, data: memoryview) -> None:
        np.copyto(self._bytes[: len(data)], np.frombuffer(data, np.uint8))


class DeviceRegion(Region):
    def __init__(self, layout: Layout, cache: KVCache, device: Device) -> None:
        super().__init__(layout, cache.num_blocks)
        assert not layout.turned and layout.plane_bytes % WORD.itemsize == 0
        self.size = memory.moved_at_once(layout.layer_bytes // layout.tokens)
        self.device = device.torch
        self.parts = [part.flatten(1).view(WORD) for part in (cache.keys, cache.values)]  # [layer, word]
        self._out, self._in = SimpleQueue[Slot](), SimpleQueue[Slot]()
        for slots in (self._out, self._in):  # separate, because receivers wait for steps and senders need not
            for _ in range(memory.SLOTS):
                slots.put(Slot(self.size, device))
        self._steps = device.lane
        self._fence = self._steps.mark()

    def fence(self) -> None:
        """Let later writes wait for all steps launched so far. Waiting for more than needed does no harm."""
        self._fence = self._steps.mark()

    @torch.inference_mode()
    def gather(self, piece: Piece, blocks: Ids, wire: Layout, out: memoryview) -> None:
        for layers, width, index, part in self._cuts(piece, blocks, wire, out):
            with self._slot(self._out) as slot:
                with self._at_work(slot):
                    indexes, scratch, pinned = self._shaped(slot, layers, width, index)
                    for i, words in enumerate(self.parts):
                        torch.index_select(_rows(words, layers, width), 1, indexes, out=scratch[:, i])
                    pinned.copy_(scratch, non_blocking=True)
                slot.read(part)

    @torch.inference_mode()
    def scatter(self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview) -> None:
        for layers, width, index, part in self._cuts(piece, blocks, wire, data):
            with self._slot(self._in) as slot:
                slot.write(part)
                with self._at_work(slot):
                    indexes, scratch, pinned = self._shaped(slot, layers, width, index)
                    scratch.copy_(pinned, non_blocking=True)
                    slot.lane.after(self._fence)
                    for i, words in enumerate(self.parts):
                        _rows(words, layers, width).index_copy_(1, indexes, scratch[:, i])

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Return a context in which work writes to blocks directly, after the steps that used them before."""
        with self._slot(self._in) as slot, self._at_work(slot):
            slot.lane.after(self._fence)
            yield

    def _cuts(
        self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview
    ) -> Iterator[tuple[range, int, Ids, memoryview]]:
        """Yield parts of a piece that fit into a slot: layers, words per element, element indexes, data."""
        size, index = self.places(piece, blocks, wire, 0)  # the same for values, since keys are not turned
        each = len(self.parts) * size * len(index)
        if each > self.size:
            raise BadTransfer(f"one layer of {piece} has {each} bytes; the limit is {self.size}")
        for top in range(piece.top, piece.bottom, self.size // each):
            bottom = min(top + self.size // each, piece.bottom)
            part = data[(top - piece.top) * each : (bottom - piece.top) * each]
            yield range(top, bottom), size // WORD.itemsize, index, part

    def _shaped(self, slot: Slot, layers: range, width: int, index: Ids) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index on the device, and scratch and pinned memory as [layer, part, element, word]."""
        shape = len(layers), len(self.parts), len(index), width
        count = len(layers) * len(self.parts) * len(index) * width
        indexes = torch.from_numpy(index).to(self.device)
        return indexes, slot.scratch[:count].view(shape), slot.pinned[:count].view(shape)

    @contextmanager
    def _slot(self, slots: SimpleQueue[Slot]) -> Iterator[Slot]:
        try:
            slot = slots.get(timeout=PATIENCE)
        except Empty:
            raise TransferTimeout(f"no transfer buffer of the GPU was free within {PATIENCE:g} s") from None
        try:
            yield slot
        finally:
            slots.put(slot)

    @staticmethod
    @contextmanager
    def _at_work(slot: Slot) -> Iterator[None]:
        """Return a context that queues work on the slot's stream and waits for it at the end.

        It also waits after an error, since the memory is reused then."""
        try:
            with slot.lane.working():
                yield
        finally:
            slot.lane.mark().wait()


def _rows(words: Tensor, layers: range, width: int) -> Tensor:
    """Return some layers of a part as elements of `width` words."""
    return words[layers.start : layers.stop].view(len(layers), -1, width)
