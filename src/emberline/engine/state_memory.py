"""The memory of recurrent states on a CPU, and the settings that cannot be combined with states."""

from __future__ import annotations

import logging
from dataclasses import replace

from emberline.core.engine_config import EngineConfig, SpeculationConfig
from emberline.core.errors import ModelError
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.model_support import reject_states
from emberline.kv.cache import StateCache
from emberline.models.config import ModelConfig

SLOTS_PER_REQUEST = 3  # of a running request, at most: its states, and two snapshots of prefixes
MIN_SLOTS = 2  # for one running request and one snapshot

log = logging.getLogger("emberline.engine")


def count_state_slots(slot_bytes: int, memory_bytes: int, max_running: int, *, draft_bytes: int = 0) -> int:
    """Return how many slots for states are allocated: at most half of the memory of the KV cache.

    Fewer slots than `max_running` limit the number of requests that run together. `draft_bytes`: what each running
    request needs for drafted tokens, in the same half. Raises ModelError if too few fit."""
    available = memory_bytes // 2
    slots = (available - max_running * draft_bytes) // slot_bytes
    if slots < max_running:  # each slot may be that of a running request
        slots = available // (slot_bytes + draft_bytes)
    slots = min(max(SLOTS_PER_REQUEST * max_running, MIN_SLOTS), slots)
    if slots < MIN_SLOTS:
        raise ModelError(
            f"the KV cache has {memory_bytes} bytes, and recurrent states of {slot_bytes} bytes each get half of "
            f"it; {slots} fit, but at least {MIN_SLOTS} are needed",
            hint="raise --kv-memory, or lower --max-draft" if draft_bytes else "raise --kv-memory",
        )
    return slots


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


def without_unsupported_settings(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the settings of an engine; KV transfers are switched off if the model has recurrent states.

    Raises UnsupportedModel for a setting that the user chose and that states do not support."""
    if model.parts.attention.state is None:
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
