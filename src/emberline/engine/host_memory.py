"""Whether the models of a server fit into main memory. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.core.errors import ModelError
from emberline.engine.memory_plan import format_gib


def check_sleeping_models(
    weight_bytes_by_model: Mapping[str, int], kv_host_bytes: int, free_bytes: int, *, sleeps: bool
) -> None:
    """Raise ModelError if main memory cannot hold the KV blocks kept there and the weights of sleeping models.

    `sleeps`: whether any model may sleep."""
    if sleeps * sum(weight_bytes_by_model.values()) + kv_host_bytes > free_bytes:
        besides = f" and {format_gib(kv_host_bytes)} GiB of KV blocks" if kv_host_bytes else ""
        reason = ", which main memory must hold while they sleep" if sleeps else ""
        raise out_of_main_memory_error(weight_bytes_by_model, reason + besides, free_bytes)


def out_of_main_memory_error(weight_bytes_by_model: Mapping[str, int], other_needs: str, free_bytes: int) -> ModelError:
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in weight_bytes_by_model.items())
    total = sum(weight_bytes_by_model.values())
    return ModelError(
        f"the models do not fit into main memory: they have {format_gib(total)} GiB of weights "
        f"({parts}){other_needs}; {format_gib(free_bytes)} GiB are free",
        hint="serve fewer or smaller models",
    )
