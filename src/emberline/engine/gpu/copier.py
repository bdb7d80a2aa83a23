"""DeviceCopier: copies KV blocks between the cache on a device and buffers in main memory.

A buffer has the format of kv/tiers/copier.py. On the device, a block has separate parts for the keys and the values
of each layer. Kernels gather several blocks into scratch memory, or scatter them from it, on the stream of the
steps; pages of recurrent states are copied there too. Between scratch and main memory the blocks are copied on a second
stream, while the model runs:

    save    step stream: gather |--> out stream: scratch to buffers
    load    in stream: buffers to scratch |--> step stream: scatter

An event at the end of each save or load shows that its scratch memory and its buffers may be reused. The device waits
for this event before it overwrites the scratch memory; the host does not wait. If the driver cannot pin the buffers,
blocks also pass through an extra pinned buffer, and the host waits and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from emberline.core.plan import BlockCopy
from emberline.engine import memory
from emberline.engine.gpu.device import Device, DeviceEvent, DeviceStream
from emberline.engine.gpu.staging import ALIGN_BYTES, InputStaging
from emberline.engine.gpu.state_copies import DeviceStateCopies
from emberline.kv.cache import KVCache

WORD_DTYPE = torch.int64  # unit in which kernels copy, independent of the cache's dtype


@dataclass(slots=True)
class PendingCopy:
    """A copy of a few KV blocks that was launched and may still be running."""

    event: DeviceEvent  # passed when the device is done
    host_copies: list[tuple[Tensor, Tensor]]  # copies that the host makes after that: (target, source)

    def finish(self) -> None:
        self.event.wait()
        with torch.inference_mode():
            for to, source in self.host_copies:
                to.copy_(source)
        self.host_copies.clear()


class ScratchBuffer:
    """Scratch memory for a few KV blocks, in the format of the buffers: keys of all layers, then values if any."""

    def __init__(self, blocks: int, parts: int, layers: int, words: int, device: torch.device) -> None:
        self.memory = torch.zeros(blocks, parts, layers, words, dtype=WORD_DTYPE, device=device)
        self.rows = self.memory.flatten(1).view(torch.uint8)
        self.pinned: Tensor | None = None  # the same in pinned main memory, if the buffers cannot be pinned
        self.last_copy: PendingCopy | None = None


class DeviceCopier:
    def __init__(
        self, cache: KVCache, device: Device, states: DeviceStateCopies | None = None, dp_rank: int = 0
    ) -> None:
        """`states`: copies pages of recurrent states; None: the model has none.

        `dp_rank`: with data-parallel attention, the number of the rank that this cache belongs to; copies of blocks
        in the caches of other ranks are ignored."""
        self._device, self._dp_rank = device, dp_rank
        self._num_blocks, self._states = cache.num_blocks, states
        self._size = cache.shape.block_bytes
        self._blocks_per_piece = at_once = memory.blocks_per_scratch_buffer(self._size)
        parts = (part.flatten(2).view(WORD_DTYPE) for part in cache.tensors)
        self._parts = [part.transpose(0, 1) for part in parts]  # keys, values if any: [block, layer, word]
        _, layers, words = self._parts[0].shape
        self._pieces = [
            ScratchBuffer(at_once, len(self._parts), layers, words, device.torch_device)
            for _ in range(memory.COPY_PIECES)
        ]
        self._next_out, self._next_in = cycle(self._pieces[::2]), cycle(self._pieces[1::2])
        self._step_stream, self._out_stream, self._in_stream = (
            device.step_stream,
            device.new_stream(),
            device.new_stream(),
        )
        self._block_ids = InputStaging(2 * (8 * cache.num_blocks + ALIGN_BYTES), device)
        self._area: Tensor | None = None
        self._part_offset, self._saves_blocks = 0, True

    def attach_host_memory(self, host_memory: memoryview, part_offset: int = 0, *, saves_blocks: bool = True) -> None:
        """Set the main memory that contains all buffers, and pin it until `detach_host_memory` if possible.

        `part_offset`: where this rank's part of a block begins in a buffer. `saves_blocks`: False if another rank saves
        the same part."""
        assert self._area is None
        self._part_offset, self._saves_blocks = part_offset, saves_blocks
        self._area = torch.frombuffer(host_memory, dtype=torch.uint8)
        if not self._device.pin(self._area):
            for piece in self._pieces:
                piece.pinned = self._device.allocate_pinned(piece.rows.numel()).view_as(piece.rows)

    def detach_host_memory(self) -> None:
        """Wait for all copies, then unpin the main memory of the buffers, so that it can be freed."""
        assert self._area is not None
        for piece in self._pieces:
            if piece.last_copy is not None:
                piece.last_copy.event.wait()
        if self._pieces[0].pinned is None:
            self._device.unpin(self._area)
        self._area = None

    def launch(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> Callable[[], None]:
        """Queue the saves, then the loads, of blocks of this cache. They run in order with the steps of the model.

        Return a function that waits until all copies are done and their buffers may be used again."""
        assert self._area is not None
        saves, loads = ([each for each in copies if each.dp_rank == self._dp_rank] for copies in (saves, loads))
        # A block may be given to another request while a plan is made: only its last load counts.
        loads = list({copy.block: copy for copy in loads}.values())
        saves = saves if self._saves_blocks else []
        (saves, saved_pages), (loads, loaded_pages) = self._separate_pages(saves), self._separate_pages(loads)
        staged = self._block_ids.new_inputs()
        saved, loaded = (staged.put(np.array([c.block for c in copies], np.int64)) for copies in (saves, loads))
        staged.send()
        pending = [self._save_blocks(*part) for part in self._split_to_fit_scratch(saves, saved)]
        pending += [self._save_blocks(*part) for part in self._split_to_fit_scratch(saved_pages)]
        pending += [self._load_blocks(*part) for part in self._split_to_fit_scratch(loads, loaded)]
        pending += [self._load_blocks(*part) for part in self._split_to_fit_scratch(loaded_pages)]

        def finish() -> None:
            for copy in pending:
                copy.finish()

        return finish

    def drop_device_addresses(self) -> None:
        self._block_ids.forget_views()

    def device_buffers(self) -> list[Tensor]:
        return [self._block_ids.device, *(piece.memory for piece in self._pieces)]

    def _separate_pages(self, copies: Sequence[BlockCopy]) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Split copies into those of KV blocks and those of pages of recurrent states.

        The second list is empty on a rank without recurrent layers."""
        blocks = [copy for copy in copies if copy.block < self._num_blocks]
        return blocks, [] if self._states is None else [copy for copy in copies if copy.block >= self._num_blocks]

    def _split_to_fit_scratch(
        self, copies: Sequence[BlockCopy], block_ids: Tensor | None = None
    ) -> Iterator[tuple[Sequence[BlockCopy], Tensor | None]]:
        for i in range(0, len(copies), self._blocks_per_piece):
            end = i + self._blocks_per_piece
            yield copies[i:end], None if block_ids is None else block_ids[i:end]

    def _save_blocks(self, copies: Sequence[BlockCopy], block_ids: Tensor | None) -> PendingCopy:
        """Queue copies from the device to host buffers.

        `block_ids`: the ids of the KV blocks, on the device; None: `copies` are pages of recurrent states."""
        piece = self._wait_until_free(next(self._next_out), self._step_stream)
        if block_ids is None:
            assert self._states is not None
            for copy, row in zip(copies, piece.rows[: len(copies)], strict=True):
                self._states.copy_from_page(copy.block, row)
        else:
            for at, part in enumerate(self._parts):
                torch.index_select(part, 0, block_ids, out=piece.memory[: len(copies), at])
        self._out_stream.wait_event(self._step_stream.record_event())
        with self._out_stream.activate():
            buffers, host_copies = [self._buffer_as_tensor(copy) for copy in copies], []
            if piece.pinned is not None:
                piece.pinned[: len(copies)].copy_(piece.rows[: len(copies)], non_blocking=True)
                host_copies = list(zip(buffers, piece.pinned[: len(copies)], strict=True))
            else:
                for buffer, row in zip(buffers, piece.rows[: len(copies)], strict=True):
                    buffer.copy_(row, non_blocking=True)
            piece.last_copy = PendingCopy(self._out_stream.record_event(), host_copies)
        return piece.last_copy

    def _load_blocks(self, copies: Sequence[BlockCopy], block_ids: Tensor | None) -> PendingCopy:
        piece = self._wait_until_free(next(self._next_in), self._in_stream)
        buffers = [self._buffer_as_tensor(copy) for copy in copies]
        if piece.pinned is not None:
            for row, buffer in zip(piece.pinned[: len(copies)], buffers, strict=True):
                row.copy_(buffer)
            buffers = list(piece.pinned[: len(copies)])
        with self._in_stream.activate():
            for row, buffer in zip(piece.rows[: len(copies)], buffers, strict=True):
                row.copy_(buffer, non_blocking=True)
            self._step_stream.wait_event(self._in_stream.record_event())
        if block_ids is None:
            assert self._states is not None
            for copy, row in zip(copies, piece.rows[: len(copies)], strict=True):
                self._states.copy_to_page(copy.block, row)
        else:
            for at, part in enumerate(self._parts):
                part.index_copy_(0, block_ids, piece.memory[: len(copies), at])
        piece.last_copy = PendingCopy(self._step_stream.record_event(), [])
        return piece.last_copy

    @staticmethod
    def _wait_until_free(scratch: ScratchBuffer, stream: DeviceStream) -> ScratchBuffer:
        """Make the stream wait until the last copy from or to this scratch memory is done; return the memory."""
        if scratch.last_copy is not None:
            if scratch.pinned is not None:
                scratch.last_copy.finish()
            stream.wait_event(scratch.last_copy.event)
        return scratch

    def _buffer_as_tensor(self, copy: BlockCopy) -> Tensor:
        return torch.frombuffer(copy.buffer, dtype=torch.uint8, count=self._size, offset=self._part_offset)
