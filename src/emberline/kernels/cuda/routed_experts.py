"""run_routed_experts, add_selected_experts: choose the kernels that compute the experts of rows on an H100 or H200.

Up to 8 rows, the kernels of `grouped.py` select the experts themselves and add the outputs to the residual. With more
rows, packed experts (uw12) use the kernels of `grouped.py` for rows that are sorted by expert, and plain ones those of
`triton/grouped.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.cuda import grouped, routing
from emberline.kernels.cuda.grouped import ExpertMatrices, GroupedPlan
from emberline.kernels.cuda.uw12 import UW12Weight
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.packed_weight import PackedExperts, WeightLayout
from emberline.kernels.triton import experts as triton_experts

# The fastest plans of some that were measured on an H200 with the experts of Qwen3-30B-A3B: for plain and packed ones.
FEW_ROWS_GATE_UP = {False: GroupedPlan(2, 8, 3), True: GroupedPlan(2, 8, 4)}
FEW_ROWS_STAGES = {False: 3, True: 3}  # of `add_down`
# Pairs (rows of an expert on average, rows of a tile, plan of gate_up, plan of down) for packed experts.
PACKED_PLANS = (
    (2.5, 8, GroupedPlan(4, 4, 3, 2), GroupedPlan(4, 4, 3, 2)),
    (9.0, 16, GroupedPlan(4, 4, 2, 2), GroupedPlan(4, 4, 2, 2)),
    (1e9, 32, GroupedPlan(2, 4, 3, 2, 1), GroupedPlan(2, 4, 3, 2, 1)),
)
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
    inner = grouped.select_and_multiply_gate_up(
        normed, logits, rules, gate_up, FEW_ROWS_GATE_UP[gate_up.is_packed]
    )
    plan = GroupedPlan(1, grouped.choose_down_warps(down.k), FEW_ROWS_STAGES[down.is_packed])
    grouped.add_down(x, inner, logits, rules, down, plan)
    return True


def run_routed_experts(normed: Tensor, logits: Tensor, mixture: Mixture) -> Tensor:
    """Return the outputs [rows * experts per row, hidden] of each row's experts.

    `normed`: inputs of the experts. `logits`: of the router, float32.
    """
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts)
    gate_up, down = view_matrices(experts.gate_up, gated=True), view_matrices(experts.down)
    if gate_up is None or down is None or not (gate_up.is_packed and down.is_packed):
        return triton_experts.run_routed_experts(normed, logits, mixture, pdl=True, route=routing.route_rows)
    assert mixture.clamp is None and experts.gate_up_bias is None, "packed experts have no biases"
    average = len(normed) * rules.experts_per_row / logits.shape[1]
    _, tile_rows, *plans = next(row for row in PACKED_PLANS if average <= row[0])
    rows = routing.route_rows(logits, rules, tile_rows)
    inner = grouped.multiply_gate_up(normed, gate_up, rows, plans[0], scaled=rules.scales_inputs)
    return grouped.multiply_down(inner, down, rows, plans[1], scaled=not rules.scales_inputs)


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
