"""The CUDA kernels of experts: routing, and products with plain and packed (uw12) matrices, against float32."""

from __future__ import annotations

from dataclasses import replace

import expert_cases
import pytest
import torch
from torch import Tensor

from emberline.kernels.cuda import few_experts, fused_experts, grouped, routed_experts, router, routing
from emberline.kernels.cuda.expert_matrices import ExpertMatrices, interleave_gate_up, pack_experts
from emberline.kernels.cuda.few_experts import GateUpPlan
from emberline.kernels.cuda.grouped import ExpertTilePlan
from emberline.kernels.mixture import Routing, select_experts
from emberline.kernels.packed_weight import PackedExperts, WeightLayout
from emberline.kernels.triton.routing import SortedRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU, BF16 = "cuda", torch.bfloat16
COUNT, HIDDEN, WIDTH, TOP = 20, 512, 256, 4
ROUTINGS = [name for name, case in expert_cases.ROUTINGS.items() if "groups" not in case.rules]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 32), (9, 8), (100, 32), (1500, 128), (5000, 256)])
def test_routing(name: str, rows: int, tile_rows: int) -> None:
    case = expert_cases.ROUTINGS[name]
    rules, logits = case.make(GPU), torch.randn(rows, case.experts, device=GPU) * 3
    logits[::3, 1 : case.experts // 2] = logits[::3, :1]  # equal ones, of which the first are selected
    found = routing.route_rows(logits, rules, tile_rows)
    on_host = replace(rules, correction=None if rules.correction is None else rules.correction.cpu())
    weights, chosen = select_experts(logits.cpu(), on_host)
    assert torch.equal(found.chosen.cpu().view(rows, -1), chosen.int())
    torch.testing.assert_close(found.weights.cpu().view(rows, -1), weights, rtol=1e-5, atol=1e-7)
    check_places(found, case.experts)


@pytest.mark.parametrize("experts", [200, 384, 512])
def test_routing_to_many_experts(experts: int) -> None:
    rules = Routing(8, scores="sigmoid", renormalize=True, correction=torch.randn(experts, device=GPU) * 0.3)
    logits = torch.randn(70, experts, device=GPU) * 3
    found = routing.route_rows(logits, rules, 8)
    assert rules.correction is not None
    weights, chosen = select_experts(logits.cpu(), replace(rules, correction=rules.correction.cpu()))
    assert torch.equal(found.chosen.cpu().view(70, -1), chosen.int())
    torch.testing.assert_close(found.weights.cpu().view(70, -1), weights, rtol=1e-5, atol=1e-7)
    check_places(found, experts)


def test_routing_of_nan() -> None:
    logits = torch.full((40, 24), torch.nan, device=GPU)
    logits[1] = torch.inf
    check_places(routing.route_rows(logits, Routing(8, renormalize=True), 16), 24)


def check_places(rows: SortedRows, experts: int) -> None:
    """Assert that each assignment has one place, in a tile of its expert, and that there are no surplus tiles."""
    tiles, size, chosen = int(rows.num_tiles), rows.tile_rows, rows.chosen.cpu().long()
    assert bool(((chosen >= 0) & (chosen < experts)).all()) and rows.places is not None
    places = rows.places.cpu().long()
    assert len(places.unique()) == len(places)
    assert torch.equal(rows.order.cpu()[places], torch.arange(len(places), dtype=torch.int32))
    assert torch.equal(rows.tile_experts.cpu()[places // size].long(), chosen)
    counts = rows.tile_counts.cpu()[:tiles]
    assert bool((places % size < counts[places // size]).all()) and int(counts.sum()) == len(places)
    assert tiles == sum(-(-int(own) // size) for own in chosen.bincount(minlength=experts))


def make_matrices(*, packed: bool, escapes: bool = False) -> tuple[Tensor, Tensor, ExpertMatrices, ExpertMatrices]:
    """Return the matrices of gate and up, and of down, as tensors and as kernels read them."""
    gate_up = torch.randn(COUNT, 2 * WIDTH, HIDDEN, device=GPU, dtype=BF16) / HIDDEN**0.5
    down = torch.randn(COUNT, HIDDEN, WIDTH, device=GPU, dtype=BF16) / WIDTH**0.5
    if escapes:  # too small for the exponents of a row's other weights
        gate_up[:, 5::7, 3::11] *= 2.0**-30
        down[:, 1::5, ::13] *= 2.0**-30
    forms = []
    for matrix, gated in ((gate_up, True), (down, False)):
        data = pack_experts(matrix, gated=gated) if packed else matrix
        assert data is not None
        forms.append(ExpertMatrices(data, matrix.shape[1], matrix.shape[2], gated))
    return gate_up, down, *forms


def compute_outputs(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the outputs of the experts of each row, float32 [rows, top, hidden], one row at a time."""
    outputs = []
    factors = torch.ones(chosen.shape, device=GPU) if factors is None else factors
    for row, experts, factor in zip(x.float(), chosen.long(), factors, strict=True):
        gate, up = (factor[:, None] * (gate_up[experts].float() @ row)).chunk(2, 1)
        inner = (torch.nn.functional.silu(gate) * up).to(BF16).float()
        outputs.append((down[experts].float() @ inner[:, :, None])[:, :, 0])
    return torch.stack(outputs)


def check_error(found: Tensor, wanted: Tensor, bound: float = 0.006) -> None:
    assert bool(found.isfinite().all())
    assert float((found.float() - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("plan", [GateUpPlan(2, 4), GateUpPlan(4, 2)], ids=["two", "four"])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_few_rows(rows: int, plan: GateUpPlan, packed: bool) -> None:
    gate_up, down, *forms = make_matrices(packed=packed, escapes=True)
    x, logits = torch.randn(rows, HIDDEN, device=GPU, dtype=BF16), torch.randn(rows, COUNT, device=GPU)
    correction = torch.randn(COUNT)
    rules = Routing(TOP, scores="sigmoid", renormalize=True, scale=1.7, correction=correction.to(GPU))

    def run(inputs: Tensor, scores: Tensor) -> Tensor:
        state = torch.zeros_like(inputs)
        inner = few_experts.multiply_gate_up(inputs, scores, rules, forms[0], plan)
        return few_experts.add_down(state, inner, scores, rules, forms[1], routed_experts.DOWN_PLAN)

    weights, chosen = select_experts(logits.cpu(), replace(rules, correction=correction))
    outputs = compute_outputs(x, gate_up, down, chosen.to(GPU)) * weights.to(GPU)[:, :, None]
    found = run(x, logits)
    check_error(found, outputs.sum(1))
    for row in range(rows):  # a row's result does not depend on the others
        assert torch.equal(run(x[row : row + 1], logits[row : row + 1])[0], found[row])


PLANS = {f"{plan.groups}x{plan.tile_rows}": plan for _, plan in routed_experts.PACKED_PLANS}
PLANS["unshared"] = ExpertTilePlan(2, 256)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("rows", [3, 100, 700, 2500])
def test_tiles(name: str, rows: int, packed: bool) -> None:
    """Rows are also multiplied by their weights before the first product, as some models do."""
    plan = PLANS[name]
    gate_up, down, *forms = make_matrices(packed=packed, escapes=True)
    x, logits = torch.randn(rows, HIDDEN, device=GPU, dtype=BF16), torch.randn(rows, COUNT, device=GPU)
    logits[: rows // 2, 7] += 4  # one expert has many rows
    found = routing.route_rows(logits, Routing(TOP, renormalize=True), plan.tile_rows)
    inputs = x if plan.gathers else routing.sort_rows(x, found)
    some = torch.randperm(rows, device=GPU)[:200]
    assert found.places is not None
    places, chosen = (table.view(rows, TOP)[some] for table in (found.places.long(), found.chosen))
    for scaled in (False, True):
        inner = grouped.multiply_tiles(inputs, forms[0], found, plan, scaled=scaled)
        outputs = grouped.multiply_tiles(inner, forms[1], found, plan)
        factors = found.weights.view(rows, TOP)[some] if scaled else torch.ones(len(some), TOP, device=GPU)
        check_error(outputs[places], compute_outputs(x[some], gate_up, down, chosen, factors))


@pytest.mark.parametrize("rows", [1, 9, 33, 64])
def test_both_products_in_one_kernel(rows: int) -> None:
    gate_up, down, *forms = make_matrices(packed=True, escapes=True)
    x, logits = torch.randn(rows, HIDDEN, device=GPU, dtype=BF16), torch.randn(rows, COUNT, device=GPU)
    logits[:40, 7] += 4  # one expert has several tiles
    correction = torch.randn(COUNT)
    rules = Routing(TOP, scores="sigmoid", renormalize=True, scale=1.7, correction=correction.to(GPU))

    def run(inputs: Tensor, scores: Tensor) -> Tensor:
        outputs, places, weights = fused_experts.run_selected(inputs, scores, rules, *forms)
        return outputs[places.view(len(inputs), TOP).long()].float() * weights.view(-1, TOP, 1)

    found = run(x, logits)
    weights, chosen = select_experts(logits.cpu(), replace(rules, correction=correction))
    check_error(found, compute_outputs(x, gate_up, down, chosen.to(GPU)) * weights.to(GPU)[:, :, None])
    for _ in range(20):  # counters are zero again after each launch
        assert torch.equal(run(x, logits), found)
    for row in (0, rows - 1):  # a row's result does not depend on the others
        assert torch.equal(run(x[row : row + 1], logits[row : row + 1])[0], found[row])


@pytest.mark.parametrize("count", [20, 128])
@pytest.mark.parametrize("rows", [1, 16, 17, 250])
def test_norm_and_logits(rows: int, count: int) -> None:
    for biased in (False, True):
        expert_cases.check_router(
            GPU, BF16, rows, 2048, count, biased=biased, pdl=True, norm_and_score=router.norm_and_score
        )


def test_places_of_groups() -> None:
    rules = Routing(4, groups=4, groups_per_row=2)
    check_places(routing.route_rows(torch.randn(300, 24, device=GPU), rules, 32), 24)


@pytest.mark.parametrize("gated", [False, True])
def test_packed_values_are_those_of_the_tensor(gated: bool) -> None:
    from emberline.kernels.cuda import uw12

    stack = torch.randn(5, 256, 128, device=GPU, dtype=BF16)
    packed = pack_experts(stack, gated=gated)
    assert packed is not None
    values = uw12.unpack(packed, torch.empty(5 * 256, 128, device=GPU, dtype=BF16), pdl=False)
    wanted = interleave_gate_up(stack) if gated else stack
    assert torch.equal(values.view(stack.shape), wanted)


def test_view_of_experts() -> None:
    stack = torch.randn(5, 256, 128, device=GPU, dtype=BF16)
    assert routed_experts.view_matrices(stack) == ExpertMatrices(stack, 256, 128)
    kept = PackedExperts(5, 256, 128, WeightLayout.ROWS, stack, stack.nbytes)
    assert routed_experts.view_matrices(kept) == ExpertMatrices(stack, 256, 128)
    assert routed_experts.view_matrices(stack.float()) is None
    assert routed_experts.view_matrices(stack[:, :100].contiguous()) is None
