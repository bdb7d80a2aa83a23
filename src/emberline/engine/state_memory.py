"""The memory of recurrent states."""

from __future__ import annotations

import torch

from emberline.core.engine_config import EngineConfig, SpeculationConfig
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.state_plan import count_state_slots
from emberline.kv.cache import StateCache
from emberline.models.config import ModelConfig


def allocate_states(
    config: ModelConfig, memory_bytes: int, max_running: int, speculation: SpeculationConfig
) -> StateCache | None:
    """Allocate a model's recurrent states; return None if it has no recurrent layers.

    `memory_bytes`: for states and KV cache together. Raises ModelError if too few states fit."""
    if (shape := make_state_shape(config)) is None:
        return None
    max_draft = speculation.max_new_tokens - 1
    draft_bytes = max_draft * shape.draft_bytes
    slots = count_state_slots(shape.slot_bytes, memory_bytes, max_running, draft_bytes=draft_bytes)
    return StateCache(shape, slots, num_draft_slots=min(slots, max_running), max_draft=max_draft)


def allocate_device_states(
    config: ModelConfig, num_slots: int, device: torch.device, settings: EngineConfig, dtype: torch.dtype
) -> StateCache | None:
    """Allocate a model's recurrent states and a slot for padding on a device; return None if it has no such layers.

    `dtype`: of the model's activations."""
    if (shape := make_state_shape(config)) is None:
        return None
    draft_slots = min(num_slots, settings.scheduler.max_running)
    drafts = {"num_draft_slots": draft_slots, "max_draft": settings.speculation.max_new_tokens - 1}
    draft_dtype = dtype if device.type == "cuda" else torch.float32
    return StateCache(shape, num_slots, str(device), has_padding_slot=True, **drafts, draft_dtype=draft_dtype)
