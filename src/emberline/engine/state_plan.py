"""How many slots for recurrent states an engine has, and their memory. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class StatePlanner:
    """Plans the memory of recurrent states on a GPU. For a model without recurrent layers, all results are 0."""

    slot_bytes: int
    max_running: int
    draft_bytes: int  # of the rows of drafted tokens that a running request keeps

    @staticmethod
    def from_config(config: ModelConfig, max_running: int, max_new_tokens: int, dtype_bytes: int) -> StatePlanner:
        """Return a planner for the recurrent layers of a model.

        `max_new_tokens`: maximum tokens of a request in a step, with its draft. `dtype_bytes`: of an activation."""
        attention, rows = config.parts.attention, max_new_tokens - 1
        if (sizes := attention.state) is None:
            return StatePlanner(0, max_running, 0)
        values = len(attention.state_layers) * (2 * sizes.conv_channels + 2 * sizes.value_heads)
        return StatePlanner(state_slot_bytes(config), max_running, rows * values * dtype_bytes)

    def count_slots(self, memory_bytes: int, kv_bytes: int | None = None) -> int:
        """Return how many slots fit if states and KV cache share this memory.

        `kv_bytes`: bytes that keys and values must have; None: states get at most half of the memory."""
        if not self.slot_bytes:
            return 0
        sizes, draft = (self.slot_bytes, memory_bytes, self.max_running), self.draft_bytes
        return count_state_slots(*sizes, draft_bytes=draft, num_padding=1, kv_bytes=kv_bytes)

    def num_bytes(self, num_slots: int) -> int:
        """Return the bytes of this many slots, of a slot for padding, and of the inputs kept for drafted tokens."""
        return (num_slots + 1) * self.slot_bytes + min(num_slots, self.max_running) * self.draft_bytes


def count_state_slots(
    slot_bytes: int,
    memory_bytes: int,
    max_running: int,
    *,
    draft_bytes: int = 0,
    num_padding: int = 0,
    kv_bytes: int | None = None,
) -> int:
    """Return how many slots for states to allocate. They get at most half of `memory_bytes`, the KV cache the rest.

    `kv_bytes`: bytes that keys and values must have; states then get what is left, instead of half. `draft_bytes`: what
    each running request needs for drafted tokens. `num_padding`: slots for padding, which the result does not include.
    Both are part of the states' share. If there are fewer slots than `max_running`, fewer requests run together. Raises
    ModelError if too few slots fit."""
    share = memory_bytes // 2 if kv_bytes is None else memory_bytes - kv_bytes
    available = share - num_padding * slot_bytes
    slots = (available - max_running * draft_bytes) // slot_bytes
    if slots < max_running:  # each slot may be that of a running request
        slots = available // (slot_bytes + draft_bytes)
    slots = min(max(SLOTS_PER_REQUEST * max_running, MIN_SLOTS), slots)
    if slots < MIN_SLOTS:
        part = "half of it" if kv_bytes is None else f"what {kv_bytes} bytes of keys and values leave"
        hint = "raise --kv-memory" if kv_bytes is None else "lower the setting kv_tokens"
        raise ModelError(
            f"the KV cache has {memory_bytes} bytes, and recurrent states of {slot_bytes} bytes each get {part}; "
            f"{max(0, slots)} fit, but at least {MIN_SLOTS} are needed",
            hint=f"{hint}, or lower --max-draft" if draft_bytes else hint,
        )
    return slots
