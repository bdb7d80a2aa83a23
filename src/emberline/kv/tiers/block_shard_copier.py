"""BlockShardCopier: copies a rank's part of whole KV blocks between its CPU cache and host buffers.

The ranks that divide a model copy to and from the same buffers, each its own part of a block (kv/block_shard.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from emberline.core.plan import BlockCopy
from emberline.kv.block_shard import BlockShard, Bytes, StateShard
from emberline.kv.cache import KVCache, KVShape, StateCache
from emberline.kv.state_pages import StatePages
from emberline.kv.tiers.copier import HostBlockCopier


@dataclass(frozen=True, slots=True)
class RankShare:
    """Which parts of the whole model's blocks and states one rank has, and the sizes of the whole."""

    blocks: BlockShard
    whole: KVShape  # of the whole model's blocks
    states: StateShard | None = None  # None: the rank has no recurrent layers
    slot_bytes: int = 0  # bytes of a sequence's states in the whole model; 0: the model has no recurrent layers

    @property
    def pages_per_slot(self) -> int:
        """The number of pages that hold the whole model's states of a sequence."""
        return StatePages.for_slots(self.slot_bytes, self.whole.block_bytes, 0).per_slot


class BlockShardCopier(HostBlockCopier):
    def __init__(self, cache: KVCache, share: RankShare, states: StateCache | None = None) -> None:
        """`states`: memory of the rank's recurrent layers, if it has any."""
        super().__init__(cache)
        own, whole, num_blocks = cache.shape, share.whole, cache.num_blocks
        head_bytes = own.block_size * own.head_dim * own.dtype.itemsize
        self._share = share
        # [layer, block, KV head, byte]
        self._own = [part.reshape(own.layers, num_blocks, own.kv_heads, head_bytes) for part in self._parts]
        self._whole_dims = whole.num_tensors, whole.layers, whole.kv_heads, head_bytes
        self._pages = StatePages(num_blocks, share.pages_per_slot or 1)
        if states is not None:
            self._states = [each.flatten(2).view(torch.uint8).numpy() for each in (states.conv, states.matrices)]
        self._pieces: dict[
            int, list[tuple[int, slice, slice]]
        ] = {}  # by page, as far as known: StateShard.iter_page_pieces

    def save(self, copies: Iterable[BlockCopy]) -> None:
        """Copy this rank's parts of the blocks to their buffers, except parts that an earlier rank has and copies."""
        for copy in copies:
            if self._share.blocks.is_first or self._is_page(copy):
                for own, place in self._pair_bytes(copy):
                    place[:] = own

    def load(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for own, place in self._pair_bytes(copy):
                own[:] = place

    def _is_page(self, copy: BlockCopy) -> bool:
        return self._pages.locate(copy.block) is not None

    def _pair_bytes(self, copy: BlockCopy) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the pieces of this rank's part of a block or page: a view of the cache and one of the copy's buffer."""
        buffer = np.frombuffer(copy.buffer, np.uint8, self._share.whole.block_bytes)
        if (place := self._pages.locate(copy.block)) is not None:
            slot, page = place
            for tensor, piece, there in self._find_pieces(page):
                layer, begin = divmod(piece.start, self._states[tensor].shape[2])
                yield self._states[tensor][layer, slot, begin : begin + piece.stop - piece.start], buffer[there]
            return
        whole = self._share.blocks.slice_block(buffer.reshape(self._whole_dims), copy.group)
        for own, there in zip(self._own, whole, strict=True):
            yield own[: len(there), copy.block], there

    def _find_pieces(self, page: int) -> list[tuple[int, slice, slice]]:
        if (states := self._share.states) is None:
            return []
        if (pieces := self._pieces.get(page)) is None:
            pieces = self._pieces[page] = list(states.iter_page_pieces(page, self._share.whole.block_bytes))
        return pieces
