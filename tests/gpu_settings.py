"""Settings of an engine on a GPU, for tests that build one without a checkpoint."""

from __future__ import annotations

from typing import Any

from emberline.core.engine_config import EngineConfig


def gpu_config(**settings: Any) -> EngineConfig:
    """Return the settings with a GPU's defaults, by the names of EngineConfig.build."""
    return EngineConfig.build("", **settings).with_gpu_defaults()
