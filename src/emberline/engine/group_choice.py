"""Which layers of a served model share block tables of the KV cache, and how many tokens of a request they keep.

This module needs no torch."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig


def choose_groups(config: ModelConfig, context: int) -> LayerGroups:
    """Return the groups of a model that serves contexts of this length: a window that is not shorter is no limit."""
    return LayerGroups.for_windows([0 if window >= context else window for window in config.windows])


def choose_gpu_groups(config: ModelConfig, settings: EngineConfig, context: int) -> LayerGroups:
    """Return the groups of a model on a GPU.

    There is only one if blocks are copied to tiers or other engines, which know one block table of a request."""
    if settings.tiers.has_tiers or settings.transfer is not None:
        return LayerGroups.single(config.layers)
    return choose_groups(config, context)


def max_planned_tokens(max_batch_tokens: int, *, is_pipelined: bool) -> int:
    """Return how many tokens of a request may be planned without being known as computed.

    These are the tokens of one step, and with a pipelined runner also those of the step that is running."""
    return max_batch_tokens * (2 if is_pipelined else 1)
