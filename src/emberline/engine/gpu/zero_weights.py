"""make_zero_weight_model: a copy of a model with zero weights, to run its kernels before the weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

from emberline.kernels import ops
from emberline.models.decoder import DecoderModel


def make_zero_weight_model(model: DecoderModel) -> DecoderModel:
    """Return a model with zero weights that runs the same kernels. Weights of equal shape share one tensor."""
    device = model.device

    @cache
    def zero_weight(n: int, k: int, gated: bool) -> ops.PackedWeight:
        weight = ops.empty_weight(n, k, torch.bfloat16, device, gated=gated)
        weight.fixed_order = model.layers[0].attention.qkv.weight.fixed_order
        ops.fill_weight(weight, torch.zeros(n, k, dtype=torch.bfloat16, device=device))
        return weight

    @cache
    def zero_experts(count: int, n: int, k: int, gated: bool) -> ops.PackedExperts:
        experts = ops.empty_experts(count, n, k, gated=gated)
        ops.fill_experts(experts, torch.zeros(count, n, k, dtype=torch.bfloat16, device=device))
        return experts

    parts = {
        name: _with_zero_weights(getattr(model, name), zero_weight, zero_experts)
        for name in ("embedding", "layers", "head")
    }
    return replace(model, **parts)


def _with_zero_weights(
    part: Any,
    make_zero_weight: Callable[[int, int, bool], ops.PackedWeight],
    make_zero_experts: Callable[[int, int, int, bool], ops.PackedExperts],
) -> Any:
    """Return a part of a model with its weights replaced by zeros.

    `make_zero_weight`: returns a zero weight for the arguments n, k and gated. `make_zero_experts`: the same with the
    number of experts first. This is not a nested function, since a recursive closure would keep the zero weights in
    memory until the next garbage collection."""
    if isinstance(part, ops.PackedWeight):
        return make_zero_weight(part.n, part.k, part.gated) if part.dtype is torch.bfloat16 else part
    if isinstance(part, ops.PackedExperts):
        return make_zero_experts(part.count, part.n, part.k, part.gated) if part.handle is None else part
    if isinstance(part, tuple):
        return tuple(_with_zero_weights(one, make_zero_weight, make_zero_experts) for one in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changes = {
        field.name: _with_zero_weights(getattr(part, field.name), make_zero_weight, make_zero_experts)
        for field in fields(part)
    }
    return replace(part, **changes)
