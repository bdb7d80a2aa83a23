"""Packed weights in the linear layer for up to 256 rows: the same bits as plain ones, with every plan and epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from linear_cases import poisoned, random
from torch import Tensor

from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, BF16Weight
from emberline.kernels.cuda.uw12 import UW12Weight, escapes_offset, pack
from emberline.kernels.cuda.wide import (
    COLUMNS,
    EXCHANGE_POLLS,
    FEW_COLUMNS,
    LARGE_COLUMNS,
    PACKED_TILES,
    SHARES,
    TileConfig,
    WidePlan,
    _table,
    choose_columns,
    choose_plan,
    linear,
    make_plan,
    supports,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (17, 32, 33, 64, 65, 100, 128, 129, 200, 256)
# (k, n): layers of Llama 3.1 8B, narrower; one unit of k; more tiles than CTAs; ragged tails; more than 64 units a part
SHAPES = [(4096, 6144), (14336, 1024), (896, 1152), (64, 64), (320, 192), (192, 40000), (960, 2624)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def usual(n: int, k: int) -> Tensor:
    """A few escapes: the smallest weights of a row."""
    return random(n, k, scale=k**-0.5)


def none(n: int, k: int) -> Tensor:
    return (random(n, k).sign() * (1 + torch.rand(n, k, device="cuda")) * k**-0.5).to(BF16)


def many(n: int, k: int) -> Tensor:
    """Of some rows most of the first and the last weights, and a few of the others."""
    w = usual(n, k).float()
    rows = torch.arange(n, device="cuda")[:, None] % 37 % 16 == 5
    columns = torch.arange(k, device="cuda")
    sizes = 2 ** (120 * torch.rand(n, k, device="cuda") - 60)
    return torch.where(rows & ((columns < 512) | (columns >= k - 100)), w.sign() * sizes, w).to(BF16)


KINDS = (usual, none, many)


def both(data: Tensor) -> tuple[BF16Weight, UW12Weight]:
    packed = pack(data.contiguous(), max_bits=64.0)
    assert packed is not None
    return BF16Weight(data), packed


def width(m: int) -> int:
    return choose_columns(m, packed=True)


def plain(plan: WidePlan, n: int, k: int) -> WidePlan:
    """The plan for plain weights that must give the same bits: their tiles are not narrower than 64."""
    return make_plan(max(plan.columns, COLUMNS[0]), n, k, TileConfig(plan.groups, plan.split))


def tiles(m: int, split: int) -> Iterator[tuple[int, int]]:
    """Groups, and how many CTAs share x: a cluster has no more than 8."""
    wide = width(m)
    shares = [share for share in (SHARES if wide == LARGE_COLUMNS else (1,)) if split * share <= 8]
    yield from product((groups for groups, columns in PACKED_TILES if columns == wide), shares)


def test_the_cases_are_what_they_say() -> None:
    for n, k in ((192, 320), (64, 4096)):
        strides = {kind: both(kind(n, k))[1].header_stride - escapes_offset(k) for kind in KINDS}
        assert strides[none] == 0 and strides[many] > 1000
        assert 0 < strides[usual] < 1000 or k < 1000


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_plan(kind: Callable[[int, int], Tensor], k: int, n: int) -> None:
    w, packed = both(kind(n, k))
    for m in ROWS:
        x, plan = random(m, k), choose_plan(width(m), n, k, packed=True)
        for dtype in (F32, BF16):
            expected = linear(x, w, out=poisoned(m, n, dtype=dtype), plan=plain(plan, n, k), pdl=False)
            assert expected.isfinite().all()
            assert torch.equal(linear(x, packed, out=poisoned(m, n, dtype=dtype), pdl=False), expected), plan


@pytest.mark.parametrize("split", (1, 2, 3, 4, 5))
@pytest.mark.parametrize("kind", (usual, many))
@pytest.mark.parametrize("m", (29, 37, 61, 90, 128, 129, 200, 256))
def test_every_plan(m: int, kind: Callable[[int, int], Tensor], split: int) -> None:
    n, k = 1600, 1344
    w, packed = both(kind(n, k))
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
    w, packed = both(many(n, k).mul_(0.5))
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
    """Equal to the plain kernel's, and to its parts: the product, then torch's silu and multiplication."""
    w, packed = both(usual(n, k) * 2)
    x, bias = random(m, k), random(n, dtype=F32)
    for (groups, share), ctas in product(tiles(m, split) if split <= k // 64 else (), (7, 132)):
        plan = make_plan(width(m), n, k, TileConfig(groups, split, share=share), packed=True, ctas=ctas)
        for shift in (None, bias):
            ours = linear(x, packed, out=poisoned(m, n // 2), bias=shift, gated=True, plan=plan, pdl=False)
            same = linear(x, w, out=poisoned(m, n // 2), bias=shift, gated=True, plan=plain(plan, n, k), pdl=False)
            assert torch.equal(ours, same), plan
            y = linear(x, packed, out=poisoned(m, n), bias=shift, plan=plan, pdl=False).view(m, n // 32, 2, 16)
            assert torch.equal(ours, (F.silu(y[:, :, 0]) * y[:, :, 1]).reshape(m, n // 2)), plan


@pytest.mark.parametrize("m", (30, 40, 128, 200))
def test_weights_that_are_no_numbers(m: int) -> None:
    """Compared as bits: Inf, NaN, denormals and zeros of both signs are weights like others."""
    n, k = 192, 320
    data = usual(n, k)
    odd = torch.tensor([0x7F80, 0x7FC1, 0x0001, 0x007F, 0x0000, 0x7F7F], device="cuda", dtype=torch.int16)
    odd = torch.cat((odd, odd | -0x8000))
    places = torch.randperm(n * k, device="cuda")[: 4 * len(odd)]
    data.view(torch.int16).view(-1)[places] = odd.repeat(4)
    w, packed = both(data)
    x = random(m, k)
    for split in (1, 2):
        plan = make_plan(width(m), n, k, TileConfig(next(tiles(m, split))[0], split), packed=True)
        expected = linear(x, w, out=poisoned(m, n, dtype=F32), plan=plain(plan, n, k), pdl=False)
        ours = linear(x, packed, out=poisoned(m, n, dtype=F32), plan=plan, pdl=False)
        assert not expected.isfinite().all()
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("most", (FEW_COLUMNS, *COLUMNS))
def test_a_row_is_the_same_in_any_batch(most: int) -> None:
    n, k = 2624, 960
    _, packed = both(usual(n, k))
    x = random(most, k)
    whole = linear(x, packed, out=poisoned(most, n, dtype=F32))
    for m in (row for row in ROWS if most // 2 < row <= most):
        assert torch.equal(linear(x[:m], packed, out=poisoned(m, n, dtype=F32)), whole[:m]), m
        assert torch.equal(linear(x[-m:], packed, out=poisoned(m, n, dtype=F32)), whole[-m:]), m


def layers(x: Tensor, weights: list[tuple[UW12Weight, ...]], head: UW12Weight, *, pdl: bool) -> Tensor:
    """As a decoder's linears follow one another: each reads what the one before wrote, and one adds in place."""
    m = len(x)
    hidden = x.clone()
    for qkv, o, gate_up, down in weights:
        mixed = linear(hidden, qkv, out=poisoned(m, qkv.n), pdl=pdl)
        linear(mixed[:, : o.k], o, out=hidden, residual=hidden, pdl=pdl)
        active = linear(hidden, gate_up, out=poisoned(m, gate_up.n // 2), gated=True, pdl=pdl)
        linear(active, down, out=hidden, residual=hidden, pdl=pdl)
    return linear(hidden, head, out=poisoned(m, head.n, dtype=F32), pdl=pdl)


@pytest.mark.parametrize("m", (20, 33, 64, 100, 128, 129, 200, 256))
def test_a_graph_with_early_launches(m: int) -> None:
    sizes = ((6144, 4096), (4096, 4096), (8192, 4096), (4096, 4096))
    weights = [tuple(both(usual(n, k))[1] for n, k in sizes) for _ in range(4)]
    head, x = both(usual(38464, 4096))[1], random(m, 4096, scale=0.5)
    expected = layers(x, weights, head, pdl=False)
    assert expected.isfinite().all()
    assert torch.equal(layers(x, weights, head, pdl=True), expected)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers(x, weights, head, pdl=True)  # a stream's first products are not captured
    with torch.cuda.graph(graph, stream=stream):
        captured = layers(x, weights, head, pdl=True)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("looks", (0, 1, EXCHANGE_POLLS))
@pytest.mark.parametrize("split", (2, 3, 4, 6, 9))
@pytest.mark.parametrize("m", (29, 37, 64, 90, 128, 200))
def test_parts_that_are_no_cluster(m: int, split: int, looks: int) -> None:
    """The same bits, whether they wait for each other or leave all to the last; and nothing is left of a launch."""
    n, k = 1600, 1344
    _, packed = both(usual(n, k))
    x, bias, residual = random(m, k), random(n, dtype=F32), random(m, n)
    for groups in sorted({groups for groups, _ in tiles(m, 1)}):
        plan = make_plan(width(m), n, k, TileConfig(groups, split, unclustered=True), packed=True)
        cluster = make_plan(width(m), n, k, TileConfig(groups, min(split, 8)), packed=True)
        for shift, more, dtype in product((None, bias), (None, residual), (BF16, F32)):
            if more is not None and dtype is F32:
                continue
            first, ours = poisoned(2, m, n, dtype=dtype)
            linear(x, packed, out=first, bias=shift, residual=more, plan=plan, pdl=False, polls=0)
            for pdl in (False, True, True):
                linear(x, packed, out=ours.fill_(torch.nan), bias=shift, residual=more, plan=plan, pdl=pdl, polls=looks)
                assert torch.equal(ours, first), plan
            linear(x, packed, out=ours, bias=shift, residual=more, plan=cluster, pdl=False)
            assert torch.equal(ours, first) if split <= 8 else torch.allclose(ours, first, atol=0.1, rtol=0.1), plan
    _, words = _table(x.device, torch.cuda.current_stream().cuda_stream)
    assert not words.any()


def test_parts_of_one_product_after_the_other() -> None:
    """Each is launched while the one before still runs, and uses what that has left behind in another form."""
    sizes = ((64, 1024, 4096), (128, 2048, 2048), (100, 1600, 1344), (200, 1024, 1024))
    cases = []
    for i, (m, n, k) in enumerate(sizes * 3):
        row = TileConfig(1 if width(m) < LARGE_COLUMNS else 2, (4, 2, 3, 5, 6)[i % 5], unclustered=True)
        cases.append((random(m, k), both(usual(n, k))[1], make_plan(width(m), n, k, row, packed=True)))
    expected = [linear(x, w, out=poisoned(len(x), w.n), plan=plan, pdl=False) for x, w, plan in cases]
    outs = [torch.empty_like(out) for out in expected]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def chain() -> None:
        for (x, w, plan), out in zip(cases, outs, strict=True):
            linear(x, w, out=out, plan=plan)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        chain()
    with torch.cuda.graph(graph, stream=stream):
        chain()
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, outs, expected))
    assert not _table(outs[0].device, stream.cuda_stream)[1].any()


