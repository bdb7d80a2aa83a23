"""Products with matrices of narrow codes on a GPU, compared with `dequantise` in float64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import narrow_cases
import pytest
import torch
import torch.nn.functional as F
from narrow_cases import BF16, make_matrix
from parallel_compilation import compile_cuda_kernels, compiling_only, is_alone
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import narrow as packed_narrow
from emberline.kernels.cuda import narrow_wide, routing
from emberline.kernels.cuda.hopper_backend import HopperBackend
from emberline.kernels.cuda.narrow_layout import pack
from emberline.kernels.mixture import ClampedSwiGLU, Mixture, Routing, StackedExperts
from emberline.kernels.packed_weight import PackedExperts
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise
from emberline.kernels.triton import experts, narrow
from emberline.kernels.triton.routing import SortedRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = "cuda"
PACKED = [name for name in narrow_cases.FORMATS if not name.startswith("fp8")]
TRITON_SIZES = [(1, 512, 1024), (20, 96, 256), (50, 576, 2944), (200, 256, 512)]
TRITON_EXPERTS = ["int4-32", "int4-64-zeros", "mxfp4", "nvfp4", "fp8-block"]
TRITON_EXPERT_SIZES = [(1, (256, 128)), (40, (384, 256)), (300, (256, 640))]
# Routings of experts, and clamps. The engine's faster routing kernels sort the rows: Triton's take long to compile.
EXPERT_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"clamp": ClampedSwiGLU(1.7, 1.0), "route": routing.route_rows},
    "llama4": {"route": routing.route_rows},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def cuda_kernels() -> None:
    """Compile the kernels of the tests that use this fixture in parallel."""
    if is_alone():
        compile_cuda_kernels("narrow", "narrow_wide", "routing")


@pytest.fixture(scope="module")
def triton_kernels() -> None:
    """Compile the kernels of the tests that use this fixture in parallel."""
    if not is_alone():
        return
    with compiling_only(narrow):
        for name, (rows, n, k) in product(narrow_cases.FORMATS, TRITON_SIZES):
            case = narrow_cases.DenseCase.make(GPU, name, rows, n, k)
            case.multiply(partial(narrow.multiply, pdl=True))
            narrow.dequantise_rows(case.matrix, torch.empty(n, k, dtype=BF16, device=GPU), pdl=True)
        for name, (rows, sizes), (kind, options) in product(
            TRITON_EXPERTS, TRITON_EXPERT_SIZES, EXPERT_OPTIONS.items()
        ):
            tile_rows, gate_up, down = choose_products(rows)
            case_of_experts = narrow_cases.ExpertCase.make(GPU, name, kind, rows, sizes, tile_rows, pdl=True, **options)
            case_of_experts.multiply_down(case_of_experts.multiply_gate_up(gate_up), down)


def choose_products(rows: int) -> tuple[int, Any, Any]:
    """Return the rows of a tile, and the products of experts."""
    tiles = experts.choose_tiles(4 * rows, 6, BF16)
    gate_up, down = narrow.multiply_gate_up, narrow.multiply_down
    return tiles.rows, partial(gate_up, tile=tiles.gate_up), partial(down, tile=tiles.down)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("name", narrow_cases.FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), TRITON_SIZES)
def test_triton_products(name: str, rows: int, n: int, k: int) -> None:
    narrow_cases.check_multiply(GPU, name, rows, n, k, partial(narrow.multiply, pdl=True))
    narrow_cases.check_dequantised(GPU, name, n, k, pdl=True)


def check_experts(name: str, rows: int, sizes: tuple[int, int], tile_rows: int, *products: Any, pdl: bool) -> None:
    for kind, options in EXPERT_OPTIONS.items():
        narrow_cases.check_expert_products(GPU, name, kind, rows, sizes, tile_rows, *products, pdl=pdl, **options)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("name", TRITON_EXPERTS)
@pytest.mark.parametrize(("rows", "sizes"), TRITON_EXPERT_SIZES)
def test_triton_experts(name: str, rows: int, sizes: tuple[int, int]) -> None:
    check_experts(name, rows, sizes, *choose_products(rows), pdl=True)


def pack_matrix(matrix: QuantisedMatrix, *, gated: bool = False) -> Any:
    packed = pack(matrix, gated=gated)
    assert packed is not None
    return packed


def multiply_packed(x: Tensor, matrix: QuantisedMatrix, out: Tensor, **options: Any) -> Tensor:
    w = pack_matrix(matrix, gated=options.get("gated", False))
    result = packed_narrow.linear(x, w, out=out, **options)
    options |= {"residual": None, "fixed_order": True}
    all_rows = packed_narrow.linear(x, w, out=torch.empty_like(out), **options)
    rows = torch.randperm(len(x), device=x.device)[: max(1, len(x) // 3)]
    few = packed_narrow.linear(x[rows], w, out=out.new_empty(len(rows), out.shape[1]), **options)
    assert torch.equal(few, all_rows[rows])  # a row's result does not depend on the others
    return result


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("rows", "n", "k"), [
    (1, 512, 1024), (8, 96, 2944), (9, 6144, 512), (20, 160, 256), (32, 2880, 2944), (50, 576, 128), (100, 96, 4096),
])  # fmt: skip
def test_products(name: str, rows: int, n: int, k: int) -> None:
    narrow_cases.check_multiply(GPU, name, rows, n, k, multiply_packed)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "nvfp4"])
def test_depth_that_fills_no_unit(name: str) -> None:
    for rows, k in ((3, 2880), (17, 96), (9, 416)):
        narrow_cases.check_multiply(GPU, name, rows, 128, k, multiply_packed)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("size", packed_narrow.TILE_SIZES, ids=str)
def test_plans(size: tuple[int, int, int]) -> None:
    """All plans give the same results, whatever the stages, buffers and warps that share k."""
    matrix, rows = make_matrix("int4-64-zeros", 672, 1408, device=GPU), 8 * size[1] - 1
    x, w = torch.randn(rows, 1408, device=GPU).to(BF16), pack_matrix(matrix)
    exact = x.double() @ dequantise(matrix).double().T
    for parts in (part for part in (1, 2, 4, 16) if part <= size[2]):
        for stages, buffers in ((1, 1), (2, 0), (3, 1), (2, 2)):
            plan = packed_narrow.FourBitPlan(*size, parts, stages, buffers, 1)
            if plan.shared_bytes(rows, w.unit_bytes) > packed_narrow.MAX_SHARED_BYTES:
                continue
            out = torch.full((rows, 672), torch.nan, device=GPU)
            packed_narrow.linear(x, w, out=out, plan=plan)
            assert float((out.double() - exact).norm() / exact.norm()) < 1e-5


def multiply_wide(x: Tensor, matrix: QuantisedMatrix, out: Tensor, **options: Any) -> Tensor:
    return narrow_wide.linear(x, pack_matrix(matrix, gated=options.get("gated", False)), out=out, **options)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 512, 1024), (20, 192, 256), (32, 2880, 2944), (50, 576, 128), (100, 64, 4096), (256, 6144, 512)],
)
def test_products_of_many_rows(name: str, rows: int, n: int, k: int) -> None:
    narrow_cases.check_multiply(GPU, name, rows, n, k, multiply_wide)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("columns", narrow_wide.COLUMNS)
@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "nvfp4"])
def test_wide_plans(name: str, columns: int) -> None:
    matrix, rows = make_matrix(name, 672, 1344, device=GPU), columns - 3
    x, w = torch.randn(rows, 1344, device=GPU).to(BF16), pack_matrix(matrix)
    exact = x.double() @ dequantise(matrix).double().T
    for groups in narrow_wide.GROUPS[columns]:
        for parts, stages in ((1, 1 if name == "int4-32" else 2), (2, 2), (4, 3)):
            out = torch.full((rows, 672), torch.nan, device=GPU)
            narrow_wide.linear(x, w, out=out, plan=narrow_wide.WideFourBitPlan(groups, columns, parts, stages))
            assert float((out.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("columns", narrow_wide.COLUMNS)
@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "nvfp4"])
def test_rows_of_a_tile_with_few_rows_have_the_same_bits(name: str, columns: int) -> None:
    """The last tile has two rows, which are copied and multiplied as a half tile."""
    w, x = pack_matrix(make_matrix(name, 192, 1344, device=GPU)), torch.randn(columns + 2, 1344, device=GPU).to(BF16)
    x[columns:] = x[:2]
    out = torch.full((columns + 2, 192), torch.nan, device=GPU)
    narrow_wide.linear(x, w, out=out, plan=narrow_wide.WideFourBitPlan(1, columns, 1, 3))
    assert torch.equal(out[columns:], out[:2])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", PACKED)
def test_unpack(name: str) -> None:
    for n, k in ((96, 2944), (672, 256)):
        matrix = make_matrix(name, n, k, device=GPU)
        out = torch.full((n, k), torch.nan, device=GPU, dtype=BF16)
        values = dequantise(matrix).to(BF16)
        assert torch.equal(packed_narrow.unpack(pack_matrix(matrix), out), values)
        group = 16 if n // 2 % 16 == 0 else n // 2
        gates, ups = values.view(2, -1, group, k)
        packed_narrow.unpack(pack_matrix(matrix, gated=True), out)
        assert torch.equal(out, torch.stack([gates, ups], 1).view(n, k))


def multiply_packed_gate_up(x: Tensor, matrices: QuantisedMatrix, *args: Any, **options: Any) -> Tensor:
    return packed_narrow.multiply_gate_up(x, pack_matrix(matrices, gated=True), *args, **options)


def multiply_packed_down(x: Tensor, matrices: QuantisedMatrix, *args: Any, **options: Any) -> Tensor:
    return packed_narrow.multiply_down(x, pack_matrix(matrices), *args, **options)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", [name for name in PACKED if "order" not in name])
@pytest.mark.parametrize("tile_rows", [8, 16, 32])
@pytest.mark.parametrize(("rows", "sizes"), [(1, (256, 128)), (40, (384, 256)), (300, (256, 640))])
def test_experts(name: str, tile_rows: int, rows: int, sizes: tuple[int, int]) -> None:
    check_experts(name, rows, sizes, tile_rows, multiply_packed_gate_up, multiply_packed_down, pdl=True)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", ["int4-32", "int4-64-zeros", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tile_rows", narrow_wide.COLUMNS)
@pytest.mark.parametrize(("rows", "sizes"), [(1, (256, 128)), (40, (384, 256)), (300, (256, 704))])
def test_experts_of_many_rows(name: str, tile_rows: int, rows: int, sizes: tuple[int, int]) -> None:
    """The inner activations are in the order of sorted rows, and are compared in that of assignments."""

    def multiply_gate_up(x: Tensor, matrices: QuantisedMatrix, sorted_rows: SortedRows, **options: Any) -> Tensor:
        w = pack_matrix(matrices, gated=True)
        return narrow_wide.multiply_gate_up(x, w, sorted_rows, **options)[find_places(sorted_rows)]

    def multiply_down(inner: Tensor, matrices: QuantisedMatrix, sorted_rows: SortedRows, **options: Any) -> Tensor:
        placed = inner.new_zeros(len(sorted_rows.order), inner.shape[1])
        placed[find_places(sorted_rows)] = inner
        return narrow_wide.multiply_down(placed, pack_matrix(matrices), sorted_rows, **options)

    check_experts(name, rows, sizes, tile_rows, multiply_gate_up, multiply_down, pdl=False)


def find_places(rows: SortedRows) -> Tensor:
    """Return the place of each assignment in the order of sorted rows."""
    places = torch.empty(len(rows.weights), dtype=torch.int64, device=rows.order.device)
    for tile, count in enumerate(rows.tile_counts[: int(rows.num_tiles)].tolist()):
        start = tile * rows.tile_rows
        places[rows.order[start : start + count].long()] = torch.arange(start, start + count, device=places.device)
    return places


@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "fp8-row"])
def test_mixture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture with narrow experts agrees with one of their values, captured too, and with inputs copied in parts."""
    matrices = [make_matrix(name, 6, n, k, device=GPU) for n, k in ((512, 384), (384, 256))]
    norm, router = torch.rand(384, device=GPU) + 0.5, torch.randn(6, 384, device=GPU).to(BF16) / 20
    rules, backend = Routing(4, renormalize=True), HopperBackend()
    biases = [torch.randn(6, n, device=GPU) for n in (512, 384)]
    gate_up, down = (backend.pack_quantised_experts(m, gated=i == 0) for i, m in enumerate(matrices))
    packed = StackedExperts(gate_up, down, *biases)
    plain = StackedExperts(*(dequantise(matrix).to(BF16) for matrix in matrices), *biases)
    assert isinstance(packed.down, PackedExperts)
    narrow_mixture, plain_mixture = (
        Mixture(norm, 1e-6, ops.pack_linear(router), experts, rules, clamp=ClampedSwiGLU(1.7, 3.0))
        for experts in (packed, plain)
    )
    for rows in (1, 5, 64, 700):
        x = torch.randn(rows, 384, device=GPU).to(BF16)
        ours, theirs = (ops.run_mixture(x.clone(), mixture) for mixture in (narrow_mixture, plain_mixture))
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.01
        with monkeypatch.context() as patch:
            patch.setattr(narrow_wide, "MAX_COPIED_PLACES", 512)
            for _ in range(10):
                assert torch.equal(ops.run_mixture(x.clone(), narrow_mixture), ours)
        state, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.run_mixture(state, narrow_mixture)
        for _ in range(10):
            state.copy_(x)
            graph.replay()
            assert torch.equal(state, ours)


