"""The skinny linear layer is close to exact sums, and gives the same bits in any batch, plan and launch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from gated_weights import interleaved
from linear_cases import assert_close, poisoned, random, weight
from torch import Tensor

from emberline.kernels.cuda.linear import (
    MAX_SHARED_BYTES,
    BF16Weight,
    SkinnyPlan,
    choose_plan,
    linear,
    make_plan,
    supports,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 32)
# (k, n): the layers of Llama 3.1 8B, narrower; of Qwen and SmolLM2; one unit of k; fewer units than warps; ragged tails
SHAPES = [(4096, 1536), (4096, 4096), (14336, 1024), (4096, 8208), (896, 1152), (576, 960), (1536, 576), (64, 16)]
SHAPES += [(320, 48), (960, 2576), (4096, 6160)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def run(
    x: Tensor, w: BF16Weight, *, dtype: torch.dtype = BF16, plan: SkinnyPlan | None = None, pdl: bool = False
) -> Tensor:
    return linear(x, w, out=poisoned(len(x), w.n, dtype=dtype), plan=plan, pdl=pdl)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_store(m: int, k: int, n: int) -> None:
    x, w = random(m, k), weight(n, k)
    exact = x.double() @ w.data.double().T
    logits = run(x, w, dtype=F32)
    assert_close(logits, torch.mm(x, w.data.T, out_dtype=F32), exact)
    assert_close(run(x, w), F.linear(x, w.data), exact)
    assert torch.equal(run(x, w), logits.to(BF16))


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", (1, 7, 16, 32))
def test_bias_and_residual(m: int, k: int, n: int) -> None:
    """Bias and residual are float32 additions before the single rounding."""
    x, w, bias, residual = random(m, k), weight(n, k), random(n, dtype=F32), random(m, n)
    y = run(x, w, dtype=F32)
    shifted = linear(x, w, out=poisoned(m, n, dtype=F32), bias=bias, pdl=False)
    assert torch.equal(shifted, y + bias)
    assert torch.equal(linear(x, w, out=poisoned(m, n), bias=bias, pdl=False), (y + bias).to(BF16))
    added = linear(x, w, out=poisoned(m, n), residual=residual, pdl=False)
    assert torch.equal(added, (residual.float() + y).to(BF16))
    both = linear(x, w, out=poisoned(m, n), bias=bias, residual=residual, pdl=False)
    assert torch.equal(both, (residual.float() + (y + bias)).to(BF16))
    in_place = residual.clone()
    linear(x, w, out=in_place, residual=in_place, pdl=False)
    assert torch.equal(in_place, added)


@pytest.mark.parametrize("k,half", [(4096, 1024), (4096, 4096), (576, 1536), (896, 4864), (128, 16), (1024, 48)])
@pytest.mark.parametrize("m", (1, 3, 8, 9, 17, 32))
def test_gated(m: int, k: int, half: int) -> None:
    """The result is bitwise equal to the product followed by torch's silu and multiplication."""
    x, gate, up = random(m, k), random(half, k, scale=2 * k**-0.5), random(half, k, scale=k**-0.5)
    bias = random(2 * half, dtype=F32)
    w = BF16Weight(interleaved(gate, up))
    for shift in (None, bias):
        y = linear(x, w, out=poisoned(m, 2 * half), bias=shift, pdl=False)
        parts = y.view(m, half // 16, 2, 16)
        expected = F.silu(parts[:, :, 0]) * parts[:, :, 1]
        ours = linear(x, w, out=poisoned(m, half), bias=shift, gated=True, pdl=False)
        assert torch.equal(ours, expected.reshape(m, half))
    plain = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    theirs = F.silu(F.linear(x, gate)) * F.linear(x, up)
    assert_close(linear(x, w, out=poisoned(m, half), gated=True, pdl=False), theirs, plain)


@pytest.mark.parametrize("k,n", SHAPES)
def test_row_is_independent_of_the_batch(k: int, n: int) -> None:
    x, w = random(32, k), weight(n, k)
    whole = run(x, w, dtype=F32)
    for m in ROWS:
        assert torch.equal(run(x[:m], w, dtype=F32), whole[:m]), m
    for row in (0, 5, 31):
        assert torch.equal(run(x[row : row + 1], w, dtype=F32), whole[row : row + 1]), row
    order = torch.randperm(32, device="cuda")
    assert torch.equal(run(x[order], w, dtype=F32), whole[order])


@pytest.mark.parametrize("m", (5, 13, 30))
@pytest.mark.parametrize("blocks", (1, 2, 3))
@pytest.mark.parametrize("ctas", (5, 16, 264))
def test_every_plan_has_the_same_bits(m: int, blocks: int, ctas: int) -> None:
    n, k = 1552, 1344
    x, w = random(m, k), weight(n, k)
    expected = run(x, w, dtype=F32)
    plan = make_plan(n, k, blocks, choose_plan(m, n, k).tiles, ctas=ctas)
    depths = {1, min(2, plan.stages), plan.stages}
    sets = (0, 1, 2) if plan.grid < -(-n // (16 * blocks)) else (0,)
    for stages, buffers in product(depths, sets):
        changed = replace(plan, stages=stages, buffers=buffers)
        if changed.shared_bytes <= MAX_SHARED_BYTES:
            for pdl in (False, True):
                assert torch.equal(run(x, w, dtype=F32, plan=changed, pdl=pdl), expected), changed


@pytest.mark.parametrize("m", (1, 16, 32))
def test_strided_input_rows(m: int) -> None:
    """x may be a slice of columns of a wider tensor."""
    w = weight(512, 1024)
    wide = random(m, 3072)
    assert torch.equal(run(wide[:, 1024:2048], w), run(wide[:, 1024:2048].contiguous(), w))


def test_nan_row_does_not_affect_others() -> None:
    x, w = random(8, 1024), weight(528, 1024)
    clean = run(x, w)
    x[3] = torch.inf
    dirty = run(x, w)
    assert not dirty[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(dirty[others], clean[others])


def layers(x: Tensor, weights: list[tuple[BF16Weight, ...]], head: BF16Weight, *, pdl: bool) -> Tensor:
    """Run linear layers as a decoder does: each reads the output of the preceding one, and one adds in place."""
    m = len(x)
    hidden = x.clone()
    for qkv, o, gate_up, down in weights:
        mixed = linear(hidden, qkv, out=poisoned(m, qkv.n), pdl=pdl)
        linear(mixed[:, : o.k], o, out=hidden, residual=hidden, pdl=pdl)
        active = linear(hidden, gate_up, out=poisoned(m, gate_up.n // 2), gated=True, pdl=pdl)
        linear(active, down, out=hidden, residual=hidden, pdl=pdl)
    return linear(hidden, head, out=poisoned(m, head.n, dtype=F32), pdl=pdl)


@pytest.mark.parametrize("m", (1, 8, 12, 32))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    weights = [(weight(6144, 4096), weight(4096, 4096), weight(8192, 4096), weight(4096, 4096)) for _ in range(4)]
    head, x = weight(16400, 4096), random(m, 4096, scale=0.5)
    expected = layers(x, weights, head, pdl=False)
    assert expected.isfinite().all()
    assert torch.equal(layers(x, weights, head, pdl=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(x, weights, head, pdl=True)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("m,n,k", [(33, 64, 64), (64, 64, 64), (0, 64, 64), (1, 24, 64), (1, 64, 96)])
def test_unsupported_shapes(m: int, n: int, k: int) -> None:
    assert not supports(m, n, k)
    with pytest.raises(AssertionError):
        linear(random(m, k), BF16Weight(random(n, k)), out=poisoned(m, n))
