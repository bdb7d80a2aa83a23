"""require_fixed_order: makes a model's results on a GPU independent of the batch, for the setting `exact`."""

from __future__ import annotations

import torch

from emberline.core.errors import UnsupportedModel
from emberline.kernels import ops
from emberline.kv.cache import KVShape
from emberline.models.decoder import DecoderModel
from emberline.models.sleep import iter_instances

HINT = "drop --exact"


def require_fixed_order(model: DecoderModel, cache: KVShape) -> None:
    """Make all matrix products of the model sum in an order that does not depend on the number of rows.

    Raise UnsupportedModel if the kernels with a fixed order do not support a weight or the attention of the model."""
    from emberline.kernels.cuda import decode, fixed_order, prefill

    config = model.config
    if model.device.type != "cuda":
        return  # a CPU always sums in a fixed order
    has_attention = decode.supports_shape(
        config.heads, config.kv_heads, config.head_dim, cache.dtype, cache.block_size
    ) and prefill.supports_shape(cache.block_size, config.head_dim)
    parts = config.parts
    if parts.attention_softcap or parts.attention.has_sinks or parts.attention.chunked_windows:
        kinds = "capped scores, sinks or chunks"
        message = f"exact is set, but the attention of {config.model_type} has {kinds}, which it was not tested with"
        raise UnsupportedModel(message, hint=HINT)
    if parts.needs_portable_attention:
        message = f"exact is set, but {config.model_type} has latent attention, which has no kernels with a fixed order"
        raise UnsupportedModel(message, hint=HINT)
    if not has_attention or cache.dtype is not torch.bfloat16:
        message = (
            f"exact is set, but its attention kernels do not support {config.heads} query heads and"
            f" {config.kv_heads} KV heads of size {config.head_dim} with a KV cache of {_name(cache.dtype)}"
        )
        raise UnsupportedModel(message, hint=HINT)
    for weight in iter_instances(ops.PackedWeight, (model.layers, model.head)):
        if weight.dtype is not torch.bfloat16 or not fixed_order.supports(weight.n, weight.k):
            message = (
                f"exact is set, but the model has a {_name(weight.dtype)} weight of {weight.n} x {weight.k}, and"
                " exact needs bfloat16 weights whose sizes are multiples of 64"
            )
            raise UnsupportedModel(message, hint=HINT)
        weight.fixed_order = True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
