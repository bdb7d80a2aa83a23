"""Errors for models with layers that a feature or a device does not support. This module does not import torch."""

from __future__ import annotations

from emberline.core.errors import UnsupportedModel
from emberline.models.config import ModelConfig


def reject_states(config: ModelConfig, what: str, hint: str) -> None:
    """Raise UnsupportedModel for a model with recurrent layers, which `what` does not support."""
    if config.parts.attention.state is not None:
        raise UnsupportedModel(f"{config.model_type} has recurrent layers, which {what} does not support", hint=hint)


def reject_on_gpu(config: ModelConfig) -> None:
    """Raise UnsupportedModel for a model with layers that no GPU kernel computes."""
    reject_states(config, "a GPU", "use --device cpu")
    if config.parts.attention.has_output_gate:
        message = f"{config.model_type} has attention with an output gate, which is only supported on the CPU"
        raise UnsupportedModel(message, hint="use --device cpu")
