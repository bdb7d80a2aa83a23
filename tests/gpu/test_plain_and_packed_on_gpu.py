"""Weights kept in both forms: each product reads the faster form, with the results of plain weights."""

from __future__ import annotations

import pytest
import torch
from gpu_settings import needs_hopper_kernels

from emberline.kernels import ops
from emberline.kernels.cuda import uw12
from emberline.kernels.packed_weight import PackedWeight

pytestmark = needs_hopper_kernels

SHAPES = {"small": (1024, 512, False), "large": (8192, 4096, False), "gated": (20480, 4096, True)}


def random_weight(n: int, k: int, gated: bool) -> PackedWeight:
    torch.manual_seed(n)
    return ops.pack_linear(torch.randn(n, k, device="cuda").mul_(0.02).bfloat16(), gated=gated)


def product(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    layer = ops.LinearLayer(weight)
    return ops.gate_up_silu(x, layer) if weight.gated else ops.linear(x, layer)


@pytest.mark.parametrize("shape", SHAPES)
def test_few_and_many_rows_are_bitwise_equal_to_plain_weights(shape: str) -> None:
    weight = random_weight(*SHAPES[shape])
    inputs = [torch.randn(m, weight.k, device="cuda").bfloat16() for m in (1, 7, 8, 16, 200, 256, 700)]
    before = [product(x, weight) for x in inputs]
    taken = ops.add_packed_copy(weight)
    assert isinstance(weight.uw12_copy, uw12.UW12Weight) and 0.7 < taken / weight.data.nbytes < 0.8
    for x, expected in zip(inputs, before, strict=True):
        assert torch.equal(product(x, weight), expected), len(x)


@pytest.mark.parametrize("shape", ["small", "large"])  # test_wide_packed measures the errors of gated weights
@pytest.mark.parametrize("m", [24, 33, 64, 65, 128])
def test_error_is_at_most_twice_that_of_torch(shape: str, m: int) -> None:
    weight = random_weight(*SHAPES[shape])
    ops.add_packed_copy(weight)
    x = torch.randn(m, weight.k, device="cuda").bfloat16()
    exact = x.double() @ weight.data.double().t()
    error, theirs = ((y.double() - exact).norm() for y in (product(x, weight), x @ weight.data.t()))
    assert error <= 2 * theirs


def test_few_rows_read_packed_and_many_rows_read_plain_weights() -> None:
    """Overwrite one form at a time and check which products change."""
    for name, (n, k, gated) in SHAPES.items():
        for m in (1, 32, 64, 128, 256):
            weight = random_weight(n, k, gated)
            x = torch.randn(m, k, device="cuda").bfloat16()
            ops.add_packed_copy(weight)
            whole = product(x, weight)
            most = {"small": 32, "large": 64, "gated": 128}[name]
            assert isinstance(weight.uw12_copy, uw12.UW12Weight)
            spoilt = weight.data if m > most else weight.uw12_copy.planes
            other = weight.uw12_copy.planes if m > most else weight.data
            other.zero_()
            assert torch.equal(product(x, weight), whole), (name, m)
            spoilt.zero_()
            assert not torch.equal(product(x, weight), whole), (name, m)


def test_tied_head_is_packed_once() -> None:
    weight = random_weight(*SHAPES["small"])
    assert ops.add_packed_copy(weight) > 0 and ops.add_packed_copy(weight) == 0


def test_unpackable_weight_stays_unchanged() -> None:
    narrow = ops.pack_linear(torch.randn(1000, 100, device="cuda").bfloat16())
    single = ops.pack_linear(torch.randn(1024, 512, device="cuda"))
    assert ops.add_packed_copy(narrow) == ops.add_packed_copy(single) == 0
    assert narrow.uw12_copy is single.uw12_copy is None
