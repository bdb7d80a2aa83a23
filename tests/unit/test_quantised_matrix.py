"""QuantisedMatrix: what codes and scales mean, and that quantising rounds to the nearest code."""

from __future__ import annotations

import pytest
import torch

from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import CodeKind, QuantisedMatrix, dequantise, stack_rows

# Kind, groups, and the largest error of a value relative to the largest value of its group.
CASES: list[tuple[CodeKind, int, int, float]] = [
    ("fp8", 1, 0, 1 / 28),
    ("fp8", 16, 32, 1 / 28),
    ("int4", 1, 32, 1 / 14 + 1 / 256),
    ("mxfp4", 1, 32, 1 / 4),
    ("nvfp4", 1, 16, 1 / 6 + 1 / 16),
]


@pytest.mark.parametrize(("kind", "rows", "columns", "limit"), CASES)
def test_quantised_values_are_near_the_originals(kind: CodeKind, rows: int, columns: int, limit: float) -> None:
    values = torch.randn(3, 48, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    values[1] *= 1000
    values[:, 5, 32:64] = 0
    matrix = quantise(values, kind, rows, columns)
    error = (dequantise(matrix) - values).abs()
    wide = columns or 128
    groups = values.abs().unflatten(-1, (-1, wide)).unflatten(-3, (-1, rows)).amax(dim=(-3, -1))
    largest = groups.repeat_interleave(rows, -2).repeat_interleave(wide, -1)
    assert (error <= largest * limit).all()
    assert (matrix.n, matrix.k) == (48, 128)


def test_fp8_groups_need_not_divide_the_matrix() -> None:
    values = torch.randn(20, 40, generator=torch.Generator().manual_seed(2))
    matrix = quantise(values, "fp8", 16, 32)
    assert matrix.scales.shape == (2, 2)
    assert torch.allclose(dequantise(matrix), values, rtol=0.07, atol=0.02)


def test_codes_of_a_byte_are_in_the_order_of_columns() -> None:
    codes = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    scales = torch.tensor([[2.0]])
    assert dequantise(QuantisedMatrix("int4", codes, scales, 1, 4)).tolist() == [[-14.0, -12.0, -16.0, 14.0]]
    zeros = torch.tensor([[1]], dtype=torch.uint8)
    assert dequantise(QuantisedMatrix("int4", codes, scales, 1, 4, zeros)).tolist() == [[0.0, 2.0, -2.0, 28.0]]
    exponents = torch.tensor([[128]], dtype=torch.uint8)
    assert dequantise(QuantisedMatrix("mxfp4", codes, exponents, 1, 4)).tolist() == [[1.0, 2.0, 0.0, -12.0]]


def test_columns_say_which_input_a_column_multiplies() -> None:
    codes = torch.tensor([[0x98, 0xBA]], dtype=torch.uint8)  # 0, 1, 2, 3
    matrix = QuantisedMatrix("int4", codes, torch.ones(1, 1), 1, 4, columns=torch.tensor([2, 0, 3, 1]))
    assert dequantise(matrix).tolist() == [[1.0, 3.0, 0.0, 2.0]]


def test_stacked_rows_equal_their_parts() -> None:
    parts = [quantise(torch.randn(32, 64), kind, 16, 32) for kind in ("fp8", "fp8")]
    assert torch.equal(dequantise(stack_rows(parts)), torch.cat([dequantise(part) for part in parts]))
    parts = [quantise(torch.randn(rows, 64), "nvfp4") for rows in (8, 24)]
    assert torch.equal(dequantise(stack_rows(parts)), torch.cat([dequantise(part) for part in parts]))


def test_search_lowers_the_error_of_int4() -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    nearest, searched = (dequantise(quantise(values, "int4", 1, 128, search=search)) for search in (False, True))
    before, after = ((each - values).square().mean() for each in (nearest, searched))
    assert after < 0.85 * before
    assert (
        (searched - values).square().unflatten(1, (-1, 128)).sum(2)
        <= (nearest - values).square().unflatten(1, (-1, 128)).sum(2)
    ).all()
