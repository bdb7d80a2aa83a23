"""DeviceStateCopies: copies of recurrent states on a device, queued on the stream that is active.

States are copied between slots, between slots and pages (kv/state_pages.py), which tiers keep, and between slots and KV
blocks, which other engines read and write. A plan may reuse a slot or a block before the steps of earlier plans have
used it, because all steps and copies run in the order of their plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.core.plan import WorkItem
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.state_pages import StatePages, split_page


class DeviceStateCopies:
    def __init__(self, states: StateCache, cache: KVCache, pages_per_slot: int = 0) -> None:
        """`pages_per_slot`: pages of a slot; those that these states do not need are empty. 0: as many as they need."""
        self._states, self._cache = states, cache
        self._page_bytes = cache.shape.block_bytes
        needed = StatePages.for_slots(states.shape.slot_bytes, self._page_bytes, cache.num_blocks)
        self.pages = StatePages(cache.num_blocks, max(needed.per_slot, pages_per_slot))
        tensors = (tensor for tensor in (states.conv, states.matrices) if tensor.numel())
        # Of each layer: the bytes of all slots. The parts of a slot are in this order.
        self._parts = [layer for tensor in tensors for layer in tensor.flatten(2).view(torch.uint8)]
        self._part_sizes = [part.shape[1] for part in self._parts]

    def clear_blocks(self, work: Sequence[WorkItem]) -> None:
        """Fill blocks that held recurrent states with zeros, before requests use them for keys and values."""
        if cleared := [block for w in work for block in w.cleared_blocks]:
            for part in self._cache.tensors:
                part.view(torch.uint8)[:, cleared] = 0  # as bytes: torch cannot do this with float8

    def begin_step(self, work: Sequence[WorkItem]) -> None:
        """Queue the copies that precede the model in a step."""
        for w in work:
            if w.state is None:
                continue
            if w.state.load_from is not None:
                self._states.copy_slot(w.state.load_from, w.state.slot)
            for page, block in enumerate(w.arrived_states):
                self._write_page(w.state.slot, page, self._read_block(block))
            for page, block in enumerate(w.published_states):
                self._write_block(block, self._read_page(w.state.slot, page))

    def save_snapshots(self, work: Sequence[WorkItem]) -> None:
        """Queue the copies of states to snapshots, after the model. A snapshot has the states at the end of a step."""
        for w in work:
            if w.state is not None and w.state.save_to is not None:
                assert w.state.save_end == w.start + len(w.tokens), "the states have advanced further"
                self._states.copy_slot(w.state.slot, w.state.save_to)

    def copy_to_page(self, number: int, row: Tensor) -> None:
        """Copy the bytes `row` to the page with this number."""
        place = self.pages.locate(number)
        assert place is not None
        self._write_page(*place, row)

    def copy_from_page(self, number: int, row: Tensor) -> None:
        """Copy the page with this number to the bytes `row`."""
        place = self.pages.locate(number)
        assert place is not None
        self._copy_page(*place, row)

    def _read_page(self, slot: int, page: int) -> Tensor:
        row = torch.zeros(self._page_bytes, dtype=torch.uint8, device=self._cache.keys.device)
        self._copy_page(slot, page, row)
        return row

    def _copy_page(self, slot: int, page: int, row: Tensor) -> None:
        for index, part, place in split_page(page, self._page_bytes, self._part_sizes):
            row[place].copy_(self._parts[index][slot, part])

    def _write_page(self, slot: int, page: int, row: Tensor) -> None:
        for index, part, place in split_page(page, self._page_bytes, self._part_sizes):
            self._parts[index][slot, part].copy_(row[place])

    def _read_block(self, block: int) -> Tensor:
        return torch.cat([part[:, block].reshape(-1).view(torch.uint8) for part in self._cache.tensors])

    def _write_block(self, block: int, row: Tensor) -> None:
        for part, values in zip(self._cache.tensors, row.chunk(len(self._cache.tensors)), strict=True):
            part[:, block].copy_(values.view(part.dtype).view(part[:, block].shape))
