"""TransferPiece: the unit of a transfer, a range of layers of a range of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emberline.kv.transfer.layout import Layout


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Layers [first_layer, end_layer) of the ticket's blocks [first_block, end_block)."""

    top: int
    bottom: int
    first: int
    last: int

    def size(self, layout: Layout) -> int:
        return (self.bottom - self.top) * (self.last - self.first) * layout.layer_bytes

    def fits(self, layers: int, blocks: int) -> bool:
        return 0 <= self.top < self.bottom <= layers and 0 <= self.first < self.last <= blocks


def cut(layers: range, blocks: range, layout: Layout, most: int) -> Iterator[Piece]:
    """Yield pieces of about `max_bytes` at most: several small layers, or parts of a large layer."""
    if not layers or not blocks:
        return
    layer_step = max(1, most // (layout.layer_bytes * len(blocks)))
    block_step = max(1, most // layout.layer_bytes)
    for layer in range(layers.start, layers.stop, layer_step):
        for block in range(blocks.start, blocks.stop, block_step):
            yield Piece(layer, min(layer + layer_step, layers.stop), block, min(block + block_step, blocks.stop))
