"""Packed weights in the linear layer for up to 256 rows give the bits of plain ones, with every plan and epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import linear_checks
import pytest
import torch
from gpu_settings import needs_hopper_kernels
from linear_cases import poisoned, random
from torch import Tensor

from emberline.kernels.cuda import wide, wide_halves
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight
from emberline.kernels.cuda.uw12 import UW12Weight, escapes_offset, pack
from emberline.kernels.cuda.wide import TileConfig, linear, make_plan

pytestmark = needs_hopper_kernels

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (17, 32, 33, 64, 65, 96, 100, 128, 129, 150, 160, 161, 192, 200, 256)
# (k, n): layers of Llama 3.1 8B, narrower; one unit of k; more tiles than CTAs; ragged tails; more than 64 units per
# part
SHAPES = [(4096, 6144), (14336, 1024), (896, 1152), (64, 64), (320, 192), (192, 40000), (960, 2624)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def few_escapes(n: int, k: int) -> Tensor:
    """Return weights with a few escapes, the smallest of each row."""
    return random(n, k, scale=k**-0.5)


def no_escapes(n: int, k: int) -> Tensor:
    return (random(n, k).sign() * (1 + torch.rand(n, k, device="cuda")) * k**-0.5).to(BF16)


def many_escapes(n: int, k: int) -> Tensor:
    """Return weights with many escapes at the begin and end of some rows, and a few elsewhere."""
    w = few_escapes(n, k).float()
    rows = torch.arange(n, device="cuda")[:, None] % 37 % 16 == 5
    columns = torch.arange(k, device="cuda")
    sizes = 2 ** (120 * torch.rand(n, k, device="cuda") - 60)
    return torch.where(rows & ((columns < 512) | (columns >= k - 100)), w.sign() * sizes, w).to(BF16)


KINDS = (few_escapes, no_escapes, many_escapes)


def plain_and_packed(data: Tensor) -> tuple[BF16Weight, UW12Weight]:
    packed = pack(data.contiguous(), max_bits=64.0)
    assert packed is not None
    return BF16Weight(data), packed


def packed_with_few_escapes(n: int, k: int) -> UW12Weight:
    return plain_and_packed(few_escapes(n, k))[1]


def width(m: int) -> int:
    return wide.choose_tile_columns(m, packed=True)


def plain(plan: wide.WidePlan, n: int, k: int) -> wide.WidePlan:
    """Return the plan for plain weights that must give the same bits; its tiles have at least 64 columns."""
    return make_plan(max(plan.columns, wide.COLUMNS[0]), n, k, TileConfig(plan.groups, plan.split))


def tiles(m: int, split: int) -> Iterator[tuple[int, int]]:
    """Yield warpgroups, and the number of CTAs that share x; a cluster has at most 8 CTAs."""
    own = width(m)
    shares = [share for share in (wide.SHARES if wide.is_large(own) else (1,)) if split * share <= 8]
    yield from product((groups for groups, columns in wide.PACKED_TILES if columns == own), shares)


def test_cases_have_the_intended_escapes() -> None:
    for n, k in ((192, 320), (64, 4096)):
        strides = {kind: plain_and_packed(kind(n, k))[1].header_stride - escapes_offset(k) for kind in KINDS}
        assert strides[no_escapes] == 0 and strides[many_escapes] > 1000
        assert 0 < strides[few_escapes] < 1000 or k < 1000


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_plan(kind: Callable[[int, int], Tensor], k: int, n: int) -> None:
    w, packed = plain_and_packed(kind(n, k))
    for m in ROWS:
        x, plan = random(m, k), wide.choose_plan(width(m), n, k, packed=True)
        for dtype in (F32, BF16):
            expected = linear(x, w, out=poisoned(m, n, dtype=dtype), plan=plain(plan, n, k), pdl=False)
            assert expected.isfinite().all()
            assert torch.equal(linear(x, packed, out=poisoned(m, n, dtype=dtype), pdl=False), expected), plan


@pytest.mark.parametrize("split", (1, 2, 3, 4, 5))
@pytest.mark.parametrize("kind", (few_escapes, many_escapes))
@pytest.mark.parametrize("m", (29, 37, 61, 90, 128, 129, 200, 256))
def test_every_plan(m: int, kind: Callable[[int, int], Tensor], split: int) -> None:
    n, k = 1600, 1344
    w, packed = plain_and_packed(kind(n, k))
    x, residual = random(m, k), random(m, n)
    same = plain(make_plan(width(m), n, k, TileConfig(next(tiles(m, split))[0], split)), n, k)
    expected = linear(x, w, out=poisoned(m, n, dtype=F32), plan=same, pdl=False)
    for (groups, share), ctas in product(tiles(m, split), (2, 5, 132) if split == 1 else (132,)):
        deep = make_plan(width(m), n, k, TileConfig(groups, split, share=share), packed=True, ctas=ctas)
        for stages in {max(2, deep.min_stages), max(3, deep.min_stages), deep.stages}:
            plan = replace(deep, stages=stages)
            assert plan.shared_bytes <= MAX_SHARED_BYTES
            for pdl in (False, True):
                assert torch.equal(linear(x, packed, out=poisoned(m, n, dtype=F32), plan=plan, pdl=pdl), expected), plan
            added = linear(x, packed, out=poisoned(m, n), residual=residual, plan=plan)
            assert torch.equal(added, (residual.float() + expected).to(BF16)), plan


@pytest.mark.parametrize("split", (1, 2, 3, 4))
@pytest.mark.parametrize("m", ROWS)
def test_every_epilogue(m: int, split: int) -> None:
    n, k = 1600, 960
    w, packed = plain_and_packed(many_escapes(n, k).mul_(0.5))
    x, bias, residual = random(m, k), random(n, dtype=F32), random(m, n)
    for groups, share in tiles(m, split):
        plan = make_plan(width(m), n, k, TileConfig(groups, split, share=share), packed=True)
        same = plain(plan, n, k)
        for shift, more, dtype in product((None, bias), (None, residual), (BF16, F32)):
            if more is not None and dtype is F32:
                continue
            outs = poisoned(2, m, n, dtype=dtype)
            linear(x, w, out=outs[0], bias=shift, residual=more, plan=same, pdl=False)
            linear(x, packed, out=outs[1], bias=shift, residual=more, plan=plan, pdl=False)
            assert torch.equal(outs[0], outs[1]), plan
        in_place = residual.clone()
        linear(x, packed, out=in_place, residual=in_place, plan=plan, pdl=False)
        assert torch.equal(in_place, linear(x, w, out=poisoned(m, n), residual=residual, plan=same, pdl=False))


@pytest.mark.parametrize("split", (1, 2, 3, 4))
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n,k", [(1600, 960), (192, 64), (8384, 128)])
def test_gated(n: int, k: int, m: int, split: int) -> None:
    """Results equal the plain kernel's, and the product followed by torch's silu and multiplication."""
    w, packed = plain_and_packed(few_escapes(n, k) * 2)
    x, bias = random(m, k), random(n, dtype=F32)
    for (groups, share), ctas in product(tiles(m, split) if split <= k // 64 else (), (7, 132)):
        plan = make_plan(width(m), n, k, TileConfig(groups, split, share=share), packed=True, ctas=ctas)
        for shift in (None, bias):
            ours = linear(x, packed, out=poisoned(m, n // 2), bias=shift, gated=True, plan=plan, pdl=False)
            same = linear(x, w, out=poisoned(m, n // 2), bias=shift, gated=True, plan=plain(plan, n, k), pdl=False)
            assert torch.equal(ours, same), plan
            y = linear(x, packed, out=poisoned(m, n), bias=shift, plan=plan, pdl=False)
            assert torch.equal(ours, linear_checks.apply_gates(y)), plan


@pytest.mark.parametrize("m", (30, 40, 128, 200))
def test_nan_and_inf_weights(m: int) -> None:
    """Inf, NaN, denormals and zeros of both signs are handled like other weights, compared as bits."""
    n, k = 192, 320
    data = few_escapes(n, k)
    odd = torch.tensor([0x7F80, 0x7FC1, 0x0001, 0x007F, 0x0000, 0x7F7F], device="cuda", dtype=torch.int16)
    odd = torch.cat((odd, odd | -0x8000))
    places = torch.randperm(n * k, device="cuda")[: 4 * len(odd)]
    data.view(torch.int16).view(-1)[places] = odd.repeat(4)
    w, packed = plain_and_packed(data)
    x = random(m, k)
    for split in (1, 2):
        plan = make_plan(width(m), n, k, TileConfig(next(tiles(m, split))[0], split), packed=True)
        expected = linear(x, w, out=poisoned(m, n, dtype=F32), plan=plain(plan, n, k), pdl=False)
        ours = linear(x, packed, out=poisoned(m, n, dtype=F32), plan=plan, pdl=False)
        assert not expected.isfinite().all()
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("most", (wide.FEW_COLUMNS, *wide.COLUMNS))
def test_row_is_independent_of_the_batch(most: int) -> None:
    n, k = 2624, 960
    packed = packed_with_few_escapes(n, k)
    x = random(most, k)
    whole = linear(x, packed, out=poisoned(most, n, dtype=F32))
    for m in (row for row in ROWS if wide.choose_tile_columns(row, packed=True) == most):
        assert torch.equal(linear(x[:m], packed, out=poisoned(m, n, dtype=F32)), whole[:m]), m
        assert torch.equal(linear(x[-m:], packed, out=poisoned(m, n, dtype=F32)), whole[-m:]), m


@pytest.mark.parametrize("m", (20, 33, 64, 100, 128, 129, 200, 256))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    """The first products of a stream must run outside a capture, so the graph has a stream that is used before."""
    weights = linear_checks.make_decoder_weights(packed_with_few_escapes)
    head, x = packed_with_few_escapes(38464, 4096), random(m, 4096, scale=0.5)
    linear_checks.check_dependent_launches(linear, x, weights, head, stream=torch.cuda.Stream())


@pytest.mark.parametrize("looks", (0, 1, wide.EXCHANGE_POLLS))
@pytest.mark.parametrize("split", (2, 3, 4, 6, 9))
@pytest.mark.parametrize("m", (29, 37, 64, 90, 128, 200))
def test_unclustered_parts(m: int, split: int, looks: int) -> None:
    """Results are the same whether CTAs wait for each other or leave all to the last; counters are reset."""
    n, k = 1600, 1344
    packed = packed_with_few_escapes(n, k)
    x, bias, residual = random(m, k), random(n, dtype=F32), random(m, n)
    for groups in sorted({groups for groups, _ in tiles(m, 1)}):
        plan = make_plan(width(m), n, k, TileConfig(groups, split, unclustered=True), packed=True)
        cluster = make_plan(width(m), n, k, TileConfig(groups, min(split, 8)), packed=True)
        for shift, more, dtype in product((None, bias), (None, residual), (BF16, F32)):
            if more is not None and dtype is F32:
                continue
            first, ours = poisoned(2, m, n, dtype=dtype)
            linear(x, packed, out=first, bias=shift, residual=more, plan=plan, pdl=False, exchange_polls=0)
            for pdl in (False, True, True):
                linear(
                    x,
                    packed,
                    out=ours.fill_(torch.nan),
                    bias=shift,
                    residual=more,
                    plan=plan,
                    pdl=pdl,
                    exchange_polls=looks,
                )
                assert torch.equal(ours, first), plan
            linear(x, packed, out=ours, bias=shift, residual=more, plan=cluster, pdl=False)
            assert torch.equal(ours, first) if split <= 8 else torch.allclose(ours, first, atol=0.1, rtol=0.1), plan
    _, words = wide._get_exchange_memory(x.device, torch.cuda.current_stream().cuda_stream)
    assert not words.any()


@pytest.mark.parametrize("m", (257, 320, 384))
def test_halves_of_the_rows(m: int) -> None:
    """Each half has the bits of a product of its own, with every epilogue."""
    n, k = 4096, 1344
    packed, half = packed_with_few_escapes(n, k), -(-m // 16) * 8
    x, bias, residual = random(m, k), random(n, dtype=F32), random(m, n)
    assert wide_halves.supports(m, n, k) and not wide_halves.supports(256, n, k) and not wide_halves.supports(385, n, k)
    for gated, added, dtype in ((False, None, F32), (False, residual, BF16), (True, None, BF16)):
        out = wide_halves.linear(
            x, packed, out=poisoned(m, n // (1 + gated), dtype=dtype), bias=bias, residual=added, gated=gated
        )
        for rows in (slice(0, half), slice(half, m)):
            expected, more = torch.empty_like(out[rows]), None if added is None else added[rows]
            linear(x[rows], packed, out=expected, bias=bias, residual=more, gated=gated, pdl=False)
            assert torch.equal(out[rows], expected)


def test_unclustered_parts_of_consecutive_products() -> None:
    """Each product starts while the preceding one runs, and reuses its exchange memory in another shape."""
    sizes = ((64, 1024, 4096), (128, 2048, 2048), (100, 1600, 1344), (200, 1024, 1024))
    cases = []
    for i, (m, n, k) in enumerate(sizes * 3):
        row = TileConfig(2 if wide.is_large(width(m)) else 1, (4, 2, 3, 5, 6)[i % 5], unclustered=True)
        cases.append((random(m, k), packed_with_few_escapes(n, k), make_plan(width(m), n, k, row, packed=True)))
    expected = [linear(x, w, out=poisoned(len(x), w.n), plan=plan, pdl=False) for x, w, plan in cases]
    outs = [torch.empty_like(out) for out in expected]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def run_chain() -> None:
        for (x, w, plan), out in zip(cases, outs, strict=True):
            linear(x, w, out=out, plan=plan)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run_chain()
    with torch.cuda.graph(graph, stream=stream):
        run_chain()
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, outs, expected))
    assert not wide._get_exchange_memory(outs[0].device, stream.cuda_stream)[1].any()


def test_unclustered_parts_of_two_streams_that_compete_for_sms() -> None:
    """Neither product has all its CTAs at once; a CTA stops waiting for one that cannot start."""
    n, k, m = 4096, 14336, 128
    packed = packed_with_few_escapes(n, k)
    x, plan = random(m, k), wide.choose_plan(128, n, k, packed=True)
    assert plan.unclustered
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = poisoned(len(streams), m, n)
    expected = linear(x, packed, out=poisoned(m, n))
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                linear(x, packed, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    assert not any(wide._get_exchange_memory(x.device, stream.cuda_stream)[1].any() for stream in streams)


def test_gated_weights_use_clusters() -> None:
    n, k, m = 4096, 4096, 64
    assert (
        wide.choose_plan(64, n, k, packed=True).unclustered
        and not wide.choose_plan(64, n, k, packed=True, gated=True).unclustered
    )
    w, packed = plain_and_packed(few_escapes(n, k))
    x, plan = random(m, k), plain(wide.choose_plan(64, n, k, packed=True, gated=True), n, k)
    expected = linear(x, w, out=poisoned(m, n // 2), gated=True, plan=plan)
    assert torch.equal(linear(x, packed, out=poisoned(m, n // 2), gated=True), expected)


def test_plan_for_other_weights_is_rejected() -> None:
    w, packed = plain_and_packed(few_escapes(128, 128))
    x = random(64, 128)
    for weights, wrong in ((w, True), (packed, False)):
        with pytest.raises(AssertionError):
            linear(x, weights, out=poisoned(64, 128), plan=make_plan(64, 128, 128, TileConfig(1), packed=wrong))


def test_chosen_plan_fits_the_device() -> None:
    for k, n in [*SHAPES, (4096, 28672), (14336, 4096), (4096, 128256), (28672, 8192)]:
        for columns in (wide.FEW_COLUMNS, *wide.COLUMNS):
            plan = wide.choose_plan(columns, n, k, packed=True)
            assert wide.supports(columns, n, k, packed=True) is (columns > wide.FEW_COLUMNS or n >= 28672)
            assert plan.packed and (plan.groups, columns) in wide.PACKED_TILES
            assert plan.shared_bytes <= MAX_SHARED_BYTES and plan.stages > 0 and plan.split <= k // 64
