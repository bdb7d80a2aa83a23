"""add_routed_experts: routes rows to experts and adds the outputs of the experts, with tiles chosen by shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kernels.triton.grouped import ProductTile, add_expert_outputs, multiply_down, multiply_gate_up
from emberline.kernels.triton.routing import route_rows


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    rows: int  # of a tile
    gate_up: ProductTile
    down: ProductTile


FLOAT32_TILES = ExpertTiles(16, ProductTile(32, 32, 4, 2), ProductTile(32, 32, 4, 2))
# Pairs (rows of an expert, tiles): the tiles for bf16 up to so many rows of an expert on average.
BF16_TILES = (
    (8, ExpertTiles(16, ProductTile(32, 128, 4, 5), ProductTile(64, 128, 4, 4))),
    (24, ExpertTiles(32, ProductTile(32, 128, 4, 5), ProductTile(64, 128, 4, 4))),
    (96, ExpertTiles(64, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4))),
)
LARGE_BF16_TILES = ExpertTiles(128, ProductTile(128, 64, 8, 3), ProductTile(256, 64, 8, 3))


def choose_tiles(assignments: int, experts: int, dtype: torch.dtype) -> ExpertTiles:
    """Return the tiles for so many pairs of a row and one of its experts."""
    if dtype is not torch.bfloat16:
        return FLOAT32_TILES
    return next((tiles for rows, tiles in BF16_TILES if assignments <= rows * experts), LARGE_BF16_TILES)


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

    `normed`: inputs of the experts. `logits`: of the router, float32. `shared`, `shared_gate`: outputs of the shared
    expert and the logits of its gate, if they are not added to x yet.
    """
    experts, routing, scale = mixture.experts, mixture.routing, 1.0 if mixture.shared is None else mixture.shared.scale
    assert isinstance(experts, StackedExperts), "a GPU needs stacked experts"
    top, scaled = routing.experts_per_row, routing.scales_inputs
    tiles = choose_tiles(len(x) * top, logits.shape[1], x.dtype)
    rows = route_rows(logits, routing, tiles.rows, pdl=pdl)
    inner = multiply_gate_up(
        normed, experts.gate_up, rows, tiles.gate_up,
        bias=experts.gate_up_bias, clamp=mixture.clamp, scaled=scaled, pdl=pdl,
    )  # fmt: skip
    outputs = multiply_down(inner, experts.down, rows, tiles.down, bias=experts.down_bias, scaled=not scaled, pdl=pdl)
    return add_expert_outputs(x, outputs, top, shared=shared, shared_gate=shared_gate, shared_scale=scale, pdl=pdl)
