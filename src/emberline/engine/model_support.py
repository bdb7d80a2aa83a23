"""Errors for models with layers that a feature or a device does not support. This module does not import torch."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import UnsupportedModel
from emberline.models.config import ModelConfig


def reject_states(config: ModelConfig, what: str, hint: str) -> None:
    """Raise UnsupportedModel for a model with recurrent layers, which `what` does not support."""
    if config.parts.attention.state is not None:
        raise UnsupportedModel(f"{config.model_type} has recurrent layers, which {what} does not support", hint=hint)


def reject_unsupported_on_gpu(config: ModelConfig, settings: EngineConfig) -> None:
    """Raise UnsupportedModel for settings of a GPU that recurrent layers do not support."""
    if settings.gpu.exact:
        reject_states(config, "--exact on a GPU", "remove --exact: how a prompt is cut into chunks changes its states")
