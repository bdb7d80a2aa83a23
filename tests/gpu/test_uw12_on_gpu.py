"""uw12 on a GPU: packing equals the reference; unpacking, gathering and products are bitwise equal to plain rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import linear_checks
import pytest
import torch
from gated_weights import interleaved
from gpu_settings import needs_hopper_kernels
from linear_cases import heavy, poisoned, random
from torch import Tensor

from emberline.kernels.cuda.linear import MAX_ROWS, MAX_SHARED_BYTES, BF16Weight, linear, make_plan
from emberline.kernels.cuda.uw12 import MAX_HEADER_BYTES, UW12Weight, gather_rows, pack, unpack
from emberline.kernels.uw12_ref import reference_pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, F32 = torch.bfloat16, torch.float32
ANY = 99.0  # bits per weight: no limit
# (k, n): as in Llama and smaller; one unit; fewer units than warps, and not a multiple; over 32 units per warp
SHAPES = [(4096, 1536), (14336, 512), (896, 1152), (576, 960), (64, 64), (320, 192), (17408, 128), (4096, 8256)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def bits(data: Tensor) -> Tensor:
    return data.view(torch.int16 if data.dtype is BF16 else torch.int32)


def pack_or_fail(weight: Tensor) -> UW12Weight:
    made = pack(weight, max_bits=ANY)
    assert made is not None
    return made


def every_pattern(n: int, k: int) -> Tensor:
    """Return all 65,536 bit patterns, distributed evenly over each 16 rows."""
    weight = heavy(n, k)
    blocks = bits(weight).view(n // 16, -1)
    for block, some in enumerate(torch.randperm(1 << 16, device="cuda").tensor_split(n // 16)):
        places = torch.randperm(16 * k, device="cuda")[: len(some)]
        blocks[block, places] = (some - (1 << 15)).to(torch.int16)
    return weight


def ragged(n: int, k: int) -> Tensor:
    """Return blocks without escapes and a row full of them, zeros of both signs, and denormals."""
    weight = random(n, k, scale=k**-0.5)
    weight[:16] = weight[:16].abs().clamp(k**-0.5 / 64, 4 * k**-0.5)
    weight[16, :3000] = torch.where(torch.rand(min(k, 3000), device="cuda") < 0.5, 1e30, -2e25)
    weight[40, ::7] = -0.0
    weight[n - 1, :5000:5] = 1e-39
    weight[n - 1, 1:5000:5] = 1e30
    weight[16:, k - 1] = 3e5
    return weight


@pytest.mark.parametrize("n,k", [(64, 64), (192, 576), (1024, 2048), (128, 4160), (256, 14336)])
def test_packing_equals_the_reference(n: int, k: int) -> None:
    for weight in (heavy(n, k), ragged(n, k), random(n, k, scale=2.0**-90)):
        ours, reference = pack_or_fail(weight), reference_pack(weight.cpu(), max_bits=ANY)
        assert reference is not None and ours.header_stride == reference.header_stride
        assert torch.equal(ours.planes.cpu(), reference.planes)
        assert torch.equal(ours.headers.cpu(), reference.headers)
        again = pack_or_fail(weight)
        assert torch.equal(ours.planes, again.planes) and torch.equal(ours.headers, again.headers)


@pytest.mark.parametrize("n,k", [(1024, 2048), (4096, 4096)])
def test_every_bit_pattern_is_restored(n: int, k: int) -> None:
    weight = every_pattern(n, k)
    assert len(bits(weight).unique()) == 1 << 16
    made = pack_or_fail(weight)
    out = poisoned(n, k)
    assert torch.equal(bits(unpack(made, out, pdl=False)), bits(weight))
    ids = torch.randperm(n, device="cuda")
    assert torch.equal(bits(gather_rows(ids, made, poisoned(n, k), pdl=False)), bits(weight[ids]))


@pytest.mark.parametrize("k,n", SHAPES)
def test_unpack_and_gather(k: int, n: int) -> None:
    for weight in (heavy(n, k), ragged(n, k)):
        made = pack_or_fail(weight)
        for pdl in (False, True):
            assert torch.equal(bits(unpack(made, poisoned(n, k), pdl=pdl)), bits(weight))
            for m in (1, 5, 64):
                ids = torch.randint(n, (m,), device="cuda")
                assert torch.equal(bits(gather_rows(ids, made, poisoned(m, k), pdl=pdl)), bits(weight[ids]))
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    assert gather_rows(none, made, poisoned(0, k)).shape == (0, k)


def test_incompressible_weights_stay_plain() -> None:
    noise = torch.randint(-(1 << 15), 1 << 15, (64, 1024), device="cuda", dtype=torch.int16).view(BF16)
    assert pack(noise) is None
    assert pack(random(96, 64)) is None and pack(random(64, 96)) is None
    ordinary = pack(heavy(4096, 4096))
    assert ordinary is not None and ordinary.nbytes * 8 < 12.2 * 4096 * 4096


def assert_same(x: Tensor, rows: Tensor, made: UW12Weight) -> None:
    """Assert that packed and plain weights give the same bits with every epilogue."""
    m, n = len(x), made.n
    plain, bias, residual = BF16Weight(rows), random(n, dtype=F32), random(m, n)
    for dtype, shift, add in product((BF16, F32), (None, bias), (None, residual)):
        if dtype is F32 and add is not None:
            continue
        theirs, ours = (
            linear(x, w, out=poisoned(m, n, dtype=dtype), bias=shift, residual=add, pdl=False) for w in (plain, made)
        )
        assert torch.equal(bits(ours), bits(theirs)), (m, dtype, shift is None, add is None)
    if n % 32 == 0:
        for shift in (None, bias):
            theirs, ours = (
                linear(x, w, out=poisoned(m, n // 2), bias=shift, gated=True, pdl=False) for w in (plain, made)
            )
            assert torch.equal(bits(ours), bits(theirs)), (m, "gated")


@needs_hopper_kernels
@pytest.mark.parametrize("k,n", SHAPES)
def test_products_equal_those_of_plain_rows(k: int, n: int) -> None:
    for weight in (heavy(n, k), ragged(n, k)):
        made = pack_or_fail(weight)
        for m in (1, 2, 7, 8, 9, 16, 17, 31, 32):
            assert_same(random(m, k), weight, made)


@needs_hopper_kernels
def test_any_number_of_rows() -> None:
    weight = heavy(1536, 1088)
    made = pack_or_fail(weight)
    x = random(MAX_ROWS, 1088)
    for m in range(1, MAX_ROWS + 1):
        assert_same(x[:m], weight, made)


def test_a_gated_weight() -> None:
    gate, up = heavy(2048, 1024), heavy(2048, 1024)
    weight = interleaved(gate, up)
    assert_same(random(5, 1024), weight, pack_or_fail(weight))


def test_nan_and_inf_weights() -> None:
    """Inf and NaN weights affect only their own rows, as with plain weights."""
    weight = heavy(256, 1024)
    weight[3, 100], weight[77, 5], weight[77, 6], weight[130, 1023] = torch.inf, torch.inf, -torch.inf, torch.nan
    made = pack_or_fail(weight)
    for m in (1, 8, 20):
        x = random(m, 1024)
        assert_same(x, weight, made)
        good = linear(x, made, out=poisoned(m, 256), pdl=False).isfinite().all(0)
        assert (~good).nonzero().flatten().tolist() == [3, 77, 130]


@pytest.mark.parametrize("m", (5, 13, 30))
@pytest.mark.parametrize("blocks", (1, 2, 3, 4))
@pytest.mark.parametrize("ctas", (5, 16, 264))
def test_every_plan_has_the_same_bits(m: int, blocks: int, ctas: int) -> None:
    n, k = 1600, 1344
    weight, x = heavy(n, k), random(m, k)
    made = pack_or_fail(weight)
    expected = linear(x, BF16Weight(weight), out=poisoned(m, n, dtype=F32), pdl=False)
    tiles = next(size for size in (1, 2, 4) if 8 * size >= m)
    plan = make_plan(n, k, blocks, tiles, ctas=ctas, header_stride=made.header_stride)
    depths = {1, min(2, plan.stages), plan.stages}
    sets = (0, 1, 2) if plan.grid < -(-n // (16 * blocks)) else (0,)
    for stages, buffers, pdl in product(depths, sets, (False, True)):
        changed = replace(plan, stages=stages, buffers=buffers)
        if changed.shared_bytes <= MAX_SHARED_BYTES:
            ours = linear(x, made, out=poisoned(m, n, dtype=F32), plan=changed, pdl=pdl)
            assert torch.equal(ours, expected), (changed, pdl)


@pytest.mark.parametrize("m", (1, 16, 32))
def test_maximum_number_of_escapes(m: int) -> None:
    n, k = 128, 12288
    weight = random(n, k, scale=k**-0.5)
    weight[20, : MAX_HEADER_BYTES // 5] = 1e-30
    made = pack_or_fail(weight)
    assert made.header_stride > MAX_HEADER_BYTES * 3 // 4
    assert_same(random(m, k), weight, made)


@pytest.mark.parametrize("m", (1, 8, 12, 32))
def test_cuda_graph_with_dependent_launches(m: int) -> None:
    rows = linear_checks.make_decoder_weights(heavy)
    head, x = heavy(16448, 4096), random(m, 4096, scale=0.5)
    plain = [tuple(BF16Weight(w) for w in layer) for layer in rows]
    made = [tuple(pack_or_fail(w) for w in layer) for layer in rows]
    expected = linear_checks.run_layers(linear, x, plain, BF16Weight(head), pdl=False)
    assert torch.equal(linear_checks.check_dependent_launches(linear, x, made, pack_or_fail(head)), expected)


def test_unpack_and_gather_in_a_graph() -> None:
    """The next weight is unpacked into the memory that a product still reads."""
    weights = [heavy(1024, 1024) for _ in range(4)]
    made = [pack_or_fail(weight) for weight in weights]
    ids, scratch = torch.randint(1024, (16,), device="cuda"), poisoned(1024, 1024)

    def work() -> Tensor:
        hidden = gather_rows(ids, made[0], poisoned(16, 1024))
        for one in made:
            hidden = linear(hidden, BF16Weight(unpack(one, scratch)), out=poisoned(16, 1024), pdl=False)
        return linear(hidden, made[1], out=poisoned(16, 1024))

    expected = weights[0][ids]
    for weight in (*weights, weights[1]):
        expected = linear(expected, BF16Weight(weight), out=poisoned(16, 1024), pdl=False)
    assert torch.equal(work(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for _ in range(3):
        captured.fill_(torch.nan)
        scratch.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
