"""What the Triton kernels of mixtures of experts must do, on any device, compared with `kernels.reference`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import BF16, F32, assert_close, random

from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.mixture import ClampedSwiGLU, Mixture, Routing, StackedExperts
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.reference import ReferenceBackend, select_experts
from emberline.kernels.triton.grouped import ProductTile, add_expert_outputs, multiply_down, multiply_gate_up
from emberline.kernels.triton.norm import rms_norm
from emberline.kernels.triton.router import norm_and_score
from emberline.kernels.triton.routing import SortedRows, route_rows

F64 = torch.float64


@dataclass(frozen=True)
class RoutingCase:
    """Rules of a family, without tensors."""

    experts: int
    rules: dict[str, Any] = field(default_factory=dict)
    has_correction: bool = False

    def make(self, device: str) -> Routing:
        correction = random(self.experts, device=device) * 0.3 if self.has_correction else None
        return Routing(**{"experts_per_row": 2, **self.rules}, correction=correction)


ROUTINGS = {
    "mixtral": RoutingCase(8, {"renormalize": True}),
    "qwen3": RoutingCase(20, {"experts_per_row": 8, "renormalize": True}),
    "llama4": RoutingCase(5, {"experts_per_row": 1, "scores": "sigmoid", "scales_inputs": True}),
    "gpt-oss": RoutingCase(6, {"experts_per_row": 4, "renormalize": True}),
    "deepseek-v2": RoutingCase(20, {"experts_per_row": 6, "groups": 5, "groups_per_row": 3, "scale": 16.0}),
    "deepseek-v3": RoutingCase(
        24,
        {
            "experts_per_row": 8,
            "scores": "sigmoid",
            "renormalize": True,
            "groups": 8,
            "groups_per_row": 4,
            "group_best": 2,
            "scale": 2.5,
        },
        has_correction=True,
    ),
    "glm4": RoutingCase(6, {"scores": "sigmoid", "renormalize": True, "scale": 0.4}, has_correction=True),
    "all": RoutingCase(5, {"experts_per_row": 5}),
}


def check_routing(device: str, name: str, rows: int, tile_rows: int, *, pdl: bool = False) -> None:
    case = ROUTINGS[name]
    routing, logits = case.make(device), random(rows, case.experts, device=device) * 3
    logits[::3, 1 : case.experts // 2] = logits[::3, :1]  # equal ones, of which the first are selected
    found = route_rows(logits, routing, tile_rows, pdl=pdl)
    weights, chosen = select_experts(logits.cpu(), _on_cpu(routing))
    assert torch.equal(found.chosen.cpu().view(rows, -1), chosen.int())
    torch.testing.assert_close(found.weights.cpu().view(rows, -1), weights, rtol=1e-5, atol=1e-7)
    check_sorted(found, case.experts)


def _on_cpu(routing: Routing) -> Routing:
    rules = {name: getattr(routing, name) for name in Routing.__dataclass_fields__}
    return Routing(**{name: rule.cpu() if isinstance(rule, Tensor) else rule for name, rule in rules.items()})


def check_sorted(rows: SortedRows, experts: int) -> None:
    """Assert that the tiles hold each assignment once, in order, and nothing else."""
    chosen, size, tiles = rows.chosen.cpu(), rows.tile_rows, int(rows.num_tiles)
    wanted: list[tuple[int, list[int]]] = []
    for expert in range(experts):
        own = (chosen == expert).nonzero()[:, 0].tolist()
        wanted += [(expert, own[at : at + size]) for at in range(0, len(own), size)]
    assert tiles == len(wanted) <= rows.max_tiles
    places, counts = rows.order.cpu().view(-1, size), rows.tile_counts.tolist()
    found = [(int(rows.tile_experts[tile]), places[tile, : counts[tile]].tolist()) for tile in range(tiles)]
    assert found == wanted


def check_routing_of_nan(device: str, name: str, rows: int) -> None:
    """Assert that rows with NaN select valid experts: kernels run once before the weights are loaded."""
    case = ROUTINGS[name]
    logits = torch.full((rows, case.experts), torch.nan, device=device)
    logits[1] = torch.inf
    found = route_rows(logits, case.make(device), 16)
    assert bool(((found.chosen >= 0) & (found.chosen < case.experts)).all())
    check_sorted(found, case.experts)


def check_router(
    device: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    count: int,
    *,
    biased: bool = False,
    pdl: bool = False,
    norm_and_score: Callable[..., tuple[Tensor, Tensor]] = norm_and_score,
) -> None:
    """Check the norm and the logits of `norm_and_score` against those of two operations."""
    x = (random(rows, columns + 8, device=device, dtype=dtype) * 3)[:, :columns]
    scale, weight = random(columns, device=device), random(count, columns, device=device, dtype=dtype) / columns**0.5
    bias = random(count, device=device) if biased else None
    normed, logits = norm_and_score(x, scale, 1e-5, weight, bias, pdl=pdl)
    wanted = rms_norm(x, scale, 1e-5, pdl=pdl)
    torch.testing.assert_close(normed, wanted)  # sums may have another order
    near, exact = (F.linear(normed.to(t), weight.to(t), None if bias is None else bias.to(t)) for t in (F32, F64))
    assert logits.dtype is F32
    assert_close(logits, near, exact)


def check_products(
    device: str,
    dtype: torch.dtype,
    name: str,
    rows: int,
    sizes: tuple[int, int],
    tile_rows: int,
    tiles: tuple[ProductTile, ProductTile],
    *,
    biased: bool = False,
    clamp: ClampedSwiGLU | None = None,
    pdl: bool = False,
) -> None:
    """Check both products of experts against float64. `sizes`: of the hidden state and of an expert's inner width."""
    hidden, width = sizes
    case = ROUTINGS[name]
    routing, count = case.make(device), case.experts
    found = route_rows(random(rows, count, device=device), routing, tile_rows, pdl=pdl)
    x = random(rows, hidden, device=device, dtype=dtype)
    gate_up = random(count, 2 * width, hidden, device=device, dtype=dtype) / hidden**0.5
    down = random(count, hidden, width, device=device, dtype=dtype) / width**0.5
    biases = [random(count, n, device=device) if biased else None for n in (2 * width, hidden)]
    scaled = routing.scales_inputs
    kinds: dict[str, Any] = {"clamp": clamp, "scaled": scaled, "pdl": pdl}
    inner = multiply_gate_up(x, gate_up, found, tiles[0], bias=biases[0], **kinds)
    experts, weights = found.chosen.long(), found.weights[:, None]
    each = x.repeat_interleave(routing.experts_per_row, 0)
    near, exact = (
        _activate(each.to(t) * (weights.to(t) if scaled else 1), gate_up.to(t), biases[0], experts, clamp)
        for t in (F32, torch.float64)
    )
    assert_close(inner, near.to(dtype), exact)
    outputs = multiply_down(inner, down, found, tiles[1], bias=biases[1], scaled=not scaled, pdl=pdl)
    factor = torch.ones_like(weights) if scaled else weights
    near, exact = (_apply(inner.to(t), down.to(t), biases[1], experts) * factor.to(t) for t in (F32, torch.float64))
    assert_close(outputs, near.to(dtype), exact)
    again = multiply_down(inner, down, found, tiles[1], bias=biases[1], scaled=not scaled, pdl=pdl)
    assert torch.equal(outputs, again)


