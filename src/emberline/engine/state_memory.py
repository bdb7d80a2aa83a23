"""The memory of recurrent states on a CPU, and the settings that cannot be combined with states."""

from __future__ import annotations

import logging
from dataclasses import replace

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.model_support import reject_states
from emberline.kv.cache import StateCache, StateShape
from emberline.models.config import ModelConfig

SLOTS_PER_REQUEST = 3  # of a running request, at most: its states, and two snapshots of prefixes
MIN_SLOTS = 2  # for one running request and one snapshot

log = logging.getLogger("emberline.engine")


def count_state_slots(shape: StateShape, memory_bytes: int, max_running: int) -> int:
    """Return how many slots for states are allocated: at most half of the memory of the KV cache.

    Fewer slots than `max_running` limit the number of requests that run together. Raises ModelError if too few fit."""
    slots = min(max(SLOTS_PER_REQUEST * max_running, MIN_SLOTS), memory_bytes // 2 // shape.slot_bytes)
    if slots < MIN_SLOTS:
        raise ModelError(
            f"the KV cache has {memory_bytes} bytes, and recurrent states of {shape.slot_bytes} bytes each get half of "
            f"it; {slots} fit, but at least {MIN_SLOTS} are needed",
            hint="raise --kv-memory",
        )
    return slots


def allocate_states(config: ModelConfig, memory_bytes: int, max_running: int) -> StateCache | None:
    """Return the memory of a model's states; None if it has no recurrent layers. Raises ModelError."""
    shape = make_state_shape(config)
    return None if shape is None else StateCache(shape, count_state_slots(shape, memory_bytes, max_running))


def without_unsupported_settings(
    config: EngineConfig, model: ModelConfig, *, can_move_states: bool = False
) -> EngineConfig:
    """Return the settings of an engine for a model that may have recurrent states.

    `can_move_states`: whether the runner copies states to tiers and for other engines. If not, KV transfers are
    switched off. Raises UnsupportedModel for a setting that the user chose and that states do not support."""
    if model.parts.attention.state is None:
        return config
    if config.speculation.speculate != "off":
        reject_states(model, f"--speculate {config.speculation.speculate}", "drop it: states cannot be rolled back")
    if can_move_states:
        return config
    tiers = {"kv_host_memory": config.tiers.kv_host_memory, "kv_disk": config.tiers.kv_disk}
    for name, value in (tiers | {"kv_store": config.tiers.kv_store}).items():
        if value:
            option = f"--{name.replace('_', '-')}"
            reject_states(model, option, f"drop {option}: only KV blocks can be kept there, not states")
    if config.transfer is None:
        return config
    if config.transfer.required:
        hint = "use --role both without --kv-port: moved requests then compute their prompt again"
        reject_states(model, "a prefill or decode worker", hint)
    log.warning("KV transfer is off, moved requests compute their prompt again: model_type=%s reason=%s",
                model.model_type, "recurrent states cannot be copied between workers")  # fmt: skip
    return replace(config, transfer=None)
