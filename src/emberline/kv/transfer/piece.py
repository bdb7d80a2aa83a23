"""Piece: a rectangle of layers and blocks, which travels and lands as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emberline.kv.transfer.layout import Layout


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Layers [top, bottom) of the blocks that a ticket lists at [first, last)."""

    top: int
    bottom: int
    first: int
    last: int

    def size(self, layout: Layout) -> int:
        return (self.bottom - self.top) * (self.last - self.first) * layout.layer_bytes

    def fits(self, layers: int, blocks: int) -> bool:
        return 0 <= self.top < self.bottom <= layers and 0 <= self.first < self.last <= blocks


def cut(layers: range, blocks: range, layout: Layout, most: int) -> Iterator[Piece]:
    """Layer by layer, each of at most about `most` bytes: several layers if they are small, parts of one if large."""
    if not layers or not blocks:
        return
    high = max(1, most // (layout.layer_bytes * len(blocks)))
    wide = max(1, most // layout.layer_bytes)
    for top in range(layers.start, layers.stop, high):
        for first in range(blocks.start, blocks.stop, wide):
            yield Piece(top, min(top + high, layers.stop), first, min(first + wide, blocks.stop))
