"""What is not supported for models with latent attention or recurrent layers. This module does not import torch."""

from __future__ import annotations

from emberline.core.errors import UnsupportedModel
from emberline.models.config import ModelConfig


def reject_states(config: ModelConfig, what: str, hint: str) -> None:
    """Raise UnsupportedModel for a model with recurrent layers, which `what` does not support."""
    if config.parts.attention.state is not None:
        raise UnsupportedModel(f"{config.model_type} has recurrent layers, which {what} does not support", hint=hint)


def reject_cpu_only_attention(config: ModelConfig) -> None:
    """Raise UnsupportedModel for a model with latent attention or recurrent layers, which no GPU kernel supports."""
    reject_states(config, "a GPU", "use --device cpu")
    if config.parts.attention.latent is not None:
        message = f"{config.model_type} has latent attention, which is only supported on the CPU"
        raise UnsupportedModel(message, hint="use --device cpu")