@pytest.mark.parametrize("name", ["int4-128-f16", "int4-128-zeros-f16-order", "nvfp4"])
def test_layers(name: str) -> None:
    """The ops of the backend agree with dequantised weights, for few rows and for many, which unpack the weight."""
    matrix, backend = make_matrix(name, 512, 384, device=GPU), HopperBackend()
    values, bias = dequantise(matrix), torch.randn(512, device=GPU)
    weight = backend.pack_quantised(matrix)
    gated = backend.pack_quantised(matrix, gated=True)
    for rows in (1, 40, 300):
        x, residual = (torch.randn(rows, size, device=GPU).to(BF16) for size in (384, 512))
        product = x.float() @ values.T
        layer = LinearLayer(weight, bias)
        for ours, exact in (
            (backend.linear(x, layer, LinearOutput()), product + bias),
            (backend.linear(x, layer, LinearOutput(float32=True)), product + bias),
            (backend.linear(x, layer, LinearOutput(add_to=residual.clone())), product + bias + residual.float()),
            (backend.gate_up_silu(x, LinearLayer(gated)), F.silu(product[:, :256]) * product[:, 256:]),
            (
                backend.gate_up_gelu(x, LinearLayer(gated)),
                F.gelu(product[:, :256], approximate="tanh") * product[:, 256:],
            ),
        ):
            assert float((ours.float() - exact).norm() / exact.norm()) < 6e-3
