"""LayerGroups: which layers of a model share a block table of the KV cache.

Layers that attend to all tokens keep every block of a request. Layers with an attention window need only the newest
tokens, so their blocks have tables of their own, from which blocks outside the window are freed. All tables take their
blocks from one pool, so every block has positions for the same number of layers. A group with fewer layers leaves some
of these positions unused.

This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from math import ceil

from emberline.core.plan import STATE_GROUP

MAX_GROUPS = 8  # more groups would waste less memory, but each has a block table
MAX_WASTE = 1.15  # layer positions in all groups, divided by the number of layers; above this, one group is better


@dataclass(frozen=True, slots=True)
class LayerGroups:
    block_layers: int  # number of layer positions in a block
    windows: tuple[int, ...]  # window of each group in tokens; the first is 0: it has all layers without a window
    # For each layer, its group and its index in the group's blocks. Recurrent layers have no blocks, but states: their
    # group is STATE_GROUP, and their index counts the recurrent layers.
    layer_positions: tuple[tuple[int, int], ...]

    @property
    def is_single(self) -> bool:
        """Whether all layers share one block table, and layer i is at index i of its blocks."""
        return len(self.windows) == 1 and self.block_layers == len(self.layer_positions)

    @property
    def num_layer_positions(self) -> int:
        """The number of layer positions in one block of each group, including those that no layer uses."""
        return self.block_layers * len(self.windows)

    def num_held_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks a request of this many tokens holds while it decodes one token per step."""
        blocks = ceil(num_tokens / block_size)
        return blocks + sum(min(blocks, ceil(window / block_size) + 1) for window in self.windows[1:])

    def num_prompt_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return how many blocks a request of this many tokens holds at most while its prompt is computed."""
        blocks = ceil(num_tokens / block_size)
        caps = [max_held_blocks(window, block_size, max_step_tokens) for window in self.windows[1:]]
        return blocks + sum(min(blocks, cap) for cap in caps)

    @property
    def name(self) -> str:
        """A text that identifies the group and the index of each layer; empty if `is_single`.

        It is part of every block's hash and of the layout that other engines compare with theirs."""
        if self.is_single:
            return ""
        digest = blake2b(repr(astuple(self)).encode(), digest_size=8).hexdigest()
        return f"{self.block_layers}x{'+'.join(map(str, self.windows))}-{digest}"

    def max_tokens(self, num_blocks: int, block_size: int, max_step_tokens: int) -> int:
        """Return how many tokens of one request fit into `num_blocks` blocks."""
        low, high = 0, num_blocks
        while low < high:  # the most blocks of the first group that leave room for those of the others
            middle = (low + high + 1) // 2
            if self.num_prompt_blocks(middle * block_size, block_size, max_step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * block_size

    def max_requests(self, num_blocks: int, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return how many requests of this many tokens fit into `num_blocks` blocks while one computes its prompt."""
        first = self.num_prompt_blocks(num_tokens, block_size, max_step_tokens)
        if first > num_blocks:
            return 0
        return 1 + (num_blocks - first) // self.num_held_blocks(num_tokens, block_size)

    def of_layers(self, layers: range) -> LayerGroups:
        """Return the groups reduced to these layers, for a rank that computes no other layers."""
        counts: dict[int, int] = {}
        positions = []
        for layer in layers:
            group = self.layer_positions[layer][0]
            positions.append((group, counts.get(group, 0)))
            counts[group] = counts.get(group, 0) + 1
        counts.pop(STATE_GROUP, None)
        return LayerGroups(max(counts.values(), default=0), self.windows, tuple(positions))

    @staticmethod
    def single(layers: int) -> LayerGroups:
        """Return one group of all layers, which keeps every block."""
        return LayerGroups(layers, (0,), tuple((0, layer) for layer in range(layers)))

    @staticmethod
    def with_states(layers: int, state_layers: Sequence[int]) -> LayerGroups:
        """Return one group of all layers except the recurrent layers `state_layers`, which have states, not blocks."""
        positions, counts = [], [0, 0]
        for layer in range(layers):
            has_state = layer in state_layers
            positions.append((STATE_GROUP if has_state else 0, counts[has_state]))
            counts[has_state] += 1
        return LayerGroups(counts[0], (0,), tuple(positions))

    @staticmethod
    def for_windows(windows: Sequence[int]) -> LayerGroups:
        """Return the groups of a model. `windows`: the attention window of each layer in tokens; 0: unlimited.

        All layers are in one group if all have a window, if none has one, or if several groups would waste too much
        memory."""
        layers_of = {window: [i for i, each in enumerate(windows) if each == window] for window in sorted(set(windows))}
        if 0 not in layers_of or len(layers_of) == 1:
            return LayerGroups.single(len(windows))
        full = len(layers_of[0])  # one group of all full layers, so that their table is the only one with all blocks
        sizes = [size for size in range(full, len(windows)) if _count_groups(layers_of, size) <= MAX_GROUPS]
        if not sizes:
            return LayerGroups.single(len(windows))
        size = min(sizes, key=lambda size: (size * _count_groups(layers_of, size), -size))
        if size * _count_groups(layers_of, size) > MAX_WASTE * len(windows):
            return LayerGroups.single(len(windows))
        positions = [(0, 0)] * len(windows)
        group_windows: list[int] = []
        for window, layers in layers_of.items():
            for first in range(0, len(layers), size):
                for index, layer in enumerate(layers[first : first + size]):
                    positions[layer] = len(group_windows), index
                group_windows.append(window)
        return LayerGroups(size, tuple(group_windows), tuple(positions))


def max_held_blocks(window: int, block_size: int, max_step_tokens: int) -> int:
    """Return the most blocks of one group that a request holds: those of its window and of a step's new tokens."""
    return ceil(window / block_size) + ceil(max_step_tokens / block_size) + 2


def _count_groups(layers_of: dict[int, list[int]], size: int) -> int:
    return sum(ceil(len(layers) / size) for layers in layers_of.values())
