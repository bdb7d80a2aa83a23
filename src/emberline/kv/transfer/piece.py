"""TransferPiece: the unit of a KV transfer, a range of layers of a range of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emberline.kv.transfer.layout import KVLayout

MAX_PIECE_BYTES = 4 << 20  # large enough that fixed costs are small, small enough for the last-level CPU cache


@dataclass(frozen=True, slots=True, order=True)
class TransferPiece:
    """The layers [first_layer, end_layer) of the ticket's blocks [first_block, end_block)."""

    first_layer: int
    end_layer: int
    first_block: int
    end_block: int

    def num_bytes(self, layout: KVLayout) -> int:
        return (self.end_layer - self.first_layer) * (self.end_block - self.first_block) * layout.layer_bytes

    def is_within(self, layers: int, blocks: int) -> bool:
        return 0 <= self.first_layer < self.end_layer <= layers and 0 <= self.first_block < self.end_block <= blocks


def cut_into_pieces(layers: range, blocks: range, layout: KVLayout, max_bytes: int) -> Iterator[TransferPiece]:
    """Yield pieces of about `max_bytes`. A piece holds several small layers, or part of a large layer."""
    if not layers or not blocks:
        return
    layer_step = max(1, max_bytes // (layout.layer_bytes * len(blocks)))
    block_step = max(1, max_bytes // layout.layer_bytes)
    for layer in range(layers.start, layers.stop, layer_step):
        for block in range(blocks.start, blocks.stop, block_step):
            yield TransferPiece(
                layer, min(layer + layer_step, layers.stop), block, min(block + block_step, blocks.stop)
            )
