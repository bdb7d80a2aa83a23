"""Float8 weights in the layout of the CUDA kernels keep all values, and plans of their products fit onto an SM."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from gated_weights import interleaved
from torch import Tensor

from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import fp8, fp8_gemm, fp8_weight, fp8_wide, linear, quantise_rows
from emberline.kernels.cuda.fp8_weight import FP8Weight
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 16), (128, 576), (192, 32768)]


def values_of(weight: FP8Weight) -> Tensor:
    """Return the values of a weight as its scales and the order of its columns define them."""
    codes = fp8_weight.restore_columns(weight.codes).view(torch.float8_e4m3fn).float()
    if weight.row_scales is not None:
        return codes * weight.row_scales[:, None]
    assert weight.block_scales is not None
    scales = weight.block_scales[: weight.n // 16].repeat_interleave(16, 0)
    return codes * scales.repeat_interleave(128, 1)[:, : weight.k]


def make_matrix(n: int, k: int, group: tuple[int, int]) -> QuantisedMatrix:
    torch.manual_seed(0)
    return quantise(torch.randn(n, k), "fp8", *group)


@pytest.mark.parametrize("group", [(1, 0), (128, 128), (16, 256), (64, 0)])
@pytest.mark.parametrize("k", [16, 576, 1024])
def test_packing_keeps_all_values(k: int, group: tuple[int, int]) -> None:
    matrix = make_matrix(256, k, group)
    exact = dequantise(matrix)
    weight, gated = fp8.pack(matrix), fp8.pack(matrix, gated=True)
    assert weight is not None and gated is not None and weight.layout is WeightLayout.QUANTISED
    assert isinstance(weight.handle, FP8Weight) and isinstance(gated.handle, FP8Weight)
    assert torch.equal(values_of(weight.handle), exact)
    assert torch.equal(values_of(gated.handle), interleaved(*exact.chunk(2)))
    assert (weight.n, weight.k, weight.gated, gated.gated) == (256, k, False, True)


def test_lanes_find_the_codes_of_their_columns() -> None:
    placed = fp8_weight.order_columns(torch.arange(32)[None])[0]
    for group, lane in ((0, 0), (0, 3), (1, 2)):
        first = 16 * group + 2 * lane  # even bytes are columns 2t and 2t + 1 of an mma's 16, odd bytes those 8 further
        assert placed[16 * group + 4 * lane :][:4].tolist() == [first, first + 8, first + 1, first + 9]


@pytest.mark.parametrize(
    ("n", "k", "group"), [(96, 256, (1, 0)), (64, 24, (1, 0)), (64, 256, (8, 128)), (64, 256, (1, 64))]
)
def test_other_matrices_are_left_to_the_default(n: int, k: int, group: tuple[int, int]) -> None:
    assert fp8.pack(make_matrix(n, k, group)) is None
    assert fp8.pack(quantise(torch.randn(64, 256), "int4", 1, 128)) is None


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plans_fit_into_shared_memory(n: int, k: int) -> None:
    assert fp8_weight.supports_shape(n, k)
    for m in range(1, fp8.MAX_PLAIN_ROWS + 1):
        for source, gated in product(("Fp8Rows", "Fp8Blocks"), (False, True)):
            plan = linear.choose_plan(m, n, k, gated=gated, fp8_source=source)
            assert plan.stages > 0 and plan.shared_bytes <= linear.MAX_SHARED_BYTES
            assert plan.kernel_name("GATED" if gated else "STORE") in linear.VARIANTS
    for m in range(fp8.MAX_EXACT_ROWS + 1, fp8_wide.MAX_ROWS + 1):
        for has_blocks in (False, True):
            if not fp8_wide.supports(m, n, k, has_blocks=has_blocks):
                continue
            columns = fp8_wide.choose_tile_columns(m, has_blocks=has_blocks)
            wide_plan = fp8_wide.choose_plan(columns, n, k, has_blocks=has_blocks)
            assert wide_plan.stages >= max(2, wide_plan.min_stages)
            assert wide_plan.shared_bytes <= linear.MAX_SHARED_BYTES
            assert fp8_wide.kernel_name(wide_plan, has_blocks) in fp8_wide.VARIANTS
            gemm_plan = fp8_gemm.choose_plan(m, n, k, has_blocks=has_blocks)
            assert fp8_gemm.kernel_name(gemm_plan, "ADD", has_blocks) in fp8_gemm.VARIANTS


@pytest.mark.parametrize("k", [16, 336, 4096, 5120, 8192, 14336, fp8_weight.MAX_K])
def test_threads_that_quantise_a_row_have_all_its_columns(k: int) -> None:
    chunks, threads = quantise_rows.choose_chunks(k)
    assert threads % 32 == 0 and 32 <= threads <= quantise_rows.MAX_THREADS and chunks in quantise_rows.CHUNKS
    assert k <= chunks * threads * fp8_weight.ORDER_GROUP < k + 32 * chunks * fp8_weight.ORDER_GROUP


@pytest.mark.parametrize("blocks", [False, True])
def test_more_rows_than_a_launch_computes_are_divided(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    m, k, n = fp8_gemm.MAX_ROWS + 700, 128, 128
    codes, scales = torch.zeros(m, k, dtype=torch.uint8), torch.arange(float(m)).expand(k // 128 if blocks else 1, m)
    rows = quantise_rows.QuantisedRows(codes, scales if blocks else scales[0])
    x, out = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16)
    weight = WeightStub(n, k, blocks)
    calls: list[tuple[int, float, float]] = []

    def record(part: quantise_rows.QuantisedRows, w: object, *, out: Tensor, residual: Tensor, gated: bool) -> None:
        assert len(part.codes) == len(out) == len(residual) <= fp8_gemm.MAX_ROWS and w is weight and not gated
        found = part.scales.reshape(-1, len(out))[0]
        calls.append((len(out), found[0].item(), found[-1].item()))

    monkeypatch.setattr(fp8, "_weight_of", lambda layer: weight)
    monkeypatch.setattr(fp8, "quantise_rows", lambda *args, **options: rows)
    monkeypatch.setattr(fp8_gemm, "linear", record)
    packed = PackedWeight(codes, n, k, torch.bfloat16, WeightLayout.QUANTISED, False, 0, weight)
    fp8.linear(x, LinearLayer(packed, torch.ones(k)), LinearOutput(add_to=out))
    assert calls == [(fp8_gemm.MAX_ROWS, 0.0, fp8_gemm.MAX_ROWS - 1.0), (700, float(fp8_gemm.MAX_ROWS), m - 1.0)]


class WeightStub(NamedTuple):
    n: int
    k: int
    has_blocks: bool
