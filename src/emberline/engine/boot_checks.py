"""Checks of an engine's settings before its model is loaded."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.freememory import free_memory
from emberline.engine.memory_plan import format_gib
from emberline.models.weight_form import check_requested_weights


def check_cpu_settings(config: EngineConfig) -> None:
    """Raise InvalidRequest for settings that an engine on a CPU does not support."""
    for name, value in (("itl_target_ms", config.scheduler.itl_target_ms), ("kv_tokens", config.kv_cache.kv_tokens)):
        if value is not None:
            hint = f"drop --{name.replace('_', '-')}"
            raise InvalidRequest(f"{name} is set, but only an engine on a GPU supports it", param=name, hint=hint)
    if config.step_costs is not None and config.parallel.num_ranks > 1:
        message = f"step_costs is set, but the engine has {config.parallel.num_ranks} ranks; it must have one"
        raise InvalidRequest(message, param="step_costs", hint="drop --step-costs, or --tp and --pp")
    if config.gpu.kernels != "auto":
        message = f"kernels is {config.gpu.kernels}, but the CPU computes, and only an engine on a GPU uses it"
        raise InvalidRequest(message, param="kernels", hint="drop --kernels")
    check_requested_weights(config.gpu.weights, on_gpu=False)
    block_size = config.scheduler.block_size
    if block_size not in (8, 16, 32) and block_size % 64:
        message = f"block_size is {block_size}; on a CPU it must be 8, 16, 32 or a multiple of 64"
        raise InvalidRequest(message, param="block_size")


def check_host_memory(config: EngineConfig) -> None:
    """Raise InvalidRequest if kv_host_memory is more than the free memory.

    On a GPU the whole kv_host_memory is pinned, so it must be available at the start."""
    if config.tiers.kv_host_memory > (free := free_memory()):
        raise InvalidRequest(
            f"kv_host_memory is {format_gib(config.tiers.kv_host_memory)} GiB; "
            f"{format_gib(free)} GiB of memory are free",
            param="kv_host_memory",
            hint="lower --kv-host-memory",
        )
