"""Settings of an engine on a GPU, for tests that build one without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(autouse=True, scope="module")
def short_starts() -> Iterator[None]:
    """Capture only a few shapes when an engine starts: the others are captured at their first use.

    Modules of tests import this fixture. Otherwise each engine would spend up to four seconds on captures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        yield
