"""pack_experts, run_routed_experts: experts whose matrices are narrow codes.

4-bit codes are computed by `narrow.py`, or with many rows by `narrow_wide.py`, float8 codes by `triton/narrow.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from emberline.kernels.cuda import narrow, narrow_wide
from emberline.kernels.cuda.narrow_layout import NarrowWeight, pack
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.packed_weight import PackedExperts, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton import experts as triton_experts
from emberline.kernels.triton import narrow as triton_narrow
from emberline.kernels.triton import routing

MIN_WIDE_ROWS = 8  # rows of an expert on average from which the kernels for many rows are faster


def pack_experts(matrices: QuantisedMatrix) -> PackedExperts | None:
    """Return the matrices of all experts of a layer as the kernels read them; None if no kernel can."""
    handle = pack(matrices) or matrices
    if not isinstance(handle, NarrowWeight) and not triton_narrow.supports(matrices):
        return None
    return PackedExperts(len(matrices.codes), matrices.n, matrices.k, WeightLayout.QUANTISED, handle, handle.nbytes)


def has_narrow_codes(mixture: Mixture) -> bool:
    experts = mixture.experts
    assert isinstance(experts, StackedExperts)
    return isinstance(experts.gate_up, PackedExperts) and experts.gate_up.layout is WeightLayout.QUANTISED


def run_routed_experts(normed: Tensor, logits: Tensor, mixture: Mixture) -> Tensor:
    """Return the outputs [rows * experts per row, hidden] of each row's experts, multiplied by their weights."""
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts)
    assert isinstance(experts.gate_up, PackedExperts) and isinstance(experts.down, PackedExperts)
    gate_up, down, scaled = experts.gate_up.handle, experts.down.handle, rules.scales_inputs
    biases, assignments = (experts.gate_up_bias, experts.down_bias), len(normed) * rules.experts_per_row
    if isinstance(gate_up, NarrowWeight) and isinstance(down, NarrowWeight):
        many = assignments > MIN_WIDE_ROWS * logits.shape[1] and gate_up.n // 2 % 32 == 0
        kernels: Any = narrow_wide if many else narrow
        rows = routing.route_rows(logits, rules, kernels.choose_tile_rows(assignments, logits.shape[1]), pdl=True)
        inner = kernels.multiply_gate_up(normed, gate_up, rows, bias=biases[0], clamp=mixture.clamp, scaled=scaled)
        outputs: Tensor = kernels.multiply_down(inner, down, rows, bias=biases[1], scaled=not scaled)
        return outputs
    assert isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix), "both matrices have one format"
    tiles = triton_experts.choose_tiles(assignments, logits.shape[1], normed.dtype)
    rows = routing.route_rows(logits, rules, tiles.rows, pdl=True)
    inner = triton_narrow.multiply_gate_up(
        normed, gate_up, rows, tiles.gate_up, bias=biases[0], clamp=mixture.clamp, scaled=scaled, pdl=True
    )
    return triton_narrow.multiply_down(inner, down, rows, tiles.down, bias=biases[1], scaled=not scaled, pdl=True)
