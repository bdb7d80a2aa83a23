"""run_routed_experts: routes rows to experts and computes the outputs of the experts, with tiles chosen by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.kernels.mixture import Mixture, Routing, StackedExperts
from emberline.kernels.packed_weight import PackedExperts
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton import narrow, routing
from emberline.kernels.triton.grouped import ProductTile, multiply_down, multiply_gate_up
from emberline.kernels.triton.routing import SortedRows


class RouteRows(Protocol):
    def __call__(self, logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool) -> SortedRows: ...


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    rows: int  # of a tile
    gate_up: ProductTile
    down: ProductTile


FLOAT32_TILES = ExpertTiles(16, ProductTile(32, 32, 4, 2), ProductTile(32, 32, 4, 2))
# Pairs (rows of an expert, tiles): the tiles for bf16 up to so many rows of an expert on average.
# The fastest of some that were measured on an H200 with the experts of Qwen3-30B-A3B and DeepSeek-V2-Lite.
BF16_TILES = (
    (0.125, ExpertTiles(16, ProductTile(64, 64, 4, 6, bulk=True), ProductTile(64, 128, 4, 4, bulk=True))),
    (8, ExpertTiles(16, ProductTile(32, 128, 4, 5, bulk=True), ProductTile(64, 128, 4, 4, bulk=True))),
    (24, ExpertTiles(32, ProductTile(64, 128, 4, 4, bulk=True), ProductTile(64, 128, 4, 4, bulk=True))),
    (80, ExpertTiles(64, ProductTile(64, 64, 4, 4, bulk=True), ProductTile(128, 64, 4, 4, bulk=True))),
)
LARGE_BF16_TILES = ExpertTiles(128, ProductTile(128, 64, 8, 3, bulk=True), ProductTile(128, 64, 8, 3, bulk=True))


def choose_tiles(assignments: int, experts: int, dtype: torch.dtype) -> ExpertTiles:
    """Return the tiles to use. `assignments`: the number of pairs of a row and one of its experts."""
    if dtype is not torch.bfloat16:
        return FLOAT32_TILES
    return next((tiles for rows, tiles in BF16_TILES if assignments <= rows * experts), LARGE_BF16_TILES)


def run_routed_experts(
    normed: Tensor, logits: Tensor, mixture: Mixture, *, pdl: bool = False, route: RouteRows = routing.route_rows
) -> Tensor:
    """Return the outputs [rows * experts per row, hidden] of each row's experts.

    `normed`: inputs of the experts. `logits`: of the router, float32. `route`: sorts the rows by expert.
    """
    experts, rules = mixture.experts, mixture.routing
    assert isinstance(experts, StackedExperts), "a GPU needs stacked experts"
    scaled = rules.scales_inputs
    tiles = choose_tiles(len(normed) * rules.experts_per_row, logits.shape[1], normed.dtype)
    rows = route(logits, rules, tiles.rows, pdl=pdl)
    gate_up, down = find_matrices(experts.gate_up), find_matrices(experts.down)
    inner = (multiply_gate_up if isinstance(gate_up, Tensor) else narrow.multiply_gate_up)(
        normed, gate_up, rows, tiles.gate_up,
        bias=experts.gate_up_bias, clamp=mixture.clamp, scaled=scaled, pdl=pdl,
    )  # fmt: skip
    multiply = multiply_down if isinstance(down, Tensor) else narrow.multiply_down
    outputs = multiply(inner, down, rows, tiles.down, bias=experts.down_bias, scaled=not scaled, pdl=pdl)
    return routing.clear_other_outputs(outputs, rows, rules.local_experts)


def find_matrices(weights: Tensor | PackedExperts) -> Any:
    """Return the matrices of all experts, as a tensor or a QuantisedMatrix."""
    found = weights if isinstance(weights, Tensor) else weights.handle
    assert isinstance(found, Tensor | QuantisedMatrix), "experts in a form that Triton's kernels do not read"
    return found
