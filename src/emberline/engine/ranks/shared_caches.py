"""SharedCaches: the KV caches of all ranks in the group's memory, where the leader exchanges blocks with other engines.

This module does not import torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.layout import Layout
from emberline.kv.block_shard import BlockShard
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.transfer.group_region import GroupRegion, StepCounter
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.region import HostRegion
from emberline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SharedCaches:
    layout: KVLayout  # of whole blocks
    parts: list[BlockShard]  # by rank
    regions: list[HostRegion]  # by rank: its cache
    offsets: dict[int, int]  # by rank: where its cache is in the group's memory

    @staticmethod
    def allocate(
        memory: GroupMemory, ranks: Layout, model: ModelConfig, groups: LayerGroups, whole: KVLayout, num_blocks: int
    ) -> SharedCaches:
        """Add memory for the caches of all ranks.

        `model`: not divided among ranks. `whole`: the layout of a block with all of its layers and heads."""
        regions, offsets = [], {}
        parts = list_block_shards(ranks, model, groups)
        for rank, part in enumerate(parts):
            layers = ranks.stage(rank, model).layers
            own = replace(whole, layers=groups.of_layers(layers).block_layers, heads=len(part.heads))
            offsets[rank] = memory.extend(_cache_bytes(own, num_blocks))
            regions.append(map_cache(memory, offsets[rank], own, num_blocks))
        return SharedCaches(whole, parts, regions, offsets)

    def make_region(self, groups: LayerGroups, steps: StepCounter) -> GroupRegion:
        """Return a region with the blocks of all ranks. `groups`: of the layers of the whole model."""
        parts = list(zip(self.parts, self.regions, strict=True))
        if (unused := allocate_unused_layers(groups, self.layout, self.regions[0].blocks)) is not None:
            parts.append(unused)
        return GroupRegion(self.layout, parts, steps)


def list_block_shards(ranks: Layout, model: ModelConfig, groups: LayerGroups) -> list[BlockShard]:
    """Return the part of a KV block that each rank has.

    `model`: config of the undivided model. `groups`: the groups of its layers."""
    parts = []
    for rank in range(ranks.num_ranks):
        layers, shard = ranks.stage(rank, model).layers, ranks.shard(rank)
        is_first = shard.is_first_of(model.kv_heads)
        parts.append(BlockShard.of_rank(groups, layers, shard.divide(model.kv_heads), is_first=is_first))
    return parts


def allocate_unused_layers(
    groups: LayerGroups, whole: KVLayout, num_blocks: int
) -> tuple[BlockShard, HostRegion] | None:
    """Return the layer positions in a block that no layer uses, and memory for these positions of all blocks.

    Return None if all positions are used. Some are not in groups with fewer layers than a block has positions. An
    engine on one rank has memory for them too. Transfers send their bytes, and checksums include them."""
    if (unused := _find_unused_layers(groups, whole.heads)) is None:
        return None
    layout = replace(whole, layers=max(map(len, unused.layers)))
    size = layout.layers * num_blocks * layout.plane_bytes
    return unused, HostRegion(layout, [memoryview(mmap.mmap(-1, size)) for _ in range(layout.parts)])


def map_cache(memory: GroupMemory, offset: int, layout: KVLayout, num_blocks: int) -> HostRegion:
    """Return the cache of a rank at this place in the group's memory. `layout`: of the rank's part of a block."""
    size = _part_bytes(layout, num_blocks)
    view = memoryview(memory.map(offset, _cache_bytes(layout, num_blocks)))
    used = layout.layers * num_blocks * layout.plane_bytes
    return HostRegion(layout, [view[size * i : size * i + used] for i in range(layout.parts)])


def _cache_bytes(layout: KVLayout, num_blocks: int) -> int:
    return layout.parts * _part_bytes(layout, num_blocks)


def _part_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Return the bytes of the keys, or of the values, rounded up to whole pages."""
    return -(-layout.layers * num_blocks * layout.plane_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _find_unused_layers(groups: LayerGroups, num_heads: int) -> BlockShard | None:
    """Return the layer positions in a block that no layer uses; None: all are used.

    Some are not in groups with fewer layers than a block has positions."""
    counts = [sum(group == each for each, _ in groups.layer_positions) for group in range(len(groups.windows))]
    if all(count == groups.block_layers for count in counts):
        return None
    return BlockShard(tuple(range(count, groups.block_layers) for count in counts), range(num_heads))
