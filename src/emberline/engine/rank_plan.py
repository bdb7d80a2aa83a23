"""plan_ranks: how each rank of an engine would use the memory of its GPU, before anything is loaded.

Each rank's part is planned by the functions that the rank itself uses. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.engine_config import EngineConfig
from emberline.engine import memory
from emberline.engine.draft_estimate import estimate_draft_memory
from emberline.engine.memory import NO_DRAFT_MODEL, DraftMemory
from emberline.engine.memory_plan import MemoryPlan
from emberline.engine.quantised_estimate import estimate_rank_quantised_sizes
from emberline.engine.ranks.layout import Layout
from emberline.engine.stage_memory import plan_stage_memory
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The ranks whose memory plans are equal, and that plan."""

    ranks: tuple[int, ...]
    plan: MemoryPlan  # of one of these ranks

    def describe_ranks(self) -> str:
        """Return the ranks' numbers, such as `ranks 0 to 3`."""
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        is_range = last - first + 1 == len(self.ranks)
        return f"ranks {first} to {last}" if is_range else f"ranks {', '.join(map(str, self.ranks))}"


def plan_ranks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    settings: EngineConfig,
    gpu_bytes: int,
    dtype: str,
    *,
    kernels: str = "",
) -> list[RankPlan]:
    """Return the plans of the ranks that --tp, --pp and --ep ask for, each on a GPU with `gpu_bytes` of memory.

    All ranks have equally many KV blocks and slots for recurrent states, as many as fit on the rank with least room.
    `kernels`: those of the GPU, hopper or portable; empty: not known. Raises InvalidRequest if the model cannot be
    divided among these ranks, and ModelError if a rank's part does not fit."""
    layout = Layout.of_gpus(settings.parallel)
    draft = estimate_draft_memory(settings, checkpoint, config, dtype)
    args = checkpoint, config, settings, gpu_bytes, dtype, kernels, layout
    plans = [_plan_rank(*args, r, draft if r == layout.leader else NO_DRAFT_MODEL) for r in range(layout.num_ranks)]
    tokens = min(plan.kv_tokens for plan in plans)
    slots = min((plan.state_slots for plan in plans if plan.state_slots), default=0)
    by_plan: dict[MemoryPlan, list[int]] = {}
    for rank, plan in enumerate(plans):
        kv_bytes, own_slots = plan.kv_bytes // plan.kv_tokens * tokens, min(plan.state_slots, slots)
        equal = replace(plan, kv_tokens=tokens, kv_bytes=kv_bytes, state_slots=own_slots)
        by_plan.setdefault(equal, []).append(rank)
    return [RankPlan(tuple(ranks), plan) for plan, ranks in by_plan.items()]


def _plan_rank(
    checkpoint: Checkpoint,
    config: ModelConfig,
    settings: EngineConfig,
    gpu_bytes: int,
    dtype: str,
    kernels: str,
    layout: Layout,
    rank: int,
    draft: DraftMemory,
) -> MemoryPlan:
    shard, stage = layout.shard(rank), layout.stage(rank, config)
    context = memory.choose_max_context(config, settings)
    return plan_stage_memory(
        *(shard.shard_config(config), stage, settings, context, (gpu_bytes, 0), dtype),
        packed=memory.uses_packed_weights(checkpoint, settings, dtype, config),
        quantised=estimate_rank_quantised_sizes(checkpoint, config, settings, dtype, shard, stage),
        kernels=kernels,
        draft=draft,
    )[0]
