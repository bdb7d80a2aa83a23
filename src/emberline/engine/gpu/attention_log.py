"""log_portable_attention: says at start which attention of a model uses the slower, portable kernels."""

from __future__ import annotations

import logging

from emberline.kernels import ops
from emberline.kernels.attention_support import explain_portable_kernels
from emberline.kv.cache import KVShape
from emberline.models.decoder import DecoderModel

log = logging.getLogger("emberline.engine")


def log_portable_attention(model: DecoderModel, cache: KVShape) -> None:
    """Log one line if attention of the model on a GPU uses Triton kernels, with the phases and the reasons."""
    config = model.config
    if config.parts.attention.latent is not None:
        return  # latents have kernels of their own
    if model.device.type == "cuda" and not ops.has_hopper_kernels():
        return  # all kernels are portable, which the log says at the start
    heads = config.heads, config.kv_heads, config.head_dim
    reasons = explain_portable_kernels(heads, model.dtype, cache.dtype, cache.block_size)
    if not reasons:
        return
    log.info(
        "Attention uses portable kernels: model=%s layers=all phases=%s reason=%s",
        config.model_type,
        ",".join(reasons),
        "; ".join(dict.fromkeys(reasons.values())),
    )
