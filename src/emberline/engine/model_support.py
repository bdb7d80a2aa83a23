"""Errors for models with layers that a feature or a device does not support. This module does not import torch."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.models.config import ModelConfig


def reject_states(config: ModelConfig, what: str, hint: str) -> None:
    """Raise UnsupportedModel for a model with recurrent layers, which `what` does not support."""
    if config.parts.attention.state is not None:
        raise UnsupportedModel(f"{config.model_type} has recurrent layers, which {what} does not support", hint=hint)


def reject_unsupported_on_gpu(config: ModelConfig, settings: EngineConfig) -> None:
    """Raise UnsupportedModel if the model has recurrent layers and `exact` is set."""
    if settings.gpu.exact:
        reject_states(config, "--exact on a GPU", "remove --exact: how a prompt is cut into chunks changes its states")


def reject_unpackable_dtype(settings: EngineConfig, dtype: str) -> None:
    """Raise InvalidRequest if the settings require packed or quantised weights and these are impossible.

    Only bfloat16 can be packed or quantised, and quantised weights do not work with `exact`."""
    weights = settings.gpu.weights
    if weights not in ("auto", "plain") and dtype != "bfloat16":
        change = "quantised" if settings.gpu.online_format else "packed"
        message = f"weights is {weights}; only bfloat16 can be {change}, and the model has {dtype}"
        raise InvalidRequest(message, param="weights", hint="use --dtype bfloat16 or --weights plain")
    if settings.gpu.online_format and settings.gpu.exact:
        message = f"weights is {weights} and exact is set, but no kernel sums quantised weights in a fixed order"
        raise InvalidRequest(message, param="weights", hint="drop --exact or use --weights plain")
