"""Settings of an engine on a GPU, for tests that build one without a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emberline.core.engine_config import EngineConfig
from emberline.kernels.gpu_choice import has_hopper_kernels

# For tests of kernels that only Hopper GPUs run. EMBERLINE_KERNELS=portable skips them and runs all others on the
# portable kernels.
needs_hopper_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_hopper_kernels()), reason="needs Hopper's kernels"
)


def gpu_config(**settings: Any) -> EngineConfig:
    """Return the settings with a GPU's defaults, by the names of EngineConfig.build."""
    return EngineConfig.build("", **settings).with_gpu_defaults()
