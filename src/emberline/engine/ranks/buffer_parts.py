"""BufferParts: where each rank with a GPU has its part of a KV block in a host buffer.

The parts lie one after the other, each as in the rank's own cache. So a GPU copies a part of a block at once; in a
whole block (kv/block_part.py) its layers and heads are apart. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from emberline.engine.ranks.layout import Layout
from emberline.kv.state_pages import StatePages


class BufferParts(msgspec.Struct, frozen=True):
    offsets: dict[int, int]  # by rank, in bytes
    block_bytes: int  # of all parts
    pages_per_slot: int  # pages of the recurrent states of a sequence; a rank's part of a page has its part of them

    @staticmethod
    def plan(
        layout: Layout, kv_heads: int, block_bytes: Mapping[int, int], slot_bytes: Mapping[int, int]
    ) -> BufferParts:
        """Return the places of the parts. Ranks that have the same KV heads of the same layers have the same place.

        `kv_heads`: of the whole model. `block_bytes`, `slot_bytes`: by rank, of its parts of a block and of states."""
        has_states = any(slot_bytes.values())  # which every rank has others of
        offsets: dict[int, int] = {}
        end = 0
        for rank in range(layout.num_ranks):
            is_copy = rank % layout.tp > 0 and not has_states and not layout.shard(rank).is_first_of(kv_heads)
            offsets[rank] = offsets[rank - 1] if is_copy else end
            end = max(end, offsets[rank] + block_bytes[rank])
        pages = max(StatePages.cut(slot_bytes[rank], block_bytes[rank], 0).per_slot for rank in offsets)
        return BufferParts(offsets, end, pages)

    def is_first(self, rank: int) -> bool:
        """Return whether no earlier rank has the same place; only this rank saves the part."""
        return min(each for each, offset in self.offsets.items() if offset == self.offsets[rank]) == rank
