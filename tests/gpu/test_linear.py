"""The skinny linear layer is close to exact sums, and gives the same bits in any batch, plan and launch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import linear_checks
import pytest
import torch
from gpu_settings import needs_hopper_kernels
from linear_cases import poisoned, random, weight

from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight, choose_plan, linear, make_plan, supports

pytestmark = needs_hopper_kernels

F32 = torch.float32
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 32)
# (k, n): the layers of Llama 3.1 8B, narrower; of Qwen and SmolLM2; one unit of k; fewer units than warps; ragged tails
SHAPES = [(4096, 1536), (4096, 4096), (14336, 1024), (4096, 8208), (896, 1152), (576, 960), (1536, 576), (64, 16)]
SHAPES += [(320, 48), (960, 2576), (4096, 6160)]

run = partial(linear_checks.run_linear, linear)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_store(m: int, k: int, n: int) -> None:
    linear_checks.check_store(linear, m, k, n)


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("m", (1, 7, 16, 32))
def test_bias_and_residual(m: int, k: int, n: int) -> None:
    linear_checks.check_bias_and_residual(linear, m, k, n)


@pytest.mark.parametrize("k,half", [(4096, 1024), (4096, 4096), (576, 1536), (896, 4864), (128, 16), (1024, 48)])
@pytest.mark.parametrize("m", (1, 3, 8, 9, 17, 32))
def test_gated(m: int, k: int, half: int) -> None:
    linear_checks.check_gated(linear, m, k, half)


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
    linear_checks.check_strided_input_rows(linear, m)


def test_nan_row_does_not_affect_others() -> None:
    linear_checks.check_nan_row(linear, 8, 528)


@pytest.mark.parametrize("m", (1, 8, 12, 32))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    weights = linear_checks.make_decoder_weights(weight)
    head, x = weight(16400, 4096), random(m, 4096, scale=0.5)
    linear_checks.check_dependent_launches(linear, x, weights, head)


@pytest.mark.parametrize("m,n,k", [(33, 64, 64), (64, 64, 64), (0, 64, 64), (1, 24, 64), (1, 64, 96)])
def test_unsupported_shapes(m: int, n: int, k: int) -> None:
    assert not supports(m, n, k)
    with pytest.raises(AssertionError):
        linear(random(m, k), BF16Weight(random(n, k)), out=poisoned(m, n))
