"""reject_unsupported_settings: refuses settings that the portable kernels, or the GPU, do not support."""

from __future__ import annotations

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import format_capability
from emberline.kernels import ops

MIN_FLOAT8_CAPABILITY = (8, 9)  # GPUs before it do not convert float8


def reject_unsupported_settings(
    settings: EngineConfig, device: torch.device, *, has_packed_experts: bool = False
) -> None:
    """Raise InvalidRequest if portable kernels are used, and a setting needs Hopper's kernels or a newer GPU.

    `has_packed_experts`: whether the model is a mixture of experts whose weights are to be packed."""
    if device.type != "cuda" or ops.has_hopper_kernels():
        return
    reason = ops.selected_gpu_kernels().reason
    if settings.gpu.exact:
        message = f"exact is set, but the portable kernels sum in an order that depends on the batch ({reason})"
        raise InvalidRequest(message, param="exact", hint="drop --exact")
    if settings.gpu.weights == "both":
        message = f"weights is both, but the portable kernels have no faster product for packed weights ({reason})"
        raise InvalidRequest(message, param="weights", hint="use --weights plain, or packed to save memory")
    if has_packed_experts:
        message = f"weights is {settings.gpu.weights}, but the portable kernels cannot read packed experts ({reason})"
        raise InvalidRequest(message, param="weights", hint="use --weights plain")
    capability = torch.cuda.get_device_capability(device)
    if settings.kv_cache.kv_dtype == "float8" and capability < MIN_FLOAT8_CAPABILITY:
        found = format_capability(capability)
        message = f"kv_dtype is float8, which needs compute capability 8.9 or later; the GPU has {found}"
        raise InvalidRequest(message, param="kv_dtype", hint="drop --kv-dtype")
