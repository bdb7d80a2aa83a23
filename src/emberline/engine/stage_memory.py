"""plan_stage_memory: how a rank's part of a model uses a GPU's memory. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.engine import memory
from emberline.engine.group_choice import choose_groups
from emberline.engine.memory import NO_DRAFT_MODEL, DraftMemory
from emberline.engine.memory_plan import MemoryPlan
from emberline.models.config import ModelConfig
from emberline.models.stage import Stage
from emberline.models.weight_formats import QuantisedSize


def plan_stage_memory(
    config: ModelConfig,
    stage: Stage | None,
    settings: EngineConfig,
    context: int,
    device_memory: tuple[int, int],
    dtype: str,
    *,
    packed: bool,
    quantised: Sequence[QuantisedSize],
    draft: DraftMemory = NO_DRAFT_MODEL,
    kernels: str = "",
) -> tuple[MemoryPlan, ModelConfig]:
    """Return the plan of a stage of a model, and the config of the layers that the stage has.

    `config`: of all layers, with the sizes of the rank's shard. `stage`: of a pipeline; None: all layers.
    `device_memory`: bytes of the GPU's memory, and how many of them other processes use. `kernels`: those of the GPU,
    hopper or portable; empty: not known. Raises ModelError if the part does not fit, InvalidRequest if the stage cannot
    be computed."""
    groups = choose_groups(config.windows, context, config.parts.attention.state_layers)
    own = config
    if stage is not None:
        own, groups = stage.select_config(config), groups.of_layers(stage.layers)
    if stage is not None and not groups.block_layers:
        message = f"stage {stage.index} of {stage.count} has only recurrent layers, and on a GPU it needs another"
        raise InvalidRequest(message, param="pp", hint="lower --pp")
    plan = memory.plan_engine_memory(
        own,
        settings.with_settings(max_context=context),
        device_memory[0],
        dtype,
        packed=packed,
        quantised=quantised,
        draft=draft,
        other_bytes=device_memory[1],
        groups=groups,
        kernels=kernels,
    )
    return plan, own
