"""run_routed_experts, add_selected_experts: choose the kernels that compute the experts of rows on an H100 or H200.

Up to 8 rows, the kernels of `grouped.py` select the experts themselves and add the outputs to the residual. More rows
are sorted by expert. With few rows of each expert, packed experts (uw12) use the kernels of `grouped.py`, and plain
ones those of `triton/grouped.py`; with many, both use `grouped_wide.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda import grouped, grouped_wide, routing
from emberline.kernels.cuda.grouped import ExpertMatrices, GroupedPlan
from emberline.kernels.cuda.grouped_wide import ExpertTilePlan
from emberline.kernels.cuda.uw12 import UW12Weight
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.packed_weight import PackedExperts
from emberline.kernels.triton import experts as triton_experts
from emberline.kernels.triton.routing import SortedRows

# The fastest plans of some that were measured on an H200 with the experts of Qwen3-30B-A3B: for plain and packed ones.
FEW_ROWS_GATE_UP = {False: GroupedPlan(2, 8, 2), True: GroupedPlan(2, 8, 2)}
FEW_ROWS_STAGES = {False: 3, True: 3}  # of `add_down`
# Packed experts with up to so many rows each on average use these plans of `grouped.py`, with tiles of so many rows.
MAX_GROUPED_ROWS, GROUPED_TILE_ROWS, GROUPED_PLAN = 2.5, 8, GroupedPlan(4, 4, 2, 2)
# Pairs (rows of an expert on average, plan): the kernels of `grouped_wide.py` for up to so many rows.
WIDE_PLANS = ((20.0, grouped_wide.FEW_ROWS), (96.0, grouped_wide.SOME_ROWS), (1e9, grouped_wide.MANY_ROWS))
MIN_PLAIN_WIDE_ROWS = 96.0  # with fewer rows of plain experts, the kernels of Triton are faster
MAX_HEADER_STRIDE = 512  # bytes of packed weights' headers that fit into a slot of `add_down`


def add_selected_experts(x: Tensor, normed: Tensor, logits: Tensor, mixture: Mixture) -> bool:
    """Add the outputs of the rows' experts to x in place, if there are few rows; return whether that was done.

    The router's logits must come from the preceding kernel.
    """
    experts, rules, rows = mixture.experts, mixture.routing, len(x)
    assert isinstance(experts, StackedExperts)
    if rows > grouped.MAX_SELECTING_ROWS or not routing.supports(logits.shape[1], rules) or not x.is_contiguous():
        return False
    if mixture.clamp is not None or experts.gate_up_bias is not None or rules.scales_inputs:
        return False
    gate_up, down = view_matrices(experts.gate_up, gated=True), view_matrices(experts.down)
    if gate_up is None or down is None or down.header_stride > MAX_HEADER_STRIDE or x.dtype is not torch.bfloat16:
        return False
    inner = grouped.select_and_multiply_gate_up(normed, logits, rules, gate_up, FEW_ROWS_GATE_UP[gate_up.is_packed])
    plan = GroupedPlan(1, grouped.choose_down_warps(down.k), FEW_ROWS_STAGES[down.is_packed])
    grouped.add_down(x, inner, logits, rules, down, plan)
    return True


class RoutedOutputs(NamedTuple):
    """The outputs of each row's experts, as arguments of `add_expert_outputs`."""

    outputs: Tensor
    sorted_rows: SortedRows | None = None  # None: in the order of assignments, and multiplied by their weights


def run_routed_experts(normed: Tensor, logits: Tensor, mixture: Mixture) -> RoutedOutputs:
    """Return the outputs of each row's experts.

    `normed`: inputs of the experts. `logits`: of the router, float32.
    """
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts)
    gate_up, down = view_matrices(experts.gate_up, gated=True), view_matrices(experts.down)
    average = len(normed) * rules.experts_per_row / logits.shape[1]
    plan = None
    if gate_up is not None and down is not None and can_use_tiles(normed, mixture, gate_up, down):
        plan = choose_tile_plan(average, gate_up, down)
    if plan is not None and gate_up is not None and down is not None:
        rows = routing.route_rows(logits, rules, plan.tile_rows)
        x = normed if plan.tile_rows == grouped_wide.BOX_ROWS else routing.sort_rows(normed, rows)
        inner = grouped_wide.multiply_tiles(x, gate_up, rows, plan)
        return RoutedOutputs(grouped_wide.multiply_tiles(inner, down, rows, plan), rows)
    if gate_up is None or down is None or not (gate_up.is_packed and down.is_packed):
        outputs = triton_experts.run_routed_experts(normed, logits, mixture, pdl=True, route=routing.route_rows)
        return RoutedOutputs(outputs)
    assert mixture.clamp is None and experts.gate_up_bias is None, "packed experts have no biases"
    rows = routing.route_rows(logits, rules, GROUPED_TILE_ROWS)
    inner = grouped.multiply_gate_up(normed, gate_up, rows, GROUPED_PLAN, scaled=rules.scales_inputs)
    return RoutedOutputs(grouped.multiply_down(inner, down, rows, GROUPED_PLAN, scaled=not rules.scales_inputs))


def can_use_tiles(normed: Tensor, mixture: Mixture, gate_up: ExpertMatrices, down: ExpertMatrices) -> bool:
    """Return whether the kernels of `grouped_wide.py` support the mixture."""
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts)
    has_extras = mixture.clamp is not None or experts.gate_up_bias is not None or rules.scales_inputs
    same = gate_up.is_packed == down.is_packed and normed.dtype is torch.bfloat16
    return same and not has_extras and routing.supports(mixture.router.n, rules)


def choose_tile_plan(average: float, gate_up: ExpertMatrices, down: ExpertMatrices) -> ExpertTilePlan | None:
    """Return the plan for so many rows of an expert on average; None if other kernels are faster or needed."""
    if average <= (MAX_GROUPED_ROWS if gate_up.is_packed else MIN_PLAIN_WIDE_ROWS):
        return None
    plan = next(plan for rows, plan in WIDE_PLANS if average <= rows)
    return plan if plan.supports(gate_up) and plan.supports(down) else None


def view_matrices(part: Tensor | PackedExperts, *, gated: bool = False) -> ExpertMatrices | None:
    """Return the matrices of experts for the kernels of `grouped.py`; None if these do not support them."""
    data = part if isinstance(part, Tensor) else part.handle
    if isinstance(data, UW12Weight):
        assert isinstance(part, PackedExperts)
        return ExpertMatrices(data, part.n, part.k, gated)
    if not isinstance(data, Tensor) or data.dtype is not torch.bfloat16:
        return None
    _, n, k = data.shape
    return ExpertMatrices(data, n, k, gated) if n % 64 == k % 64 == 0 else None
