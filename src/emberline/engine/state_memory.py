"""The memory of recurrent states, and the settings that cannot be combined with states."""

from __future__ import annotations

import logging
from dataclasses import replace

from emberline.core.engine_config import EngineConfig, SpeculationConfig
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.model_support import reject_states
from emberline.engine.state_plan import count_state_slots
from emberline.kv.cache import StateCache
from emberline.models.config import ModelConfig

log = logging.getLogger("emberline.engine")


def allocate_states(
    config: ModelConfig, memory_bytes: int, max_running: int, speculation: SpeculationConfig
) -> StateCache | None:
    """Return the memory of a model's states; None if it has no recurrent layers. Raises ModelError."""
    if (shape := make_state_shape(config)) is None:
        return None
    max_draft = speculation.max_new_tokens - 1
    draft_bytes = max_draft * shape.draft_bytes
    slots = count_state_slots(shape.slot_bytes, memory_bytes, max_running, draft_bytes=draft_bytes)
    return StateCache(shape, slots, num_places=min(slots, max_running), max_draft=max_draft)


def allocate_device_states(config: ModelConfig, num_slots: int, device: str) -> StateCache | None:
    """Return the memory of a model's states on a device, with a slot for padding; None if it has no such layers."""
    shape = make_state_shape(config)
    return None if shape is None else StateCache(shape, num_slots, device, has_padding_slot=True)


def without_unsupported_settings(
    config: EngineConfig, model: ModelConfig, *, can_move_states: bool = False
) -> EngineConfig:
    """Return the settings of an engine for a model that may have recurrent states.

    `can_move_states`: whether the runner copies states to tiers and for other engines. If not, KV transfers are
    switched off. Raises UnsupportedModel for a setting that the user chose and that states do not support."""
    if model.parts.attention.state is None:
        return config
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
