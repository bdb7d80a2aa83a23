"""The linear layer for up to 256 rows is close to exact sums, and gives the same bits in any batch and launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from gated_weights import interleaved
from linear_cases import assert_close, poisoned, random, weight
from torch import Tensor

from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight
from emberline.kernels.cuda.wide import (
    COLUMNS,
    LARGE_COLUMNS,
    PLAIN_TILES,
    SHARES,
    TileConfig,
    WidePlan,
    choose_plan,
    choose_tile_columns,
    linear,
    make_plan,
    supports,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (33, 40, 48, 63, 64, 65, 100, 128, 129, 200, 256)
# (k, n): the layers of Llama 3.1 8B, narrower; of Qwen and SmolLM2; one unit of k; more tiles than CTAs; ragged tails
SHAPES = [(4096, 6144), (4096, 4096), (14336, 1024), (896, 1152), (576, 960), (1536, 576), (64, 64), (320, 192)]
SHAPES += [(192, 40000), (960, 2624)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def run(
    x: Tensor, w: BF16Weight, *, dtype: torch.dtype = BF16, plan: WidePlan | None = None, pdl: bool = False
) -> Tensor:
    return linear(x, w, out=poisoned(len(x), w.n, dtype=dtype), plan=plan, pdl=pdl)


def tiles(columns: int) -> Iterator[tuple[int, int]]:
    """Yield warpgroups, and the number of CTAs that share x."""
    groups = [groups for groups, wide in PLAIN_TILES if wide == columns]
    return product(groups, SHARES if columns == LARGE_COLUMNS else (1,))


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
@pytest.mark.parametrize("m", (33, 63, 64, 100, 128, 129, 200, 256))
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


@pytest.mark.parametrize("k,half", [(4096, 1024), (4096, 4096), (576, 1536), (128, 32), (1024, 96), (192, 20000)])
@pytest.mark.parametrize("m", (33, 48, 64, 65, 128, 129, 200, 256))
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
@pytest.mark.parametrize("most", COLUMNS)
def test_row_is_independent_of_the_batch(most: int, k: int, n: int) -> None:
    x, w = random(most, k), weight(n, k)
    whole = run(x, w, dtype=F32)
    for m in ROWS:
        if most // 2 < m <= most:
            assert torch.equal(run(x[:m], w, dtype=F32), whole[:m]), m
            assert torch.equal(run(x[-m:], w, dtype=F32), whole[-m:]), m
    order = torch.randperm(most, device="cuda")
    assert torch.equal(run(x[order], w, dtype=F32), whole[order])


@pytest.mark.parametrize("m", (37, 61, 90, 128, 129, 200, 256))
@pytest.mark.parametrize("split", (1, 2, 3, 4))
def test_every_plan_has_the_same_bits(m: int, split: int) -> None:
    """Results depend on the plan only through the split of k."""
    n, k, columns = 1600, 1344, choose_tile_columns(m)
    x, w, residual = random(m, k), weight(n, k), random(m, n)
    exact = x.double() @ w.data.double().T
    expected = run(x, w, dtype=F32, plan=make_plan(columns, n, k, TileConfig(next(tiles(columns))[0], split)))
    assert_close(expected, torch.mm(x, w.data.T, out_dtype=F32), exact)
    for groups, share in tiles(columns):
        for ctas in (2, 5, 132) if split == 1 else (132,):
            deep = make_plan(columns, n, k, TileConfig(groups, split, share=share), ctas=ctas)
            for stages in {max(2, deep.min_stages), max(3, deep.min_stages), deep.stages}:
                plan = replace(deep, stages=stages)
                if plan.shared_bytes > MAX_SHARED_BYTES:
                    continue
                for pdl in (False, True):
                    assert torch.equal(run(x, w, dtype=F32, plan=plan, pdl=pdl), expected), plan
                added = linear(x, w, out=poisoned(m, n), residual=residual, plan=plan)
                assert torch.equal(added, (residual.float() + expected).to(BF16)), plan


@pytest.mark.parametrize("split", (1, 2, 3, 4))
@pytest.mark.parametrize("columns", COLUMNS)
def test_gated_with_every_plan(columns: int, split: int) -> None:
    n, k = 1600, 1344
    x, w = random(columns - 3, k), weight(n, k)
    for groups, share in tiles(columns):
        plan = make_plan(columns, n, k, TileConfig(groups, split, share=share))
        parts = run(x, w, plan=plan).view(len(x), n // 32, 2, 16)
        expected = (F.silu(parts[:, :, 0]) * parts[:, :, 1]).reshape(len(x), n // 2)
        ours = linear(x, w, out=poisoned(len(x), n // 2), gated=True, plan=plan)
        assert torch.equal(ours, expected), plan


@pytest.mark.parametrize("m", (33, 64, 128, 200))
def test_strided_input_rows(m: int) -> None:
    """x may be a slice of columns of a wider tensor."""
    w = weight(512, 1024)
    broad = random(m, 3072)
    assert torch.equal(run(broad[:, 1024:2048], w), run(broad[:, 1024:2048].contiguous(), w))


@pytest.mark.parametrize("m", (48, 100, 200))
def test_nan_row_does_not_affect_others(m: int) -> None:
    x, w = random(m, 1024), weight(576, 1024)
    clean = run(x, w)
    x[3] = torch.inf
    dirty = run(x, w)
    assert not dirty[3].isfinite().any()
    others = [row for row in range(m) if row != 3]
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


@pytest.mark.parametrize("m", (33, 64, 100, 128, 129, 200, 256))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    weights = [(weight(6144, 4096), weight(4096, 4096), weight(8192, 4096), weight(4096, 4096)) for _ in range(4)]
    head, x = weight(38464, 4096), random(m, 4096, scale=0.5)
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


def test_few_rows_are_supported_for_tall_packed_weights() -> None:
    for m, n, packed in product((16, 17, 32), (28608, 28672), (False, True)):
        assert supports(m, n, 4096, packed=packed) is (m > 16 and n == 28672 and packed)


@pytest.mark.parametrize("m,n,k", [(0, 64, 64), (257, 64, 64), (64, 96, 64), (64, 64, 96), (64, 0, 64)])
def test_unsupported_shapes(m: int, n: int, k: int) -> None:
    assert not supports(m, n, k) and not supports(m, n, k, packed=True)
    with pytest.raises(AssertionError):
        linear(random(m, k), BF16Weight(random(n, k)), out=poisoned(m, n))


def test_chosen_plan_fits_the_device() -> None:
    for k, n in [*SHAPES, (4096, 28672), (14336, 4096), (4096, 128256)]:
        for columns in COLUMNS:
            plan = choose_plan(columns, n, k)
            assert plan.shared_bytes <= MAX_SHARED_BYTES and plan.stages > 0 and plan.split <= k // 64
