"""reject_states: the error for features that do not support recurrent layers. This module does not import torch."""

from __future__ import annotations

from emberline.core.errors import UnsupportedModel
from emberline.models.config import ModelConfig


def reject_states(config: ModelConfig, what: str, hint: str) -> None:
    """Raise UnsupportedModel for a model with recurrent layers, which `what` does not support."""
    if config.parts.attention.state is not None:
        raise UnsupportedModel(f"{config.model_type} has recurrent layers, which {what} does not support", hint=hint)
