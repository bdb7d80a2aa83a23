"""Products with float8 weights are close to those of the dequantised weights, with every kernel and epilogue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import linear_checks
import pytest
import torch
import torch.nn.functional as F
from gpu_settings import needs_hopper_kernels
from linear_cases import poisoned, random
from torch import Tensor

from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import fp8, fp8_gate_up, fp8_gemm, fp8_weight, fp8_wide, gemm
from emberline.kernels.cuda import linear as skinny
from emberline.kernels.cuda.fp8_weight import FP8Weight
from emberline.kernels.cuda.hopper_backend import HopperBackend
from emberline.kernels.cuda.quantise_rows import QuantisedRows, quantise_rows
from emberline.kernels.cuda.wide import TileConfig
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise
from emberline.kernels.triton import norm

pytestmark = needs_hopper_kernels

BF16, F32 = torch.bfloat16, torch.float32
ROW_SCALES, BLOCK_SCALES = (1, 0), (128, 128)
GROUPS = [ROW_SCALES, BLOCK_SCALES]
# (k, n): layers of Llama 3.1 8B, narrower; of SmolLM2; one unit of k and less; more tiles than CTAs; ragged tails
SHAPES = [(4096, 4096), (14336, 1024), (576, 960), (1536, 576), (128, 64), (16, 64), (192, 40000), (336, 192)]
MAX_ERROR_F32, MAX_ERROR_FP8, MAX_ERROR_BF16 = 1e-5, 4e-3, 4e-3  # relative, of sums in float32, of float8, and bf16
MAX_ERROR_GATED = 8e-3
MAX_ERROR_QUANTISED = 0.05  # of inputs rounded to float8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_matrix(n: int, k: int, group: tuple[int, int]) -> QuantisedMatrix:
    rows = torch.exp2(torch.randint(-2, 3, (n, 1), device="cuda"))
    return quantise(torch.randn(n, k, device="cuda") * rows * k**-0.5, "fp8", *group)


def has_blocks(matrix: QuantisedMatrix) -> bool:
    """Return whether the weight has scales of blocks. If a block is as long as a row, it has scales of rows."""
    return matrix.group_columns < matrix.k


def values_of(rows: QuantisedRows) -> Tensor:
    """Return the values of quantised rows in float64."""
    values = fp8_weight.restore_columns(rows.codes).view(torch.float8_e4m3fn).double()
    if rows.scales.dim() == 1:
        return values * rows.scales[:, None].double()
    scales = rows.scales[:, : len(values)].T.repeat_interleave(128, 1)[:, : values.shape[1]]
    return values * scales.double()


def relative_error(ours: Tensor, exact: Tensor) -> float:
    assert ours.isfinite().all()
    return ((ours.double() - exact).norm() / exact.norm()).item()


def check_epilogues(linear: Callable[..., Tensor], matrix: QuantisedMatrix, x: Tensor, *, has_float32: bool) -> None:
    """Compare a kernel, with its input bound, with exact products of x, which has the values of that input."""
    (m, n), weight, exact = (len(x), matrix.n), fp8_weight.pack(matrix), x @ dequantise(matrix).double().T
    residual, bias = random(m, n), random(n, dtype=F32)
    assert relative_error(linear(weight, out=poisoned(m, n)), exact) < MAX_ERROR_FP8
    added = linear(weight, out=poisoned(m, n), residual=residual)
    assert relative_error(added, exact + residual.double()) < MAX_ERROR_FP8
    in_place = residual.clone()
    assert torch.equal(linear(weight, out=in_place, residual=in_place), added)
    if has_float32:
        assert relative_error(linear(weight, out=poisoned(m, n, dtype=F32)), exact) < MAX_ERROR_FP8
        both = linear(weight, out=poisoned(m, n), residual=residual, bias=bias)
        assert relative_error(both, exact + residual.double() + bias.double()) < MAX_ERROR_FP8
    if matrix.group_rows > 1 and n // 2 % matrix.group_rows:
        return  # the halves of the rows would share scales
    gate, up = exact.chunk(2, 1)
    gated = linear(fp8_weight.pack(matrix, gated=True), out=poisoned(m, n // 2), gated=True)
    assert relative_error(gated, F.silu(gate) * up) < MAX_ERROR_GATED


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (5, 576), (64, 14336), (300, 4096), (7, 16), (3, 32768)])
def test_rows_are_quantised_as_by_the_reference(m: int, k: int, blocks: bool) -> None:
    x = random(m, k)
    x[0] *= 100
    ours, expected = quantise_rows(x, blocks=blocks, pdl=False), quantise(x, "fp8", 1, 128 if blocks else 0)
    scales = ours.scales[:, :m].T if blocks else ours.scales[:, None]
    torch.testing.assert_close(scales, expected.scales, rtol=1e-6, atol=0)  # the kernel's division is not exact
    same = fp8_weight.restore_columns(ours.codes) == expected.codes
    assert same.float().mean() > 0.99, "some are rounded differently, because values are multiplied by 1 / scale"
    assert relative_error(values_of(ours), x.double()) < MAX_ERROR_QUANTISED
    weight = torch.rand(k, device="cuda")
    normed = quantise_rows(x, norm=weight, eps=1e-5, blocks=blocks, pdl=False)
    assert relative_error(values_of(normed), norm.rms_norm(x, weight, 1e-5).double()) < MAX_ERROR_QUANTISED


@pytest.mark.parametrize("k", [336, 4096, 5120, 14336])
def test_a_quantised_row_does_not_depend_on_other_rows(k: int) -> None:
    x, weight = random(70, k), torch.rand(k, device="cuda")
    for scale in (None, weight):
        together = quantise_rows(x, norm=scale, eps=1e-5)
        for i in (0, 33, 69):
            alone = quantise_rows(x[i : i + 1], norm=scale, eps=1e-5)
            assert torch.equal(alone.codes[0], together.codes[i]) and alone.scales[0] == together.scales[i]


def test_a_row_of_zeros_is_quantised_to_zeros() -> None:
    rows = quantise_rows(torch.zeros(2, 256, dtype=BF16, device="cuda"), pdl=False)
    assert (rows.codes == 0).all() and rows.scales.isfinite().all()


def test_every_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(64, 1)
    codes[codes & 127 == 127] = 0  # not a number
    matrix = QuantisedMatrix("fp8", codes, torch.ones(64, 1, device="cuda"), 1, 256)
    weight, x = fp8_weight.pack(matrix), torch.eye(256, dtype=BF16, device="cuda")
    parts = [
        skinny.linear(x[i : i + 16], weight, out=poisoned(16, 64, dtype=F32), pdl=False) for i in range(0, 256, 16)
    ]
    assert torch.equal(torch.cat(parts).T, dequantise(matrix))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_few_rows_are_as_exact_as_bf16(k: int, n: int, m: int, group: tuple[int, int]) -> None:
    matrix, x = make_matrix(n, k, group), random(m, k)
    check_epilogues(partial(skinny.linear, x, pdl=False), matrix, x.double(), has_float32=True)
    logits = skinny.linear(x, fp8_weight.pack(matrix), out=poisoned(m, n, dtype=F32), pdl=False)
    assert relative_error(logits, x.double() @ dequantise(matrix).double().T) < MAX_ERROR_F32


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [17, 32, 33, 64, 100, 128, 129, 200, 256])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_dozens_of_rows(k: int, n: int, m: int, group: tuple[int, int]) -> None:
    matrix = make_matrix(n, k, group)
    if not fp8_wide.supports(m, n, k, has_blocks=has_blocks(matrix)):
        pytest.skip("computed by fp8_gemm")
    rows = quantise_rows(random(m, k), blocks=has_blocks(matrix), pdl=False)
    check_epilogues(partial(fp8_wide.linear, rows, pdl=False), matrix, values_of(rows), has_float32=True)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_every_tile_of_dozens_of_rows(group: tuple[int, int], split: int) -> None:
    n, k = 1024, 2048
    matrix = make_matrix(n, k, group)
    weight, values = fp8_weight.pack(matrix), dequantise(matrix).double()
    for columns, counts in (
        fp8_wide.BLOCK_GROUPS_BY_COLUMNS if weight.has_blocks else fp8_wide.GROUPS_BY_COLUMNS
    ).items():
        rows = quantise_rows(random(columns - 3, k), blocks=weight.has_blocks, pdl=False)
        for groups in counts:
            for unclustered in (False, True) if split > 1 else (False,):
                plan = fp8_wide.make_plan(columns, n, k, TileConfig(groups, split, unclustered=unclustered))
                y = fp8_wide.linear(rows, weight, out=poisoned(columns - 3, n), plan=plan, pdl=False)
                assert relative_error(y, values_of(rows) @ values.T) < MAX_ERROR_FP8, plan


@pytest.mark.parametrize("width", fp8_gate_up.WIDTHS)
@pytest.mark.parametrize("m", [1, 17, 33, 64, 65, 128, 129, 200, 256])
@pytest.mark.parametrize(("k", "n"), [(4096, 8448), (576, 1024), (16, 64), (336, 40000)])
def test_gates_and_ups_of_dozens_of_rows(k: int, n: int, m: int, width: int) -> None:
    rows, matrix = quantise_rows(random(m, k), pdl=False), make_matrix(n, k, ROW_SCALES)
    gate, up = (values_of(rows) @ dequantise(matrix).double().T).chunk(2, 1)
    weight = fp8_weight.pack(matrix, gated=True)
    y = fp8_gate_up.gate_up(rows, weight, out=poisoned(m, n // 2), width=width, pdl=False)
    assert relative_error(y, F.silu(gate) * up) < MAX_ERROR_GATED
    early = fp8_gate_up.gate_up(rows, weight, out=poisoned(m, n // 2), width=width, stages=2)
    assert torch.equal(early, y)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [17, 129, 300, 1000])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_prompts(k: int, n: int, m: int, group: tuple[int, int]) -> None:
    matrix = make_matrix(n, k, group)
    rows = quantise_rows(random(m, k), blocks=has_blocks(matrix), pdl=False)
    check_epilogues(partial(fp8_gemm.linear, rows, pdl=False), matrix, values_of(rows), has_float32=False)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("plan", gemm.PLANS)
def test_every_tile_of_prompts(plan: gemm.GemmPlan, group: tuple[int, int]) -> None:
    if group == BLOCK_SCALES and plan.width > fp8_gemm.MAX_BLOCK_WIDTH:
        pytest.skip("not with scales of blocks")
    rows, matrix = (
        quantise_rows(random(700, 1152), blocks=group == BLOCK_SCALES, pdl=False),
        make_matrix(960, 1152, group),
    )
    linear = partial(fp8_gemm.linear, rows, pdl=False, plan=plan)
    check_epilogues(linear, matrix, values_of(rows), has_float32=False)


@pytest.mark.parametrize("m", [4, 48, 300])
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_that_start_early_give_the_same_bits(group: tuple[int, int], m: int) -> None:
    def make(n: int, k: int) -> FP8Weight:
        return fp8_weight.pack(make_matrix(n, k, group), gated=n == linear_checks.DECODER_SIZES[2][0])

    def linear(x: Tensor, w: FP8Weight, *, pdl: bool, **options: object) -> Tensor:
        if m <= fp8.MAX_EXACT_ROWS:
            return skinny.linear(x, w, pdl=pdl, **options)  # type: ignore[arg-type]
        rows = quantise_rows(x, blocks=w.has_blocks, pdl=pdl)
        kernel = fp8_wide.linear if m <= fp8.MAX_WIDE_ROWS else fp8_gemm.linear
        return kernel(rows, w, pdl=pdl, **options)  # type: ignore[operator]

    linear_checks.check_dependent_launches(linear, random(m, 4096), linear_checks.make_decoder_weights(make))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 129, 256, 257, 600])
def test_backend_computes_layers(m: int, group: tuple[int, int]) -> None:
    n, k, backend = 1024, 2048, HopperBackend()
    matrix, x, residual = make_matrix(n, k, group), random(m, k), random(m, n)
    weight, gated = backend.pack_quantised(matrix), backend.pack_quantised(matrix, gated=True)
    assert weight.layout is WeightLayout.QUANTISED
    scale, bias = torch.rand(k, device="cuda"), random(n, dtype=F32)
    normed = norm.rms_norm(x, scale, 1e-5).double()
    exact = normed @ dequantise(matrix).double().T
    limit = MAX_ERROR_BF16 if m <= fp8.MAX_EXACT_ROWS else MAX_ERROR_QUANTISED
    layer = LinearLayer(weight, bias, scale, 1e-5)
    assert relative_error(backend.linear(x, layer, LinearOutput()), exact + bias.double()) < limit
    logits = backend.linear(x, layer, LinearOutput(float32=True))
    assert logits.dtype is F32 and relative_error(logits, exact + bias.double()) < limit
    out = poisoned(m, n)
    assert backend.linear(x, layer, LinearOutput(out=out)) is out and out.isfinite().all()
    added = residual.clone()
    backend.linear(x, layer, LinearOutput(add_to=added))
    assert relative_error(added, exact + bias.double() + residual.double()) < limit
    gate, up = exact.chunk(2, 1)
    pair = LinearLayer(gated, None, scale, 1e-5)
    assert relative_error(backend.gate_up_silu(x, pair), F.silu(gate) * up) < 2 * limit
    assert relative_error(backend.gate_up_gelu(x, pair), F.gelu(gate, approximate="tanh") * up) < 2 * limit


def test_other_kernels_compute_unsupported_matrices() -> None:
    matrix, x = make_matrix(96, 256, ROW_SCALES), random(5, 256)
    weight = HopperBackend().pack_quantised(matrix)
    assert not isinstance(weight.handle, FP8Weight)
    y = HopperBackend().linear(x, LinearLayer(weight), LinearOutput())
    assert relative_error(y, x.double() @ dequantise(matrix).double().T) < MAX_ERROR_GATED
