"""The GEMM for prompts is close to exact sums, and gives the same bits in any batch, plan and launch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import linear_checks
import pytest
import torch
import torch.nn.functional as F
from gated_weights import interleaved
from gpu_settings import needs_hopper_kernels
from linear_cases import assert_close, poisoned, random, weight
from torch import Tensor

from emberline.kernels.cuda.gemm import PLANS, STAGES_BY_WIDTH, GemmPlan, choose_plan, linear, supports
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight

pytestmark = needs_hopper_kernels

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (129, 200, 256, 1000, 2048)
# (k, n): the layers of Llama 3.1 8B, some narrower; of Qwen and SmolLM2; one unit of k; many tiles; ragged tails
SHAPES = [(4096, 6144), (4096, 4096), (14336, 1024), (896, 1152), (576, 960), (1536, 576), (64, 64), (320, 192)]
SHAPES += [(192, 40000), (960, 2624), (128, 320)]

run = partial(linear_checks.run_linear, linear)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_integers(*shape: int, most: int = 3) -> Tensor:
    """Return small integers, whose products are summed without rounding."""
    return torch.randint(-most, most + 1, shape, device="cuda").to(BF16)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_store(m: int, k: int, n: int) -> None:
    x, w = random(m, k), weight(n, k)
    assert_close(run(x, w), F.linear(x, w.data), x.double() @ w.data.double().T)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_add(m: int, k: int, n: int) -> None:
    x, w, residual = random(m, k), weight(n, k), random(m, n)
    exact = residual.double() + x.double() @ w.data.double().T
    added = linear(x, w, out=poisoned(m, n), residual=residual, pdl=False)
    assert_close(added, torch.addmm(residual, x, w.data.T), exact)
    in_place = residual.clone()
    linear(x, w, out=in_place, residual=in_place, pdl=False)
    assert torch.equal(in_place, added)


@pytest.mark.parametrize("k,half", [(4096, 1024), (4096, 4096), (576, 1536), (128, 32), (1024, 96), (192, 20000)])
@pytest.mark.parametrize("m", ROWS)
def test_gated(m: int, k: int, half: int) -> None:
    """The result is bitwise equal to the product followed by torch's silu and multiplication."""
    x, gate, up = random(m, k), random(half, k, scale=2 * k**-0.5), random(half, k, scale=k**-0.5)
    w = BF16Weight(interleaved(gate, up))
    ours = linear(x, w, out=poisoned(m, half), gated=True, pdl=False)
    assert torch.equal(ours, linear_checks.apply_gates(run(x, w)))
    plain = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert_close(ours, F.silu(F.linear(x, gate)) * F.linear(x, up), plain)


def test_every_gate_value() -> None:
    """All bf16 values, except those whose square underflows, reach the epilogue unchanged."""
    bits = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(BF16)
    gates = bits[bits.isfinite() & (bits.abs() > 1e-15) & (bits.abs() < 1e15)]
    m = 2048
    gates = F.pad(gates, (0, -len(gates) % m), value=1.0).view(m, -1)
    k = -(-gates.shape[1] // 64) * 64
    x, one_hot = F.pad(gates, (0, k - gates.shape[1])), torch.eye(k, device="cuda", dtype=BF16)
    w = BF16Weight(interleaved(one_hot, one_hot))
    ours = linear(x, w, out=poisoned(m, k), gated=True, pdl=False)
    assert torch.equal(ours, F.silu(x) * x)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.width}x{plan.cluster}")
