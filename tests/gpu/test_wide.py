"""The linear layer for up to 256 rows is close to exact sums, and gives the same bits in any batch and launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import linear_checks
import pytest
import torch
from gpu_settings import needs_hopper_kernels
from linear_cases import assert_close, poisoned, random, weight

from emberline.kernels.cuda import wide
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight
from emberline.kernels.cuda.wide import TileConfig, linear, make_plan

pytestmark = needs_hopper_kernels

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (33, 40, 48, 63, 64, 65, 96, 100, 128, 129, 150, 160, 161, 192, 200, 256)
# (k, n): the layers of Llama 3.1 8B, narrower; of Qwen and SmolLM2; one unit of k; more tiles than CTAs; ragged tails
SHAPES = [(4096, 6144), (4096, 4096), (14336, 1024), (896, 1152), (576, 960), (1536, 576), (64, 64), (320, 192)]
SHAPES += [(192, 40000), (960, 2624)]

run = partial(linear_checks.run_linear, linear)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tiles(columns: int) -> Iterator[tuple[int, int]]:
    """Yield warpgroups, and the number of CTAs that share x."""
    groups = [groups for groups, tile_columns in wide.PLAIN_TILES if tile_columns == columns]
    return product(groups, wide.SHARES if wide.is_large(columns) else (1,))


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_store(m: int, k: int, n: int) -> None:
    linear_checks.check_store(linear, m, k, n)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", (33, 63, 64, 100, 128, 129, 200, 256))
def test_bias_and_residual(m: int, k: int, n: int) -> None:
    linear_checks.check_bias_and_residual(linear, m, k, n)


@pytest.mark.parametrize("k,half", [(4096, 1024), (4096, 4096), (576, 1536), (128, 32), (1024, 96), (192, 20000)])
@pytest.mark.parametrize("m", (33, 48, 64, 65, 128, 129, 200, 256))
def test_gated(m: int, k: int, half: int) -> None:
    linear_checks.check_gated(linear, m, k, half)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("most", wide.COLUMNS)
def test_row_is_independent_of_the_batch(most: int, k: int, n: int) -> None:
    x, w = random(most, k), weight(n, k)
    whole = run(x, w, dtype=F32)
    for m in ROWS:
        if wide.choose_tile_columns(m) == most:
            assert torch.equal(run(x[:m], w, dtype=F32), whole[:m]), m
            assert torch.equal(run(x[-m:], w, dtype=F32), whole[-m:]), m
    order = torch.randperm(most, device="cuda")
    assert torch.equal(run(x[order], w, dtype=F32), whole[order])


@pytest.mark.parametrize("m", (37, 61, 90, 128, 129, 200, 256))
@pytest.mark.parametrize("split", (1, 2, 3, 4))
def test_every_plan_has_the_same_bits(m: int, split: int) -> None:
    """Results depend on the plan only through the split of k."""
    n, k, columns = 1600, 1344, wide.choose_tile_columns(m)
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
@pytest.mark.parametrize("columns", wide.COLUMNS)
def test_gated_with_every_plan(columns: int, split: int) -> None:
    n, k = 1600, 1344
    x, w = random(columns - 3, k), weight(n, k)
    for groups, share in tiles(columns):
        plan = make_plan(columns, n, k, TileConfig(groups, split, share=share))
        expected = linear_checks.apply_gates(run(x, w, plan=plan))
        ours = linear(x, w, out=poisoned(len(x), n // 2), gated=True, plan=plan)
        assert torch.equal(ours, expected), plan


@pytest.mark.parametrize("m", (33, 64, 128, 200))
def test_strided_input_rows(m: int) -> None:
    linear_checks.check_strided_input_rows(linear, m)


@pytest.mark.parametrize("m", (48, 100, 200))
def test_nan_row_does_not_affect_others(m: int) -> None:
    linear_checks.check_nan_row(linear, m, 576)


@pytest.mark.parametrize("m", (33, 64, 100, 128, 129, 200, 256))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    weights = linear_checks.make_decoder_weights(weight)
    head, x = weight(38464, 4096), random(m, 4096, scale=0.5)
    linear_checks.check_dependent_launches(linear, x, weights, head)


def test_few_rows_are_supported_for_tall_packed_weights() -> None:
    for m, n, packed in product((16, 17, 32), (28608, 28672), (False, True)):
        assert wide.supports(m, n, 4096, packed=packed) is (m > 16 and n == 28672 and packed)


@pytest.mark.parametrize("m,n,k", [(0, 64, 64), (257, 64, 64), (64, 96, 64), (64, 64, 96), (64, 0, 64)])
def test_unsupported_shapes(m: int, n: int, k: int) -> None:
    assert not wide.supports(m, n, k) and not wide.supports(m, n, k, packed=True)
    with pytest.raises(AssertionError):
        linear(random(m, k), BF16Weight(random(n, k)), out=poisoned(m, n))


def test_chosen_plan_fits_the_device() -> None:
    for k, n in [*SHAPES, (4096, 28672), (14336, 4096), (4096, 128256)]:
        for columns in wide.COLUMNS:
            plan = wide.choose_plan(columns, n, k)
            assert plan.shared_bytes <= MAX_SHARED_BYTES and plan.stages > 0 and plan.split <= k // 64
