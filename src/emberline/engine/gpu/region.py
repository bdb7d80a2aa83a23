"""DeviceRegion: a KV cache on a GPU that KV transfers read from and write to.

KV blocks are copied from and to the cache that the steps use, through pinned main memory, one piece at a time:

    gather    kernels to scratch, one copy to main memory     reads published blocks, which no step writes to
    scatter   one copy to scratch, kernels to the blocks      waits for the steps that used the blocks before

Each piece uses a StagingSlot, which has its own scratch memory, pinned memory and stream. The caller is a thread of
a transport and waits until its piece is copied. So blocks are copied only on demand, and every step that is launched
afterwards sees the received blocks. There are few slots: a caller that gets none within SLOT_TIMEOUT_S fails, and
the blocks are recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from emberline.engine import memory
from emberline.engine.gpu.copier import WORD_DTYPE
from emberline.engine.gpu.device import Device
from emberline.kv.cache import KVCache
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds, Region
from emberline.kv.transfer.staging import split_by_layers, take_slot

SLOT_TIMEOUT_S = 5.0  # a slot is used for milliseconds, unless the device hangs


class StagingSlot:
    def __init__(self, size: int, device: Device) -> None:
        self.scratch = torch.zeros(size // WORD_DTYPE.itemsize, dtype=WORD_DTYPE, device=device.torch_device)
        self.pinned = device.allocate_pinned(size).view(WORD_DTYPE)
        self.stream = device.new_stream()
        self._bytes = self.pinned.view(torch.uint8).numpy()

    def read(self, out: memoryview) -> None:
        """Copy the pinned memory to `out`. This uses numpy, since torch would start threads for each caller."""
        np.copyto(np.frombuffer(out, np.uint8), self._bytes[: len(out)])

    def write(self, data: memoryview) -> None:
        np.copyto(self._bytes[: len(data)], np.frombuffer(data, np.uint8))


class DeviceRegion(Region):
    def __init__(self, layout: KVLayout, cache: KVCache, device: Device) -> None:
        super().__init__(layout, cache.num_blocks)
        assert not layout.turned and layout.plane_bytes % WORD_DTYPE.itemsize == 0
        self.slot_bytes = memory.transfer_slot_bytes(layout.layer_bytes // layout.tokens)
        self.device = device.torch_device
        self.parts = [part.flatten(1).view(WORD_DTYPE) for part in cache.tensors]  # [layer, word]
        self._out_slots, self._in_slots = SimpleQueue[StagingSlot](), SimpleQueue[StagingSlot]()
        for slots in (
            self._out_slots,
            self._in_slots,
        ):  # separate, because receivers wait for steps and senders need not
            for _ in range(memory.TRANSFER_SLOTS):
                slots.put(StagingSlot(self.slot_bytes, device))
        self._step_stream = device.step_stream
        self._fence_event = self._step_stream.record_event()

    def wait_for_started_work(self) -> None:
        """Make later writes to KV blocks wait for all steps that were launched before this call.

        This call itself does not wait."""
        self._fence_event = self._step_stream.record_event()

    @torch.inference_mode()
    def gather(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, out: memoryview) -> None:
        for layers, width, index, part in self._split_by_slot(piece, blocks, wire_layout, out):
            with self._take_slot(self._out_slots) as slot:
                with self._on_stream(slot):
                    indexes, scratch, pinned = self._slot_views(slot, layers, width, index)
                    for i, words in enumerate(self.parts):
                        torch.index_select(_view_layers(words, layers, width), 1, indexes, out=scratch[:, i])
                    pinned.copy_(scratch, non_blocking=True)
                slot.read(part)

    @torch.inference_mode()
    def scatter(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview) -> None:
        for layers, width, index, part in self._split_by_slot(piece, blocks, wire_layout, data):
            with self._take_slot(self._in_slots) as slot:
                slot.write(part)
                with self._on_stream(slot):
                    indexes, scratch, pinned = self._slot_views(slot, layers, width, index)
                    scratch.copy_(pinned, non_blocking=True)
                    slot.stream.wait_event(self._fence_event)
                    for i, words in enumerate(self.parts):
                        _view_layers(words, layers, width).index_copy_(1, indexes, scratch[:, i])

    @contextmanager
    def direct_write(self) -> Iterator[None]:
        """Return a context in which KV blocks may be written directly, without a staging slot.

        The writes wait until the steps that used the blocks before are done."""
        with self._take_slot(self._in_slots) as slot, self._on_stream(slot):
            slot.stream.wait_event(self._fence_event)
            yield

    def _split_by_slot(
        self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview
    ) -> Iterator[tuple[range, int, BlockIds, memoryview]]:
        """Split a transfer piece into groups of layers that fit into one staging slot.

        Yield for each group: its layers, the words per element, the indexes of the piece's elements in a layer (see
        `element_indices`), and the group's part of `data`."""
        size, index = self.element_indices(
            piece, blocks, wire_layout, 0
        )  # the same for values, since keys are not turned
        layer_bytes = len(self.parts) * size * len(index)
        for some, part in split_by_layers(piece, layer_bytes, self.slot_bytes, data):
            yield range(some.first_layer, some.end_layer), size // WORD_DTYPE.itemsize, index, part

    def _slot_views(
        self, slot: StagingSlot, layers: range, words_per_element: int, element_indexes: BlockIds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the element indexes on the device, and views of the slot's scratch and pinned memory.

        The views have the shape [layer, keys or values, element, word]."""
        shape = len(layers), len(self.parts), len(element_indexes), words_per_element
        count = len(layers) * len(self.parts) * len(element_indexes) * words_per_element
        indexes = torch.from_numpy(element_indexes).to(self.device)
        return indexes, slot.scratch[:count].view(shape), slot.pinned[:count].view(shape)

    @staticmethod
    def _take_slot(slots: SimpleQueue[StagingSlot]) -> AbstractContextManager[StagingSlot]:
        return take_slot(slots, "GPU buffer", SLOT_TIMEOUT_S)

    @staticmethod
    @contextmanager
    def _on_stream(slot: StagingSlot) -> Iterator[None]:
        """Return a context that queues work on the slot's stream, and waits for the work at the end.

        It also waits after an error, because another transfer may then use the slot's memory."""
        try:
            with slot.stream.activate():
                yield
        finally:
            slot.stream.record_event().wait()


def _view_layers(words: Tensor, layers: range, words_per_element: int) -> Tensor:
    """Return a view of some layers of the keys or values as [layer, element, word]."""
    return words[layers.start : layers.stop].view(len(layers), -1, words_per_element)
