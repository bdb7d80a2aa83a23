"""pack_experts, run_routed_experts: experts whose matrices are 4-bit codes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from emberline.kernels.cuda import narrow, narrow_wide, routing
from emberline.kernels.cuda.narrow_layout import FourBitWeight, pack
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.packed_weight import PackedExperts, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton.experts import RouteRows
from emberline.kernels.triton.routing import clear_other_outputs
from emberline.kernels.work_limits import FLOAT4_TILE_ROWS, INT4_TILE_ROWS

# Rows of an expert on average above which the kernels for many rows are faster: between 8 and 16 for float4, where they
# overlap products with decoding. For int4, they wait for the products of each group.
FLOAT4_WIDE_ROWS, INT4_WIDE_ROWS = FLOAT4_TILE_ROWS[0][0], INT4_TILE_ROWS[0][0]


def pack_experts(matrices: QuantisedMatrix, *, gated: bool = False) -> PackedExperts | None:
    """Return the matrices of all experts of a layer as the kernels read them; None if they cannot."""
    if matrices.columns is not None or (packed := pack(matrices, gated=gated)) is None:
        return None
    return PackedExperts(len(packed.data), packed.n, packed.k, WeightLayout.QUANTISED, packed, packed.nbytes, gated)


def find_matrices(mixture: Mixture) -> tuple[FourBitWeight, FourBitWeight] | None:
    """Return the matrices of gate and up, and of down; None if they are not 4-bit codes."""
    experts = mixture.experts
    assert isinstance(experts, StackedExperts)
    if not isinstance(experts.gate_up, PackedExperts) or not isinstance(experts.down, PackedExperts):
        return None
    gate_up, down = experts.gate_up.handle, experts.down.handle
    return (gate_up, down) if isinstance(gate_up, FourBitWeight) and isinstance(down, FourBitWeight) else None


def choose_kernels(assignments: int, count: int, matrices: tuple[FourBitWeight, FourBitWeight]) -> Any:
    """Return the module whose kernels are faster: `narrow` or `narrow_wide`.

    `assignments`: the number of pairs of a row and one of its experts. `count`: the number of experts."""
    is_float4 = matrices[0].format.startswith("Float4")
    has_many_rows = assignments > (FLOAT4_WIDE_ROWS if is_float4 else INT4_WIDE_ROWS) * count
    return narrow_wide if has_many_rows and all(map(narrow_wide.supports_shape, matrices)) else narrow


def run_routed_experts(
    normed: Tensor,
    logits: Tensor,
    mixture: Mixture,
    matrices: tuple[FourBitWeight, FourBitWeight],
    *,
    route: RouteRows = routing.route_rows,
) -> Tensor:
    """Return the outputs [rows * experts per row, hidden] of each row's experts.

    The outputs are multiplied by the routing weights or, with `scales_inputs`, the inputs were. Outputs of experts that
    this rank does not have are 0. `route`: sorts the rows by expert."""
    experts, rules, (gate_up, down) = mixture.experts, mixture.routing, matrices
    assert isinstance(experts, StackedExperts)
    assignments, count, scaled = len(normed) * rules.experts_per_row, logits.shape[1], rules.scales_inputs
    kernels = choose_kernels(assignments, count, matrices)
    rows = route(logits, rules, kernels.choose_tile_rows(assignments, count), pdl=True)
    inner = kernels.multiply_gate_up(
        normed, gate_up, rows, bias=experts.gate_up_bias, clamp=mixture.clamp, scaled=scaled
    )
    outputs: Tensor = kernels.multiply_down(inner, down, rows, bias=experts.down_bias, scaled=not scaled)
    return clear_other_outputs(outputs, rows, rules.local_experts)
