"""load_stacked_experts: loads the experts of a layer into a few tensors, as GPU kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from emberline.kernels.mixture import StackedExperts
from emberline.models.experts_spec import ExpertTensors, GateUpOrder
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.weight_matrices import can_pack_experts
from emberline.models.weights import StackSource, Weights


def load_stacked_experts(
    weights: Weights, experts: ExpertsConfig, tensors: ExpertTensors, at: str, hidden: int
) -> StackedExperts:
    """Load the experts of a layer. `at`: how the names of the layer's tensors begin.

    After these experts, the tensors have room for experts that are copied there later."""
    count, ffn, order = len(experts.numbers), experts.ffn, tensors.order
    if "{}" in tensors.down:
        rows = 2 * ffn // len(tensors.gate_up)
        gate_up = [
            StackSource(f"{at}.{name.format(number)}", (rows, hidden), partial(_select_rows, place, index * rows, rows))
            for place, number in enumerate(experts.numbers)
            for index, name in enumerate(tensors.gate_up)
        ]
        down = [
            StackSource(f"{at}.{tensors.down.format(number)}", (hidden, ffn), partial(_select_rows, place, 0, hidden))
            for place, number in enumerate(experts.numbers)
        ]
    else:
        in_rows = order == "rows"
        gate_up_shape = (count, 2 * ffn, hidden) if in_rows else (count, hidden, 2 * ffn)
        down_shape = (count, hidden, ffn) if in_rows else (count, ffn, hidden)
        views = _GATE_UP_VIEWS[order], _select_all if in_rows else _transpose
        select_gate_up, select_down = (partial(_select_first, count, view) for view in views)
        gate_up = [StackSource(f"{at}.{tensors.gate_up[0]}", gate_up_shape, select_gate_up)]
        down = [StackSource(f"{at}.{tensors.down}", down_shape, select_down)]
    # Kernels for packed experts need all experts of the layer.
    packable = experts.local_experts is None and can_pack_experts(hidden, ffn, has_biases=experts.options.has_biases)
    places = experts.num_local_slots
    first, second = (places, 2 * ffn, hidden), (places, hidden, ffn)
    load = partial(
        weights.load_experts,
        packable=packable,
        full_precision=not weights.have_same_format([(first, gate_up), (second, down)]),
    )
    return StackedExperts(
        gate_up=load(first, gate_up, gated=True),
        down=load(second, down),
        gate_up_bias=_load_bias(weights, at, tensors.gate_up_bias, (count, 2 * ffn), places, order),
        down_bias=keep_down_bias(weights, _load_bias(weights, at, tensors.down_bias, (count, hidden), places, "rows")),
    )


def keep_down_bias(weights: Weights, bias: Tensor | None) -> Tensor | None:
    """Return the bias, or zeros on ranks that do not add it: ranks' outputs are summed, and one rank adds the bias."""
    return bias if bias is None or weights.shard.has_expert_bias else weights.transform(bias, torch.zeros_like)


def _load_bias(
    weights: Weights, at: str, name: str, shape: tuple[int, int], places: int, order: GateUpOrder
) -> Tensor | None:
    """Load the biases of a layer's experts into a tensor with room for `places` experts."""
    if not name:
        return None
    select = partial(_select_first, shape[0], _separate_bias if order == "interleaved_columns" else _select_all)
    return weights.stack_experts((places, shape[1]), [StackSource(f"{at}.{name}", shape, select)], torch.float32)


def _select_rows(expert: int, first: int, count: int, whole: Tensor) -> Tensor:
    return whole[expert, first : first + count]


def _select_first(count: int, view: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
    """Return what `view` makes of the first `count` experts of the stacked tensor `whole`.

    `view`: returns a view with other dimensions, as a tensor of the checkpoint has them."""
    return view(whole[:count])


def _select_all(whole: Tensor) -> Tensor:
    return whole


def _transpose(whole: Tensor) -> Tensor:
    return whole.transpose(1, 2)


def _separate_columns(whole: Tensor) -> Tensor:
    """Return a view [experts, hidden, ffn, 2], in which gate and up alternate."""
    experts, rows, hidden = whole.shape
    return whole.view(experts, 2, rows // 2, hidden).permute(0, 3, 2, 1)


def _separate_bias(whole: Tensor) -> Tensor:
    experts, rows = whole.shape
    return whole.view(experts, 2, rows // 2).transpose(1, 2)


_GATE_UP_VIEWS: dict[GateUpOrder, Callable[[Tensor], Tensor]] = {
    "rows": _select_all,
    "columns": _transpose,
    "interleaved_columns": _separate_columns,
}
