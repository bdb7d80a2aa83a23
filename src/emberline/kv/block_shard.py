"""BlockShard, StateShard: which bytes of whole KV blocks and of whole recurrent states one rank has.

A whole block is a block as an engine on one rank stores it: the keys of all layers of a layer group, then the values
if they are stored separately. Each layer has the bytes of all KV heads in order. A rank's block has only the layers of
its pipeline stage, and of those only the KV heads of its shard. Tiers and other engines keep whole blocks, so they need
not know how ranks divide a model.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberline.core.plan import STATE_GROUP
from emberline.kv.layer_groups import LayerGroups

if TYPE_CHECKING:
    from emberline.kv.cache import StateShape

Bytes = NDArray[np.uint8]
NUMBER_BYTES = 4  # bytes of a float32 value of a recurrent state


@dataclass(frozen=True, slots=True)
class BlockShard:
    # By group of layers: the indexes that the rank's layers have in a whole block. In the rank's own blocks, the same
    # layers have the indexes from 0 on.
    layers: tuple[range, ...]
    heads: range  # KV heads
    is_first: bool = True  # False: an earlier rank has the same heads of the same layers, and only that rank saves them

    @staticmethod
    def of_rank(groups: LayerGroups, layers: range, heads: range, *, is_first: bool = True) -> BlockShard:
        """Return the part of a block that a rank has, for its `layers` and `heads`.

        `groups`: the layer groups of the whole model. `is_first`: False if an earlier rank has the same heads of the
        same layers, and saves them."""
        indexes = [sorted(i for g, i in groups.layer_positions[layers.start : layers.stop] if g == group)
                   for group in range(len(groups.windows))]  # fmt: skip
        return BlockShard(tuple(map(_to_range, indexes)), heads, is_first)

    def slice_block(self, whole: Bytes, group: int) -> Bytes:
        """Return a view of this rank's part of `whole`, a whole block of a layer group.

        Both arrays are [keys or values, layer, KV head, byte]."""
        layers = self.layers[group]
        return whole[:, layers.start : layers.stop, self.heads.start : self.heads.stop]


@dataclass(frozen=True, slots=True)
class StateShard:
    """A rank's part of the recurrent states of a sequence, as a list of pieces.

    A piece is contiguous in the rank's own slot and in a whole slot, which holds the states of all layers and heads. A
    whole slot has the convolution inputs of all recurrent layers, then the state matrices of all recurrent layers. The
    channels of a convolution are those of queries, keys and values, each in the order of the heads."""

    # For each tensor of the rank's StateCache (inputs of convolutions, matrices), the pieces of a slot in order: offset
    # in a whole slot and length, both in bytes.
    pieces: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of_rank(whole: StateShape, layers: range, rank: int, num_ranks: int) -> StateShard:
        """Return the part of a rank. `layers`: the numbers of its layers among all recurrent layers.

        `rank`: its number among the `num_ranks` ranks that divide the heads."""
        values = whole.heads * whole.value_dim
        keys = (whole.conv_channels - values) // 2
        sections = [(0, keys), (keys, keys), (2 * keys, values)]  # start and width, in channels
        row, conv = whole.conv_channels, whole.conv_rows * whole.conv_channels
        channels = [
            (layer * conv + i * row + start + rank * (width // num_ranks), width // num_ranks)
            for layer in layers
            for i in range(whole.conv_rows)
            for start, width in sections
        ]
        matrix, base = whole.heads * whole.key_dim * whole.value_dim, whole.layers * conv
        own = matrix // num_ranks
        matrices = [(base + layer * matrix + rank * own, own) for layer in layers]
        return StateShard(
            tuple(tuple((at * NUMBER_BYTES, n * NUMBER_BYTES) for at, n in p) for p in (channels, matrices))
        )

    def iter_page_pieces(self, page: int, page_bytes: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield this rank's pieces in a page of a whole slot: index of a tensor, bytes in its slot, bytes in the page.

        The bytes of a tensor's slot are those of all its layers in order."""
        first = page * page_bytes
        for tensor, pieces in enumerate(self.pieces):
            own = 0
            for at, size in pieces:
                low, high = max(first, at), min(first + page_bytes, at + size)
                if low < high:
                    yield tensor, slice(own + low - at, own + high - at), slice(low - first, high - first)
                own += size


def rank_state_layers(groups: LayerGroups, layers: range) -> range:
    """Return the numbers that a rank's recurrent layers have among all recurrent layers of the model.

    `groups`: the layer groups of the whole model. `layers`: all layers of the rank."""
    return _to_range(
        sorted(i for group, i in groups.layer_positions[layers.start : layers.stop] if group == STATE_GROUP)
    )


def _to_range(indexes: Sequence[int]) -> range:
    """Return sorted indexes as a range. They must be consecutive, as those of adjacent layers in a group are."""
    found = range(indexes[0], indexes[-1] + 1) if indexes else range(0)
    assert len(found) == len(indexes), f"layers of a stage are apart in their group: {indexes}"
    return found
