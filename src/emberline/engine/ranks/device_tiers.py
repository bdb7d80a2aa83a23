"""DeviceHostTier: the first KV tier of an engine whose ranks have GPUs, in main memory that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from emberline.core.engine_config import EngineConfig
from emberline.engine.engine_components import make_tiers
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.ranks.block_buffer_layout import BlockBufferLayout
from emberline.engine.ranks.boot import make_shared_host_tier
from emberline.engine.ranks.control import AllocateCaches, RankLoaded
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.kernels import ops, tuning
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack


@dataclass(frozen=True, slots=True)
class DeviceHostTier:
    tier: HostTier
    buffers: HostBuffers
    buffer_layout: BlockBufferLayout
    division: str  # name of the division of layers among stages: tiers must not mix blocks of different ones

    @staticmethod
    def make(
        config: EngineConfig, memory: GroupMemory, layout: Layout, kv_heads: int, ranks: Mapping[int, RankLoaded]
    ) -> DeviceHostTier | None:
        """Return the host tier, whose buffers are in the group's memory; None: there are no tiers.

        `kv_heads`: number of KV heads of the whole model. `ranks`: what each rank has loaded. Raises InvalidRequest if
        the tier has memory for too few buffers."""
        sizes = ({rank: getattr(each, name) for rank, each in ranks.items()} for name in ("block_bytes", "slot_bytes"))
        buffer_layout = BlockBufferLayout.plan(layout, kv_heads, *sizes)
        tier, buffers = make_shared_host_tier(config, memory, buffer_layout.block_bytes, buffer_layout.pages_per_slot)
        if tier is None or buffers is None:
            return None
        counts = (str(ranks[first].layers) for first in range(0, layout.num_ranks, layout.tp))
        return DeviceHostTier(tier, buffers, buffer_layout, f"layers-{'-'.join(counts)}")

    def make_tiers(self, config: EngineConfig, runner: GPURunner, dtype: torch.dtype) -> TierStack:
        """Return all tiers. `runner`: the leader's. The host buffers stay pinned until the tiers are closed."""
        assert runner.copier is not None
        library = ops.start_backend(threads=1).library
        sizes = self.buffer_layout.block_bytes, dtype
        tiers = make_tiers(config, runner.layout, *sizes, library, self.tier, self.buffer_layout.pages_per_slot)
        tiers.host.on_close = runner.copier.detach_host_memory
        return tiers


def describe_caches(
    num_blocks: int,
    num_slots: int,
    host: DeviceHostTier | None,
    slots: HostBuffers | None,
    draft_model: DraftModelSummary | None = None,
) -> AllocateCaches:
    """Return the message that lets the other ranks allocate their caches.

    `slots`: buffers for KV transfers, if any: see DeviceGroupRegion. `draft_model`: the leader's, if any."""
    return AllocateCaches(
        num_blocks,
        num_slots,
        tuning.list_choices(),
        host_buffers=None if host is None else host.buffers.area,
        buffer_parts=None if host is None else host.buffer_layout,
        transfer_slots=None if slots is None else slots.area,
        draft_model=draft_model,
    )
