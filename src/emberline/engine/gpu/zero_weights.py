"""make_zero_weight_model: a copy of a model with zero weights, to run its kernels before the weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from emberline.kernels import ops
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.models.decoder import DecoderModel
from emberline.models.pending_weights import allocate_like


def make_zero_weight_model(model: DecoderModel) -> DecoderModel:
    """Return a model with zeros for weights that have no memory yet, which runs the same kernels.

    Weights of equal shape share one tensor."""
    zeros = _ZeroWeights(model.device, fixed_order=model.layers[0].attention.qkv.weight.fixed_order)
    parts = {name: _with_zero_weights(getattr(model, name), zeros) for name in ("embedding", "layers", "head")}
    return replace(model, **parts)


@dataclass(frozen=True, slots=True)
class _ZeroWeights:
    """Makes weights that are all zero, one for each shape, which all weights of that shape then share."""

    device: torch.device
    fixed_order: bool
    weights: dict[object, ops.PackedWeight] = field(default_factory=dict)
    experts: dict[object, ops.PackedExperts] = field(default_factory=dict)

    def replace_weight(self, weight: ops.PackedWeight) -> ops.PackedWeight:
        if weight.data.numel() or weight.dtype is not torch.bfloat16:
            return weight
        if isinstance(shape := weight.handle, QuantisedMatrix):
            key = (*_form_of(shape), weight.gated)
            if key not in self.weights:
                self.weights[key] = self._make_quantised(shape, weight.gated)
            return self.weights[key]
        size = weight.n, weight.k, weight.gated
        if size not in self.weights:
            self.weights[size] = self._make_packed(*size)
        return self.weights[size]

    def replace_experts(self, experts: ops.PackedExperts) -> ops.PackedExperts:
        if experts.handle is None:
            size = experts.count, experts.n, experts.k, experts.gated
            if size not in self.experts:
                self.experts[size] = replace(experts)
                zeros = torch.zeros(size[:3], dtype=torch.bfloat16, device=self.device)
                ops.fill_experts(self.experts[size], zeros)
            return self.experts[size]
        if not isinstance(shape := experts.handle, QuantisedMatrix) or shape.codes.device.type != "meta":
            return experts
        key = (*_form_of(shape), experts.gated)
        if key not in self.experts:
            self.experts[key] = self._make_experts(experts, shape)
        return self.experts[key]

    def _make_packed(self, n: int, k: int, gated: bool) -> ops.PackedWeight:
        weight = ops.empty_weight(n, k, torch.bfloat16, self.device, gated=gated)
        weight.fixed_order = self.fixed_order
        ops.fill_weight(weight, torch.zeros(n, k, dtype=torch.bfloat16, device=self.device))
        return weight

    def _make_quantised(self, shape: QuantisedMatrix, gated: bool) -> ops.PackedWeight:
        weight = ops.empty_quantised_weight(shape, self.device, gated=gated)
        weight.fixed_order = self.fixed_order
        ops.fill_quantised_weight(weight, allocate_like(shape, self.device, zeroed=True))
        return weight

    def _make_experts(self, experts: ops.PackedExperts, shape: QuantisedMatrix) -> ops.PackedExperts:
        made = replace(experts)
        ops.fill_quantised_experts(made, allocate_like(shape, self.device, zeroed=True))
        return made


def _form_of(shape: QuantisedMatrix) -> tuple[object, ...]:
    sizes = shape.codes.shape, shape.scales.shape, shape.scales.dtype
    return shape.kind, *sizes, shape.zeros is None, shape.columns is None


def _with_zero_weights(part: Any, zeros: _ZeroWeights) -> Any:
    """Return a part of a model with its weights replaced by zeros.

    This is not a nested function, since a recursive closure would keep the zero weights in memory until the next
    garbage collection."""
    if isinstance(part, ops.PackedWeight):
        return zeros.replace_weight(part)
    if isinstance(part, ops.PackedExperts):
        return zeros.replace_experts(part)
    if isinstance(part, tuple):
        return tuple(_with_zero_weights(one, zeros) for one in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changes = {each.name: _with_zero_weights(getattr(part, each.name), zeros) for each in fields(part)}
    return replace(part, **changes)
