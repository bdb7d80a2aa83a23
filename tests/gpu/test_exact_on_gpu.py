"""Kernels with a fixed order of sums give a row the same bits in any batch: products, norms, decode attention."""

from __future__ import annotations

import random as host_random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gated_weights import interleaved
from gpu_settings import needs_hopper_kernels
from linear_cases import poisoned, random
from torch import Tensor

from emberline.kernels import worklist
from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import fixed_order, gemm, uw12, wide
from emberline.kernels.cuda.decode import DecodeScratch, DecodeTensorMaps, DeviceWorkList, decode_attention
from emberline.kernels.cuda.linear import BF16Weight
from emberline.kernels.triton import norm

pytestmark = needs_hopper_kernels

BF16, F32 = torch.bfloat16, torch.float32
# (n, k): Llama 3.1 8B's qkv, o, gate and up, and down; Qwen and SmolLM2; a small model; one step of k; three steps
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1152, 896), (960, 576), (512, 512), (64, 64)]
SHAPES += [(9792, 192)]
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300, 513)
LAST = max(ROWS)

Product = Callable[[Tensor, int], Tensor]  # multiplies rows of x; the second argument is the index of the first row


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_products(w: BF16Weight | uw12.UW12Weight, bias: Tensor, residual: Tensor) -> dict[str, Product]:
    """Return all kinds of products with a weight."""

    def multiply(
        x: Tensor, first: int, *, dtype: torch.dtype = BF16, shift: Tensor | None = None, adds: bool = False
    ) -> Tensor:
        added = residual[first : first + len(x)].clone() if adds else None
        out = poisoned(len(x), w.n, dtype=dtype) if added is None else added
        return fixed_order.linear(x, w, out=out, bias=shift, residual=added, pdl=False)

    def multiply_gated(x: Tensor, first: int) -> Tensor:
        return fixed_order.linear(x, w, out=poisoned(len(x), w.n // 2), gated=True, pdl=False)

    return {
        "store": multiply,
        "float32": partial(multiply, dtype=F32),
        "bias": partial(multiply, shift=bias),
        "add": partial(multiply, adds=True),
        "bias and add": partial(multiply, shift=bias, adds=True),
        "gated": multiply_gated,
    }


def check_rows(multiply: Product, x: Tensor, expected: Tensor, rows: Sequence[int]) -> None:
    """Check that the first and the last rows of x have the expected bits, by the number of rows."""
    for m in rows:
        for first in {0, len(x) - m}:
            ours = multiply(x[first : first + m], first)
            assert torch.equal(ours, expected[first : first + m]), (m, first)


@pytest.mark.parametrize("n,k", SHAPES)
def test_gemm_has_the_bits_of_wide(n: int, k: int) -> None:
    """The kernels for few and for many rows sum in the same order. All else in this file depends on it."""
    x, w, split = random(256, k), BF16Weight(random(n, k, scale=k**-0.5)), fixed_order.choose_split(n, k)
    plan = fixed_order.choose_wide_plan(256, n, k, packed=False)
    few = wide.linear(x, w, out=poisoned(256, n), plan=plan, pdl=False)
    for base in gemm.PLANS:
        if split == 1 or base.width == 128:
            many = gemm.linear(x, w, out=poisoned(256, n), plan=replace(base, split=split), pdl=False)
            assert torch.equal(many, few), base


@pytest.mark.parametrize("n,k", SHAPES)
def test_row_of_a_product_is_independent_of_the_batch(n: int, k: int) -> None:
    data = interleaved(random(n // 2, k, scale=2 * k**-0.5), random(n // 2, k, scale=k**-0.5)).contiguous()
    packed = uw12.pack(data, max_bits=64.0)
    assert packed is not None
    x, bias, residual = random(LAST, k), random(n, dtype=F32), random(LAST, n)
    packed_products = make_products(packed, bias, residual)
    for name, multiply in make_products(BF16Weight(data), bias, residual).items():
        alone = torch.cat([multiply(x[i : i + 1], i) for i in range(LAST)])
        assert alone.isfinite().all(), name
        check_rows(multiply, x, alone, ROWS)
        check_rows(packed_products[name], x, alone, ROWS)


@pytest.mark.parametrize("n,k", [(4096, 4096), (1152, 896)])
def test_every_number_of_rows(n: int, k: int) -> None:
    x, w = random(300, k), BF16Weight(random(n, k, scale=k**-0.5))
    every = fixed_order.linear(x, w, out=poisoned(300, n, dtype=F32), pdl=False)
    rounded = every.to(BF16)
    for m in range(1, 301):
        assert torch.equal(fixed_order.linear(x[:m], w, out=poisoned(m, n), pdl=False), rounded[:m]), m
        assert torch.equal(fixed_order.linear(x[-m:], w, out=poisoned(m, n), pdl=False), rounded[-m:]), m
    order = torch.randperm(300, device="cuda")
    assert torch.equal(fixed_order.linear(x[order], w, out=poisoned(300, n), pdl=False), rounded[order])


def test_dependent_launches_and_graphs() -> None:
    """Layers that follow each other have the same bits when kernels start early and in a captured graph."""
    import linear_checks

    weights = linear_checks.make_decoder_weights(lambda n, k: BF16Weight(random(n, k, scale=k**-0.5)))
    for m in (1, 32, 64, 200, 300):
        linear_checks.check_dependent_launches(fixed_order.linear, random(m, 4096), weights)


@pytest.mark.parametrize("layout", ["plain", "packed", "both"])
def test_backend_uses_the_fixed_order(layout: str) -> None:
    from emberline.kernels.cuda.hopper_backend import HopperBackend

    backend, n, k = HopperBackend(), 2048, 1024
    data = random(n, k, scale=k**-0.5)
    weight = backend.pack_linear(data, gated=True)
    if layout == "packed":
        backend.fill_weight(weight, data)
        assert isinstance(weight.handle, uw12.UW12Weight)
    elif layout == "both":
        assert backend.add_packed_copy(weight) > 0
    weight.fixed_order = True
    layer = LinearLayer(weight, norm=torch.rand(k, device="cuda"), eps=1e-5)
    x, added = random(600, k), random(600, n)
    calls: dict[str, Product] = {
        "store": lambda rows, first: backend.linear(rows, layer, LinearOutput()),
        "float32": lambda rows, first: backend.linear(rows, layer, LinearOutput(float32=True)),
        "add": lambda rows, first: backend.linear(
            rows, layer, LinearOutput(add_to=added[first : first + len(rows)].clone())
        ),
        "gated": lambda rows, first: backend.gate_up_silu(rows, layer),
    }
    for name, call in calls.items():
        alone = torch.cat([call(x[i : i + 1], i) for i in range(64)])
        for m in (64, 100, 256, 257, 600):
            assert torch.equal(call(x[:m], 0)[:64], alone), (name, m)


@pytest.mark.parametrize("columns", [256, 576, 896, 4096])
def test_row_of_a_norm_is_independent_of_the_batch(columns: int) -> None:
    x, weight = random(5000, columns), torch.rand(columns, device="cuda")
    every = norm.rms_norm(x, weight, 1e-5)
    for m in (1, 2, 15, 16, 33, 300, 4999):
        assert torch.equal(norm.rms_norm(x[:m], weight, 1e-5), every[:m]), m


# -- decode attention -------------------------------------------------------------------------------------------------

LENGTHS = (1, 63, 64, 65, 511, 512, 513, 1000, 1024, 1025, 3000, 8191, 8192, 8193, 12000)


@pytest.mark.parametrize("q_heads,kv_heads,head_dim", [(32, 8, 128), (8, 2, 64)])
@pytest.mark.parametrize("window", [0, 700])
def test_row_of_decode_attention_is_independent_of_the_batch(
    q_heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    lengths, block = [*LENGTHS, *(100 + 37 * i for i in range(50))], 64
    counts = [-(-length // block) for length in lengths]
    keys, values = (random(sum(counts), kv_heads, block, head_dim) for _ in range(2))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    ends = np.cumsum(counts).tolist()
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        tables[row, :count] = torch.arange(end - count, end, dtype=torch.int32, device="cuda")
    qkv = random(len(lengths), (q_heads + 2 * kv_heads) * head_dim, scale=2.0)
    maps = DecodeTensorMaps(keys, values)

    def attend(rows: list[int]) -> Tensor:
        chosen, room = torch.tensor(rows, device="cuda"), worklist.max_fixed_work_items(len(rows), max(lengths))
        made = worklist.plan_decode_work([lengths[row] for row in rows], kv_heads, 132, room, fixed_cuts=True)
        work = DeviceWorkList(torch.from_numpy(made.data).cuda(), len(rows), room)
        scratch = DecodeScratch(len(rows), room, q_heads, kv_heads, head_dim, qkv.device)
        context = torch.tensor([lengths[row] - 1 for row in rows], dtype=torch.int32, device="cuda")
        return decode_attention(
            qkv[chosen], maps, tables[chosen], context, work, head_dim**-0.5, q_heads, kv_heads, head_dim,
            window=window, out=poisoned(len(rows), q_heads * head_dim), scratch=scratch, pdl=False,
        )  # fmt: skip

    alone = torch.cat([attend([row]) for row in range(len(lengths))])
    assert alone.isfinite().all()
    rng = host_random.Random(1)
    for size in (2, 3, 8, 20, 33, len(lengths)):
        rows = rng.sample(range(len(lengths)), size)
        assert torch.equal(attend(rows), alone[rows]), rows
