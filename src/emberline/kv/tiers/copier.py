"""HostBlockCopier: copies blocks between the tensors of a CPU cache and host buffers.

A buffer holds one block or one page of recurrent states. A block is the keys of all layers, then the values if the
cache stores them separately.
Of the tier modules, only this one imports torch. It copies with numpy, which was faster than torch for these copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.core.plan import BlockCopy
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.state_pages import StatePages, split_page

Bytes = NDArray[np.uint8]


class HostBlockCopier:
    def __init__(self, cache: KVCache, states: StateCache | None = None) -> None:
        """`states`: memory of recurrent layers, whose pages are copied too."""
        self._shape = cache.shape
        parts = (part.view(torch.uint8).flatten(2) for part in cache.tensors)
        self._parts: list[Bytes] = [part.numpy() for part in parts]  # [layer, block, byte]
        self._states: list[Bytes] = []  # [layer, slot, byte]
        self._pages = StatePages(cache.num_blocks, 1)
        if states is not None:
            self._pages = StatePages.for_slots(states.shape.slot_bytes, self._shape.block_bytes, cache.num_blocks)
            tensors = (tensor for tensor in (states.conv, states.matrices) if tensor.numel())
            self._states = [tensor.flatten(2).view(torch.uint8).numpy() for tensor in tensors]

    def save(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            if (place := self._pages.locate(copy.block)) is not None:
                self._read_page(*place, np.frombuffer(copy.buffer, np.uint8))
                continue
            for part, buffer in zip(self._parts, self._view_buffer_as_array(copy.buffer), strict=True):
                buffer[:] = part[:, copy.block]

    def load(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            if (place := self._pages.locate(copy.block)) is not None:
                self._write_page(*place, np.frombuffer(copy.buffer, np.uint8))
                continue
            for part, buffer in zip(self._parts, self._view_buffer_as_array(copy.buffer), strict=True):
                part[:, copy.block] = buffer

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks that held states with zeros, because kernels also read positions that are not written yet."""
        for part in self._parts:
            part[:, list(blocks)] = 0

    def read_states(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy the states that are in these blocks to a slot."""
        for page, block in enumerate(blocks):
            self._write_page(slot, page, np.concatenate([part[:, block].ravel() for part in self._parts]))

    def write_states(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy the states of a slot to these blocks."""
        buffer = memoryview(bytearray(self._shape.block_bytes))
        for page, block in enumerate(blocks):
            self._read_page(slot, page, np.frombuffer(buffer, np.uint8))
            self.load([BlockCopy(block, b"", buffer)])

    def _read_page(self, slot: int, page: int, buffer: Bytes) -> None:
        for states, place in self._page_parts(slot, page):
            buffer[place] = states

    def _write_page(self, slot: int, page: int, buffer: Bytes) -> None:
        for states, place in self._page_parts(slot, page):
            states[:] = buffer[place]

    def _page_parts(self, slot: int, page: int) -> Iterator[tuple[Bytes, slice]]:
        """Yield the pieces of memory that make up a page of a slot, each with its range of bytes in a buffer."""
        parts = [layer for states in self._states for layer in states[:, slot]]
        for index, part, place in split_page(page, self._shape.block_bytes, [len(part) for part in parts]):
            yield parts[index][part], place

    def _view_buffer_as_array(self, buffer: memoryview) -> NDArray[np.uint8]:
        shape = self._shape
        return np.frombuffer(buffer, np.uint8, shape.block_bytes).reshape(shape.num_tensors, shape.layers, -1)