def test_parts_of_two_streams_that_take_each_others_place() -> None:
    """Neither has all of its CTAs at once, and whoever waits for one that cannot come goes."""
    n, k, m = 4096, 14336, 128
    _, packed = both(usual(n, k))
    x, plan = random(m, k), choose_plan(128, n, k, packed=True)
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
    assert not any(_table(x.device, stream.cuda_stream)[1].any() for stream in streams)


def test_gates_are_not_apart_where_other_weights_are() -> None:
    n, k, m = 4096, 4096, 64
    assert (
        choose_plan(64, n, k, packed=True).unclustered
        and not choose_plan(64, n, k, packed=True, gated=True).unclustered
    )
    w, packed = both(usual(n, k))
    x, plan = random(m, k), plain(choose_plan(64, n, k, packed=True, gated=True), n, k)
    expected = linear(x, w, out=poisoned(m, n // 2), gated=True, plan=plan)
    assert torch.equal(linear(x, packed, out=poisoned(m, n // 2), gated=True), expected)


def test_a_plan_for_other_weights_is_refused() -> None:
    w, packed = both(usual(128, 128))
    x = random(64, 128)
    for weights, wrong in ((w, True), (packed, False)):
        with pytest.raises(AssertionError):
            linear(x, weights, out=poisoned(64, 128), plan=make_plan(64, 128, 128, TileConfig(1), packed=wrong))


def test_the_choice_fits() -> None:
    for k, n in [*SHAPES, (4096, 28672), (14336, 4096), (4096, 128256), (28672, 8192)]:
        for wide in (FEW_COLUMNS, *COLUMNS):
            plan = choose_plan(wide, n, k, packed=True)
            assert supports(wide, n, k, packed=True) is (wide > FEW_COLUMNS or n >= 28672)
            assert plan.packed and (plan.groups, wide) in PACKED_TILES
            assert plan.shared_bytes <= MAX_SHARED_BYTES and plan.stages > 0 and plan.split <= k // 64
