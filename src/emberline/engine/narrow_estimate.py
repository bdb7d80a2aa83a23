"""estimate_narrow_sizes: which matrices of a checkpoint a GPU keeps quantised, before anything is loaded.

This module needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.engine_config import EngineConfig
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of, select_planned_text
from emberline.models.quantised_tensors import list_quantised_sizes
from emberline.models.weight_dtype import stored_weight_format
from emberline.models.weight_formats import NarrowSize, list_online_sizes, list_stored_sizes, read_weight_formats


def estimate_narrow_sizes(
    checkpoint: Checkpoint, model: ModelConfig, settings: EngineConfig, dtype: str
) -> list[NarrowSize]:
    """Return the sizes of matrices that the files have quantised, or that the settings quantise at load.

    Parts of a matrix whose formats differ are dequantised when they are loaded, but counted here."""
    if dtype != "bfloat16" or settings.gpu.exact or settings.gpu.weights == "plain":
        return []
    outline = outline_of(model)
    if stored := list_quantised_sizes(checkpoint, has_query_gate=outline.has_query_gate):
        return stored
    return list_online_sizes(outline, settings.gpu.online_format) if settings.gpu.online_format else []


def estimate_rank_narrow_sizes(
    checkpoint: Checkpoint, model: ModelConfig, own: ModelConfig, settings: EngineConfig, dtype: str
) -> list[NarrowSize]:
    """Return the same sizes for one rank. `own`: the config of the rank's part of `model`.

    The formats are those in config.json, for each kind of weights. Raises UnsupportedModel if only some matrices of a
    kind have one."""
    if dtype != "bfloat16" or settings.gpu.exact or settings.gpu.weights == "plain":
        return []
    outline = outline_of(own)
    if formats := read_weight_formats(select_planned_text(checkpoint.config), outline_of(model)):
        return list_stored_sizes(outline, formats)
    return list_online_sizes(outline, settings.gpu.online_format) if settings.gpu.online_format else []


def describe_narrow_sizes(checkpoint: Checkpoint, settings: EngineConfig, narrow: Sequence[NarrowSize]) -> str:
    """Return the format and size of the quantised matrices, after a comma; an empty string: there are none."""
    if not narrow:
        return ""
    form = stored_weight_format(checkpoint) if list_quantised_sizes(checkpoint) else settings.gpu.online_format
    return f", {form} {sum(size.num_bytes for size in narrow) / 1e6:.0f} MB"