def _apply(x: Tensor, matrices: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert.

    One expert follows the other: a copy of its matrix for each row would take gigabytes."""
    y = x.new_zeros(len(x), matrices.shape[1])
    for expert in experts.unique().tolist():
        rows = (experts == expert).nonzero()[:, 0]
        y[rows] = x[rows] @ matrices[expert].T
    return y if bias is None else y + bias[experts].to(y.dtype)


def _activate(x: Tensor, matrices: Tensor, bias: Tensor | None, experts: Tensor, clamp: ClampedSwiGLU | None) -> Tensor:
    gate, up = _apply(x, matrices, bias, experts).chunk(2, dim=1)
    if clamp is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * (gate * clamp.alpha).sigmoid() * (up + 1)


def check_sums(
    device: str, dtype: torch.dtype, rows: int, columns: int, top: int, shared: str, *, pdl: bool = False
) -> None:
    """Check the sum of the outputs of experts. `shared`: "", "scaled" or "gated"."""
    x = random(rows, columns + 8, device=device, dtype=dtype)[:, :columns]
    outputs = random(rows * top, columns, device=device, dtype=dtype)
    extra = random(rows, columns, device=device, dtype=dtype) if shared else None
    gate = random(rows, 1, device=device) if shared == "gated" else None
    scale = 0.4 if shared else 1.0
    near, exact = (
        x.to(t)
        + (0 if extra is None else extra.to(t) * scale * (1 if gate is None else gate.to(t).sigmoid()))
        + outputs.view(rows, top, columns).to(t).sum(1)
        for t in (F32, torch.float64)
    )
    kinds: dict[str, Any] = {"shared": extra, "shared_gate": gate, "shared_scale": scale, "pdl": pdl}
    again = x.clone()
    assert add_expert_outputs(x, outputs, top, **kinds) is x
    assert_close(x, near.to(dtype), exact)
    places = torch.randperm(rows * top, device=device)
    elsewhere = torch.empty_like(outputs).index_copy_(0, places, outputs)
    add_expert_outputs(again, elsewhere, top, places=places.int(), **kinds)
    assert torch.equal(again, x)
    before = again.clone()
    halves = torch.full((rows * top,), 0.5, device=device)
    add_expert_outputs(again, elsewhere, top, places=places.int(), weights=halves, pdl=pdl)
    near, exact = (before.to(t) + 0.5 * outputs.view(rows, top, columns).to(t).sum(1) for t in (F32, torch.float64))
    assert_close(again, near.to(dtype), exact)


SMALL = (ProductTile(16, 32, 4, 2), ProductTile(32, 16, 4, 2))
__all__ = ["BF16", "F32", "SMALL"]


def check_dispatch(device: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int], layer: ExpertLayer) -> None:
    """Compare the experts that rows select, and the outputs of given experts of a rank, with the reference."""
    (hidden, width), count, own = sizes, 6, 3
    generator = torch.Generator().manual_seed(rows)
    make = partial(torch.randn, generator=generator)
    gate_up, down = (make(own, *shape).div(8).to(dtype).to(device) for shape in ((2 * width, hidden), (hidden, width)))
    experts = StackedExperts(gate_up, down)
    router = PackedWeight((make(count, hidden) / 4).to(dtype).to(device), count, hidden, dtype, WeightLayout.ROWS)
    mixture = Mixture(
        torch.ones(hidden, device=device),
        1e-6,
        router,
        experts,
        Routing(2, renormalize=True, local_experts=range(3, 6)),
    )
    x = make(rows, hidden).to(dtype).to(device)
    data = router.data.float().cpu()
    plain = StackedExperts(gate_up.cpu(), down.cpu())
    wide = replace(mixture, norm=mixture.norm.cpu(), router=PackedWeight(data, count, hidden, dtype), experts=plain)
    reference = ReferenceBackend()
    expected, found = reference.select_experts(x.float().cpu(), wide), layer.select(x, mixture)
    assert torch.equal(found.numbers.cpu(), expected.numbers) and found.numbers.dtype == torch.int32
    assert torch.allclose(found.weights.cpu(), expected.weights, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
    numbers = torch.arange(rows, dtype=torch.int32, device=device) % own
    outputs = layer.run_assigned_experts(found.normed, numbers, mixture).float().cpu()
    whole = reference.run_experts(found.normed.float().cpu(), numbers.cpu(), wide)
    assert torch.allclose(outputs, whole, atol=0.03 * float(whole.abs().max()))
