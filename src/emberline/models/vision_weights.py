"""count_vision_weights: the number of weights of a multimodal model's image encoder, from its vision_config.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from emberline.core.errors import UnsupportedModel
from emberline.models.fields import ConfigFields

MAX_VISION_SIZE = 1 << 17
DROPPED_TYPES = frozenset({"gemma3"})  # the engine loads their language model only


def count_vision_weights(config: Mapping[str, Any], text_hidden: int) -> int:
    """Return the weights of the image encoder and of its projector; 0 if there is no vision_config.

    Raises UnsupportedModel for a vision_config of a model_type that is not known."""
    fields = ConfigFields(config, "config.json")
    model_type = fields.text("model_type")
    if not fields.has_field("vision_config") or model_type in DROPPED_TYPES:
        return 0
    if model_type not in ENCODERS:
        raise UnsupportedModel(f"config.json: the vision_config of model_type {model_type[:80]!r} cannot be planned")
    return ENCODERS[model_type](fields.section("vision_config"), text_hidden)


def _size(fields: ConfigFields, name: str, default: int | None = None) -> int:
    return fields.size(name, default, maximum=MAX_VISION_SIZE)


def _encoder_layer(hidden: int, ffn: int) -> int:
    """Return the weights of a layer: four projections, two matrices, all with biases, and two layer norms."""
    return 4 * (hidden + 1) * hidden + (hidden + 1) * ffn + (ffn + 1) * hidden + 4 * hidden


def _count_llama4(fields: ConfigFields, text_hidden: int) -> int:
    hidden, ffn = _size(fields, "hidden_size", 768), _size(fields, "intermediate_size", 5632)
    patch = _size(fields, "patch_size", 14)
    patches = (_size(fields, "image_size", 448) // patch) ** 2 + 1
    width, output = _size(fields, "projector_input_dim", 4096), _size(fields, "projector_output_dim", 4096)
    embedding = _size(fields, "num_channels", 3) * patch * patch * hidden + hidden + patches * hidden
    adapter = ffn * width + output * output
    layers = _size(fields, "num_hidden_layers", 34) * _encoder_layer(hidden, ffn)
    return embedding + layers + 4 * hidden + adapter + _size(fields, "vision_output_dim", 7680) * text_hidden


def _count_kimi(fields: ConfigFields, text_hidden: int) -> int:
    """Count with the field names of the published config.json, or with those that transformers 5 writes."""

    def size(published: str, name: str, default: int) -> int:
        return _size(fields, published if fields.has_field(published) else name, default)

    hidden, ffn = size("vt_hidden_size", "hidden_size", 1152), size("vt_intermediate_size", "intermediate_size", 4304)
    patch, channels = _size(fields, "patch_size", 14), 3
    height, width = (size(f"init_pos_emb_{side}", f"pos_emb_{side}", 64) for side in ("height", "width"))
    embedding = (channels * patch * patch + 1) * hidden + height * width * hidden
    merged = hidden
    for side in fields.number_list("merge_kernel_size", 2) if fields.has_field("merge_kernel_size") else (2.0, 2.0):
        merged *= int(side)
    projector = 2 * hidden + (merged + 1) * merged + (merged + 1) * text_hidden
    layers = size("vt_num_hidden_layers", "num_hidden_layers", 27) * _encoder_layer(hidden, ffn)
    return embedding + layers + 2 * hidden + projector


def _count_qwen3_5(fields: ConfigFields, text_hidden: int) -> int:
    hidden, ffn = _size(fields, "hidden_size", 1152), _size(fields, "intermediate_size", 4304)
    patch, frames = _size(fields, "patch_size", 16), _size(fields, "temporal_patch_size", 2)
    embedding = (_size(fields, "in_channels", 3) * frames * patch * patch + 1) * hidden
    embedding += _size(fields, "num_position_embeddings", 2304) * hidden
    merged = hidden * _size(fields, "spatial_merge_size", 2) ** 2
    projector = 2 * hidden + (merged + 1) * merged + (merged + 1) * _size(fields, "out_hidden_size", text_hidden)
    return embedding + _size(fields, "depth", 27) * _encoder_layer(hidden, ffn) + projector


ENCODERS: Mapping[str, Callable[[ConfigFields, int], int]] = {
    "llama4": _count_llama4,
    "kimi_k25": _count_kimi,
    "qwen3_5": _count_qwen3_5,
    "qwen3_5_moe": _count_qwen3_5,
}
