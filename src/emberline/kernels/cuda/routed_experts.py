"""run_routed_experts, add_selected_experts: choose the kernels that compute the experts of rows on an H100 or H200.

For few rows, the kernels of `few_experts.py` select the experts themselves and add the outputs to the residual. More
rows are sorted by expert, for the kernels of `grouped.py`, or of `triton/grouped.py` where these are faster or needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda import few_experts, fused_experts, grouped, routing
from emberline.kernels.cuda.expert_matrices import ExpertMatrices
from emberline.kernels.cuda.few_experts import DownPlan, GateUpPlan
from emberline.kernels.cuda.grouped import ExpertTilePlan
from emberline.kernels.cuda.uw12 import UW12Weight
from emberline.kernels.mixture import Mixture, Routing, StackedExperts
from emberline.kernels.packed_weight import PackedExperts
from emberline.kernels.triton import experts as triton_experts
from emberline.kernels.triton import routing as triton_routing
from emberline.kernels.work_limits import PACKED_TILE_ROWS, PLAIN_TILE_ROWS

# The fastest plans of some that were measured on an H200 with the experts of Qwen3-30B-A3B.
MAX_SELECTED_ROWS = 2  # rows of x up to which the kernels of `few_experts.py` are used
GATE_UP_PLANS = {False: GateUpPlan(2, 4), True: GateUpPlan(4, 2)}  # for plain and packed experts
DOWN_PLAN = DownPlan(12, 3)
MAX_FUSED_ROWS = 0.75  # rows of a packed expert on average up to which one kernel computes both products
# Pairs (rows of an expert on average, plan of both products). None: the kernels of Triton.
PACKED_PLANS = tuple((limit, grouped.PLANS_BY_ROWS[rows]) for limit, rows in PACKED_TILE_ROWS)
PLAIN_PLANS = tuple((limit, grouped.PLANS_BY_ROWS.get(rows)) for limit, rows in PLAIN_TILE_ROWS)


class RoutedOutputs(NamedTuple):
    """The outputs of each row's experts, as arguments of `add_expert_outputs`."""

    outputs: Tensor
    places: Tensor | None = None  # None: in the order of assignments
    weights: Tensor | None = None  # None: outputs are already multiplied by the routing weights


def add_selected_experts(x: Tensor, normed: Tensor, logits: Tensor, mixture: Mixture) -> bool:
    """Add the outputs of the rows' experts to x in place, if there are few rows; return whether that was done.

    The router's logits must come from the preceding kernel.
    """
    experts, rules, rows = mixture.experts, mixture.routing, len(x)
    assert isinstance(experts, StackedExperts)
    if rows > MAX_SELECTED_ROWS or not x.is_contiguous() or not _is_supported(normed, mixture):
        return False
    if rules.scales_inputs or not routing.supports(mixture.router.n, rules):
        return False
    gate_up, down = view_matrices(experts.gate_up, gated=True), view_matrices(experts.down)
    if gate_up is None or down is None:
        return False
    if max(gate_up.header_stride, down.header_stride) > few_experts.MAX_HEADER_STRIDE:
        return False
    inner = few_experts.multiply_gate_up(normed, logits, rules, gate_up, GATE_UP_PLANS[gate_up.is_packed])
    few_experts.add_down(x, inner, logits, rules, down, DOWN_PLAN)
    return True


def run_routed_experts(normed: Tensor, logits: Tensor, mixture: Mixture) -> RoutedOutputs:
    """Return the outputs of each row's experts.

    `normed`: inputs of the experts. `logits`: of the router, float32.
    """
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts)
    gate_up, down = view_matrices(experts.gate_up, gated=True), view_matrices(experts.down)
    plan = None
    if gate_up is not None and down is not None and _is_supported(normed, mixture):
        if uses_fused_kernel(logits, rules, gate_up, down):
            return RoutedOutputs(*fused_experts.run_selected(normed, logits, rules, gate_up, down))
        plan = choose_tile_plan(len(normed) * rules.experts_per_row / logits.shape[1], gate_up, down)
    if gate_up is None or down is None or plan is None:
        is_small = len(normed) * rules.experts_per_row <= triton_routing.ASSIGNMENTS_AT_ONCE[-1]
        route = triton_routing.route_rows if is_small else routing.route_rows
        return RoutedOutputs(triton_experts.run_routed_experts(normed, logits, mixture, pdl=True, route=route))
    rows = routing.route_rows(logits, rules, plan.tile_rows)
    x = normed if plan.gathers else routing.sort_rows(normed, rows)
    inner = grouped.multiply_tiles(x, gate_up, rows, plan, scaled=rules.scales_inputs)
    del x  # so that its memory is free for the outputs, which are written after the inputs were read
    outputs = grouped.multiply_tiles(inner, down, rows, plan)
    return RoutedOutputs(outputs, rows.places, None if rules.scales_inputs else rows.weights)


def uses_fused_kernel(logits: Tensor, rules: Routing, gate_up: ExpertMatrices, down: ExpertMatrices) -> bool:
    """Return whether one kernel computes both products of the experts: if they are packed and have few rows."""
    rows, experts = logits.shape
    is_small = rows * rules.experts_per_row <= MAX_FUSED_ROWS * experts and gate_up.is_packed
    return is_small and routing.supports(experts, rules) and fused_experts.supports(rows, rules, gate_up, down)


def choose_tile_plan(average: float, gate_up: ExpertMatrices, down: ExpertMatrices) -> ExpertTilePlan | None:
    """Return the plan if experts have `average` rows on average; None: other kernels are faster."""
    plans = PACKED_PLANS if gate_up.is_packed or down.is_packed else PLAIN_PLANS
    at = next(i for i, (rows, _) in enumerate(plans) if average <= rows)
    if (plan := plans[at][1]) is None or (plan.supports(gate_up) and plan.supports(down)):
        return plan
    return grouped.TILES_OF_128 if gate_up.is_packed or down.is_packed else None


def view_matrices(part: Tensor | PackedExperts, *, gated: bool = False) -> ExpertMatrices | None:
    """Return the matrices of experts as this package's kernels read them, or None if no kernel supports them."""
    data = part if isinstance(part, Tensor) else part.handle
    if isinstance(data, UW12Weight):
        assert isinstance(part, PackedExperts)
        return ExpertMatrices(data, part.n, part.k, gated)
    if not isinstance(data, Tensor) or data.dtype is not torch.bfloat16:
        return None
    _, n, k = data.shape
    return ExpertMatrices(data, n, k, gated) if n % 128 == k % 64 == 0 else None


def _is_supported(normed: Tensor, mixture: Mixture) -> bool:
    experts = mixture.experts
    assert isinstance(experts, StackedExperts)
    is_plain = mixture.clamp is None and experts.gate_up_bias is None and mixture.routing.local_experts is None
    return normed.dtype is torch.bfloat16 and is_plain
