"""estimate_quantised_sizes: which matrices of a checkpoint a GPU keeps quantised, before anything is loaded.

This module needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from emberline.core.engine_config import EngineConfig
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.quantised_tensors import list_quantised_sizes, list_selected_quantised_sizes, select_model_tensors
from emberline.models.shard import Shard
from emberline.models.stage import Stage
from emberline.models.tensor_sharding import shard_checkpoint
from emberline.models.weight_dtype import stored_weight_format
from emberline.models.weight_formats import QuantisedSize, list_online_sizes


def estimate_quantised_sizes(
    checkpoint: Checkpoint, model: ModelConfig, settings: EngineConfig, dtype: str
) -> list[QuantisedSize]:
    """Return the sizes of matrices that are quantised in the files, or that the settings quantise at load.

    A matrix whose parts have different formats is dequantised when it is loaded, but counted here."""
    if dtype != "bfloat16" or settings.gpu.exact or settings.gpu.weights == "plain":
        return []
    outline = outline_of(model)
    if stored := list_quantised_sizes(checkpoint, has_query_gate=outline.has_query_gate):
        return stored
    return list_online_sizes(outline, settings.gpu.online_format) if settings.gpu.online_format else []


def estimate_rank_quantised_sizes(
    checkpoint: Checkpoint, model: ModelConfig, settings: EngineConfig, dtype: str, shard: Shard, stage: Stage
) -> list[QuantisedSize]:
    """Return what `estimate_quantised_sizes` returns, for the part of one rank. `model`: config of the whole model."""
    if not (whole := estimate_quantised_sizes(checkpoint, model, settings, dtype)):
        return whole
    outline = outline_of(stage.select_config(shard.shard_config(model)))
    tensors = shard_checkpoint(select_model_tensors(checkpoint), shard)
    if foreign := stage.foreign_tensors(model):
        names = [name for name in tensors.tensors if not re.fullmatch(foreign, name)]
        tensors = replace(tensors, tensors={name: tensors.tensors[name] for name in names})
    if stored := list_selected_quantised_sizes(tensors, has_query_gate=outline.has_query_gate):
        return stored
    return list_online_sizes(outline, settings.gpu.online_format) if settings.gpu.online_format else []


def describe_quantised_sizes(checkpoint: Checkpoint, settings: EngineConfig, quantised: Sequence[QuantisedSize]) -> str:
    """Return the format and size of the quantised matrices as text that starts with a comma; empty: there are none."""
    if not quantised:
        return ""
    form = stored_weight_format(checkpoint) if list_quantised_sizes(checkpoint) else settings.gpu.online_format
    return f", {form} {sum(size.num_bytes for size in quantised) / 1e6:.0f} MB"
