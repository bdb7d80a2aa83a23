"""reject_unsupported_experts: refuses settings for which a GPU has no kernels if the model is a mixture of experts.

This module needs no torch."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import UnsupportedModel
from emberline.models.config import ModelConfig


def reject_unsupported_experts(config: ModelConfig, settings: EngineConfig) -> None:
    """Raise UnsupportedModel for a mixture of experts if `weights` is "both" or `exact` is set."""
    if config.experts is None:
        return
    if settings.gpu.weights == "both":
        message = f"weights is both, but the experts of {config.model_type} are kept in one form only"
        raise UnsupportedModel(message, hint="use --weights packed or plain")
    if settings.gpu.exact:
        message = f"exact is set, but no kernel sums the experts of {config.model_type} in a fixed order on a GPU"
        raise UnsupportedModel(message, hint="drop --exact")
