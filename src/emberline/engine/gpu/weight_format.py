"""The format in which a GPU has a model's weights: its name, and its size compared with the plan."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError
from emberline.engine.memory_plan import MemoryPlan
from emberline.models.weights import Weights


def name_weight_format(weights: Weights, settings: EngineConfig) -> str:
    """Return plain, packed or both, after the format of matrices that are kept quantised."""
    form = "both" if settings.gpu.weights == "both" else "packed" if weights.packed else "plain"
    if not weights.narrow_sizes:
        return form
    narrow = settings.gpu.online_format or "quantised"
    return narrow if form == "plain" else f"{narrow}+{form}"


def check_packed_size(loaded_bytes: int, plan: MemoryPlan) -> None:
    """Raise ModelError if packed weights take clearly more memory than was planned for them."""
    if loaded_bytes > plan.weights + plan.spare_bytes // 2:
        message = f"packed weights take {loaded_bytes} bytes, and {plan.weights} bytes were planned for them"
        raise ModelError(message, hint="use --weights plain")
