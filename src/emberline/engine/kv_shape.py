"""make_kv_shape: the shape of the KV cache that a model needs; make_state_shape: that of its recurrent states."""

from __future__ import annotations

import torch

from emberline.core.errors import UnsupportedModel
from emberline.kv.cache import KVShape, StateShape
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig


def make_kv_shape(
    config: ModelConfig, block_size: int, dtype: torch.dtype, groups: LayerGroups | None = None
) -> KVShape:
    """Return the shape of a model's KV cache with blocks of `block_size` tokens.

    `groups`: layers that share block tables; None: all share one.
    Raises UnsupportedModel if the model has chunked attention and its chunks do not consist of whole blocks, because
    blocks in two chunks could not be freed."""
    sizes = {window for window in config.windows if window and config.parts.attention.chunked_windows}
    for size in sorted(sizes):
        if size % block_size:
            raise UnsupportedModel(
                f"attention_chunk_size is {size}, which is no multiple of the KV block size of {block_size} tokens",
                hint=f"choose a --block-size that divides {size}",
            )
    is_latent, layers = config.parts.attention.latent is not None, groups.block_layers if groups else config.layers
    return KVShape(layers, config.kv_heads, config.head_dim, block_size, dtype, values_in_keys=is_latent)


def make_state_shape(config: ModelConfig) -> StateShape | None:
    """Return the shape of the states of a sequence; None if the model has no recurrent layers."""
    attention = config.parts.attention
    if (sizes := attention.state) is None:
        return None
    return StateShape(
        layers=len(attention.state_layers),
        conv_rows=sizes.conv_kernel - 1,
        conv_channels=sizes.conv_channels,
        heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
    )
