"""BlockBufferLayout: where each rank with a GPU has its part of a KV block in a host buffer.

The parts lie one after the other, each with the layout of the rank's own cache. So a GPU copies its part of a block at
once. In the layout of an engine on one rank (kv/block_shard.py), the layers and heads of a part would not be adjacent.
With data-parallel attention, each rank has whole blocks of its own requests, and a buffer holds one such block. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from emberline.engine.ranks.layout import Layout
from emberline.kv.state_pages import StatePages


class BlockBufferLayout(msgspec.Struct, frozen=True):
    offsets: dict[int, int]  # by rank, in bytes
    block_bytes: int  # of all parts
    # Pages, of the size of a block, that hold the recurrent states of a sequence. A rank's part of a page holds states
    # of the rank.
    pages_per_slot: int
    has_whole_blocks: bool = False  # whether each rank has whole blocks, of requests of its own

    @staticmethod
    def plan(
        layout: Layout, kv_heads: int, block_bytes: Mapping[int, int], slot_bytes: Mapping[int, int]
    ) -> BlockBufferLayout:
        """Return where the parts lie. Ranks that have the same KV heads of the same layers have the same offset.

        `kv_heads`: number of KV heads of the whole model. `block_bytes`, `slot_bytes`: by rank, the size of its part of
        a block and of the recurrent states of a sequence."""
        pages = max(
            StatePages.for_slots(slot_bytes[rank], block_bytes[rank], 0).per_slot for rank in range(layout.num_ranks)
        )
        if layout.dp_attention:
            offsets = dict.fromkeys(range(layout.num_ranks), 0)
            return BlockBufferLayout(offsets, block_bytes[0], pages, has_whole_blocks=True)
        has_states = any(slot_bytes.values())  # no two ranks have the same states
        offsets = {}
        end = 0
        for rank in range(layout.num_ranks):
            is_copy = rank % layout.tp > 0 and not has_states and not layout.shard(rank).is_first_of(kv_heads)
            offsets[rank] = offsets[rank - 1] if is_copy else end
            end = max(end, offsets[rank] + block_bytes[rank])
        return BlockBufferLayout(offsets, end, pages)

    def saves_blocks(self, rank: int) -> bool:
        """Return whether a rank saves blocks: of ranks with the same part of each block, only the first one does."""
        first = min(each for each, offset in self.offsets.items() if offset == self.offsets[rank])
        return self.has_whole_blocks or first == rank
