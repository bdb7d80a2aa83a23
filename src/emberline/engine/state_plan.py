"""How many slots for recurrent states an engine has, and their memory. This module does not import torch."""

from __future__ import annotations

from emberline.core.errors import ModelError
from emberline.models.config import ModelConfig

SLOTS_PER_REQUEST = 3  # of a running request, at most: its states, and two snapshots of prefixes
MIN_SLOTS = 2  # for one running request and one snapshot
STATE_BYTES = 4  # of a number


def state_slot_bytes(config: ModelConfig) -> int:
    """Return the bytes of the states of one sequence in all layers; 0 if the model has no recurrent layers."""
    attention = config.parts.attention
    if (sizes := attention.state) is None:
        return 0
    return len(attention.state_layers) * (sizes.conv_values + sizes.matrix_values) * STATE_BYTES


def device_state_bytes(config: ModelConfig, num_slots: int) -> int:
    """Return the bytes of this many slots and of one for padding, on a GPU; 0 without recurrent layers."""
    return (num_slots + 1) * state_slot_bytes(config)


def plan_state_slots(config: ModelConfig, memory_bytes: int, max_running: int, kv_bytes: int | None = None) -> int:
    """Return the slots of an engine on a GPU, whose KV cache has this memory; 0 without recurrent layers."""
    slot_bytes = state_slot_bytes(config)
    if not slot_bytes:
        return 0
    return count_state_slots(slot_bytes, memory_bytes, max_running, num_padding=1, kv_bytes=kv_bytes)


def count_state_slots(
    slot_bytes: int,
    memory_bytes: int,
    max_running: int,
    *,
    draft_bytes: int = 0,
    num_padding: int = 0,
    kv_bytes: int | None = None,
) -> int:
    """Return how many slots for states are allocated: at most half of the memory of the KV cache.

    `kv_bytes`: if keys and values must have so many bytes, states get the rest instead of half.

    Fewer slots than `max_running` limit the number of requests that run together. `draft_bytes`: what each running
    request needs for drafted tokens, in the same half. `num_padding`: slots that are allocated beside these. Raises
    ModelError if too few fit."""
    share = memory_bytes // 2 if kv_bytes is None else memory_bytes - kv_bytes
    available = share - num_padding * slot_bytes
    slots = (available - max_running * draft_bytes) // slot_bytes
    if slots < max_running:  # each slot may be that of a running request
        slots = available // (slot_bytes + draft_bytes)
    slots = min(max(SLOTS_PER_REQUEST * max_running, MIN_SLOTS), slots)
    if slots < MIN_SLOTS:
        part = "half of it" if kv_bytes is None else f"what {kv_bytes} bytes of keys and values leave"
        hint = "raise --kv-memory" if kv_bytes is None else "lower --kv-tokens"
        raise ModelError(
            f"the KV cache has {memory_bytes} bytes, and recurrent states of {slot_bytes} bytes each get {part}; "
            f"{max(0, slots)} fit, but at least {MIN_SLOTS} are needed",
            hint=f"{hint}, or lower --max-draft" if draft_bytes else hint,
        )
    return slots