@pytest.mark.parametrize("m", (129, 385, 1000))
def test_every_output_is_at_its_position(m: int, plan: GemmPlan) -> None:
    """Integers are not rounded, so results are equal; rows beyond the last stay unwritten."""
    for k, n in ((64, 64), (128, 1344), (704, 576), (192, 9792)):
        x, w, residual = random_integers(m, k), BF16Weight(random_integers(n, k)), random_integers(m, n, most=100)
        exact = x.float() @ w.data.float().T
        for gated, added in ((False, None), (False, residual), (True, None)):
            room = poisoned(m + 300, n // 2 if gated else n)
            ours = linear(x, w, out=room[:m], residual=added, gated=gated, plan=plan, pdl=False)
            expected = (exact if added is None else exact + added.float()).to(BF16)
            assert torch.equal(ours, linear_checks.apply_gates(expected) if gated else expected), (k, n, gated)
            assert room[m:].isnan().all()


@pytest.mark.parametrize("k,n", SHAPES)
def test_row_is_independent_of_the_batch(k: int, n: int) -> None:
    x, w = random(2048, k), weight(n, k)
    every = run(x, w)
    for m in (129, 200, 256, 257, 500, 1000, 2047):
        assert torch.equal(run(x[:m], w), every[:m]), m
        assert torch.equal(run(x[-m:], w), every[-m:]), m
    order = torch.randperm(len(x), device="cuda")
    assert torch.equal(run(x[order], w), every[order])


@pytest.mark.parametrize("m", (129, 256, 700, 2048))
def test_every_plan_has_the_same_bits(m: int) -> None:
    n, k = 3136, 1344
    x, w, residual = random(m, k), weight(n, k), random(m, n)
    store, expected = run(x, w, plan=PLANS[0]), []
    for plan in PLANS:
        for band, lag in ((8, 0), (8, 1), (1, 2), (3, 3)):
            tried = replace(plan, band=band, lag=lag)
            for pdl in (False, True):
                assert torch.equal(run(x, w, plan=tried, pdl=pdl), store), tried
            active = linear(x, w, out=poisoned(m, n // 2), gated=True, plan=tried)
            assert torch.equal(active, linear_checks.apply_gates(store)), tried
            expected.append(linear(x, w, out=poisoned(m, n), residual=residual, plan=tried))
            assert torch.equal(expected[0], expected[-1]), tried


def test_results_are_reproducible() -> None:
    x, w, residual = random(2048, 4096), weight(6144, 4096), random(2048, 6144)
    first = linear(x, w, out=poisoned(2048, 6144), residual=residual)
    for _ in range(30):
        assert torch.equal(linear(x, w, out=poisoned(2048, 6144), residual=residual), first)


@pytest.mark.parametrize("m", (129, 1000))
def test_strided_input_rows(m: int) -> None:
    linear_checks.check_strided_input_rows(linear, m)


@pytest.mark.parametrize("m", (200, 1000))
def test_nan_row_does_not_affect_others(m: int) -> None:
    x, w = random(m, 1024), weight(576, 1024)
    clean, active = run(x, w), linear(x, w, out=poisoned(m, 288), gated=True, pdl=False)
    x[3] = torch.inf
    others = [row for row in range(m) if row != 3]
    dirty, dirty_active = run(x, w), linear(x, w, out=poisoned(m, 288), gated=True, pdl=False)
    assert not dirty[3].isfinite().any() and not dirty_active[3].isfinite().any()
    assert torch.equal(dirty[others], clean[others]) and torch.equal(dirty_active[others], active[others])


@pytest.mark.parametrize("m", (129, 300, 1024))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    weights = linear_checks.make_decoder_weights(weight)
    linear_checks.check_dependent_launches(linear, random(m, 4096, scale=0.5), weights)


@pytest.mark.parametrize("m,n,k", [(128, 64, 64), (32769, 64, 64), (256, 96, 64), (256, 64, 96), (256, 0, 64)])
def test_unsupported_shapes(m: int, n: int, k: int) -> None:
    assert not supports(m, n, k)
    with pytest.raises(AssertionError):
        linear(random(m, k), BF16Weight(random(n, k)), out=poisoned(m, n))


def test_chosen_plan_fits_the_device() -> None:
    for k, n in [*SHAPES, (4096, 28672), (14336, 4096), (4096, 128256)]:
        for m in (*ROWS, 8192, 32768):
            plan = choose_plan(m, n, k)
            assert plan.shared_bytes <= MAX_SHARED_BYTES and plan.lag < STAGES_BY_WIDTH[plan.width]
