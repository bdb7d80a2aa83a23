"""add_routed_experts: routes rows to experts and adds the outputs of the experts, with tiles chosen by shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.triton import routing
from emberline.kernels.triton.grouped import ProductTile, add_expert_outputs, multiply_down, multiply_gate_up
from emberline.kernels.triton.routing import SortedRows


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    rows: int  # of a tile
    gate_up: ProductTile
    down: ProductTile


FLOAT32_TILES = ExpertTiles(16, ProductTile(32, 32, 4, 2), ProductTile(32, 32, 4, 2))
# Pairs (rows of an expert, tiles): the tiles for bf16 up to so many rows of an expert on average.
# The fastest of some that were measured on an H200 with the experts of Qwen3-30B-A3B.
BF16_TILES = (
    (8, ExpertTiles(16, ProductTile(32, 128, 4, 4), ProductTile(64, 128, 4, 4, bulk=True, prefetch=True))),
    (24, ExpertTiles(32, ProductTile(64, 128, 4, 4, bulk=True), ProductTile(64, 128, 4, 4, bulk=True))),
    (80, ExpertTiles(64, ProductTile(64, 64, 4, 4, bulk=True), ProductTile(128, 64, 4, 4, bulk=True))),
)
LARGE_BF16_TILES = ExpertTiles(128, ProductTile(128, 64, 8, 3, bulk=True), ProductTile(128, 64, 8, 3, bulk=True))


def choose_tiles(assignments: int, experts: int, dtype: torch.dtype) -> ExpertTiles:
    """Return the tiles for so many pairs of a row and one of its experts."""
    if dtype is not torch.bfloat16:
        return FLOAT32_TILES
    return next((tiles for rows, tiles in BF16_TILES if assignments <= rows * experts), LARGE_BF16_TILES)


def route_to_experts(logits: Tensor, mixture: Mixture, dtype: torch.dtype, *, pdl: bool = False) -> SortedRows:
    """Return the experts of each row, in the tiles of `choose_tiles`. `logits`: of the router, float32."""
    rules = mixture.routing
    tiles = choose_tiles(len(logits) * rules.experts_per_row, logits.shape[1], dtype)
    return routing.route_rows(logits, rules, tiles.rows, pdl=pdl)


def multiply_by_experts(normed: Tensor, rows: SortedRows, mixture: Mixture, *, pdl: bool = False) -> Tensor:
    """Return the outputs [assignments, hidden] of each row's experts.

    `normed`: inputs of the experts. `rows`: from `route_to_experts`.
    """
    experts, scaled = mixture.experts, mixture.routing.scales_inputs
    assert isinstance(experts, StackedExperts), "a GPU needs stacked experts"
    tiles = choose_tiles(len(rows.weights), len(experts.down), normed.dtype)
    inner = multiply_gate_up(
        normed, experts.gate_up, rows, tiles.gate_up,
        bias=experts.gate_up_bias, clamp=mixture.clamp, scaled=scaled, pdl=pdl,
    )  # fmt: skip
    return multiply_down(inner, experts.down, rows, tiles.down, bias=experts.down_bias, scaled=not scaled, pdl=pdl)


def add_routed_experts(
    x: Tensor,
    normed: Tensor,
    logits: Tensor,
    mixture: Mixture,
    *,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add the outputs of each row's experts to x in place.

    `shared`, `shared_gate`: outputs of the shared expert and the logits of its gate, if they are not added to x yet.
    """
    rows = route_to_experts(logits, mixture, x.dtype, pdl=pdl)
    outputs, scale = multiply_by_experts(normed, rows, mixture, pdl=pdl), mixture.shared_scale
    top = mixture.routing.experts_per_row
    return add_expert_outputs(x, outputs, top, shared=shared, shared_gate=shared_gate, shared_scale=scale, pdl=pdl)
