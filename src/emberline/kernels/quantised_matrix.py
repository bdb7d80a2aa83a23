"""QuantisedMatrix: a matrix of narrow codes and their scales, in the one form that all backends receive.

Publishers store the same numbers in many ways. Loaders convert them to this form; a backend may convert it further to
the layout that its kernel reads. `dequantise` defines what the codes mean.

| kind | a code | a row of `codes` | value |
|---|---|---|---|
| fp8 | float8 e4m3 | k bytes | code * scale |
| int4 | 0 .. 15 | k / 2 bytes | (code - zero) * scale; zero is 8 without `zeros` |
| mxfp4 | float4 e2m1 | k / 2 bytes | code * 2 ** (scale - 127) |
| nvfp4 | float4 e2m1 | k / 2 bytes | code * scale * row_scale |

The lower 4 bits of a byte are the code of one column, and the upper 4 bits are the code of the next column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["fp8", "int4", "mxfp4", "nvfp4"]
CODE_BITS: dict[CodeKind, int] = {"fp8": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4}
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_ZERO = 8
EXPONENT_BIAS = 127
MXFP4_COLUMNS, NVFP4_COLUMNS = 32, 16  # columns that share a scale
MAX_DECODED_WEIGHTS = 16 << 20  # at a time, to bound the memory for float32 values


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A matrix [n, k], or with one more dimension in front, a matrix for each expert.

    `group_rows` by `group_columns` weights share a scale. All kinds but fp8 have group_rows = 1, and k is a multiple
    of group_columns. The last groups of fp8 may be smaller than the others.
    """

    kind: CodeKind
    codes: Tensor  # uint8 [.., n, bytes of a row]
    scales: Tensor  # [.., groups of rows, groups of columns]: float32, bf16 or float16; mxfp4 uint8; nvfp4 e4m3
    group_rows: int
    group_columns: int
    zeros: Tensor | None = None  # int4: uint8, of the shape of the scales
    row_scale: Tensor | None = None  # nvfp4: float32 [.., n]
    columns: Tensor | None = None  # int64 [k]: column i of this matrix multiplies element columns[i] of the input

    @property
    def n(self) -> int:
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        return self.codes.shape[-1] * 8 // CODE_BITS[self.kind]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.row_scale, self.columns)
        return sum(part.nbytes for part in parts if part is not None)


def dequantise(matrix: QuantisedMatrix) -> Tensor:
    """Return the values in float32. Columns are in the order of a layer's inputs, not of the codes."""
    values = _decode(matrix) * expand_scales(matrix)
    if matrix.row_scale is not None:
        values *= matrix.row_scale[..., None]
    if matrix.columns is None:
        return values
    ordered = torch.empty_like(values)
    ordered[..., matrix.columns] = values
    return ordered


def dequantise_to_bf16(matrix: QuantisedMatrix) -> Tensor:
    """Return the values of `dequantise` rounded to bf16. To save memory, only some are in float32 at a time."""
    values = torch.empty(*matrix.codes.shape[:-1], matrix.k, dtype=torch.bfloat16, device=matrix.codes.device)
    if matrix.codes.ndim > 2:
        for number in range(len(matrix.codes)):
            values[number] = dequantise_to_bf16(select_expert(matrix, number))
        return values
    step = max(1, MAX_DECODED_WEIGHTS // max(1, matrix.k) // matrix.group_rows) * matrix.group_rows
    for start in range(0, matrix.n, step):
        values[start : start + step] = dequantise(slice_rows(matrix, start, min(start + step, matrix.n)))
    return values


def select_expert(matrix: QuantisedMatrix, number: int) -> QuantisedMatrix:
    """Return the matrix of an expert, whose tensors are views."""
    return _map_parts(matrix, lambda part: part[number])


def slice_rows(matrix: QuantisedMatrix, start: int, end: int) -> QuantisedMatrix:
    """Return the rows [start, end), whose tensors are views. `start` must begin a group of rows."""
    first, last = start // matrix.group_rows, -(-end // matrix.group_rows)
    assert first * matrix.group_rows == start
    rows = replace(matrix, codes=matrix.codes[..., start:end, :], scales=matrix.scales[..., first:last, :])
    zeros, row_scale = matrix.zeros, matrix.row_scale
    return replace(
        rows,
        zeros=None if zeros is None else zeros[..., start:end, :],
        row_scale=None if row_scale is None else row_scale[..., start:end],
    )


def scale_matrix(matrix: QuantisedMatrix, factor: float) -> QuantisedMatrix:
    """Return the matrix with all values multiplied by a power of two."""
    if factor == 1.0:
        return matrix
    if matrix.kind == "mxfp4":
        exponents = matrix.scales.to(torch.int16) + round(math.log2(factor))
        return replace(matrix, scales=exponents.clamp(0, 2 * EXPONENT_BIAS).to(torch.uint8))
    if matrix.row_scale is not None:
        return replace(matrix, row_scale=matrix.row_scale * factor)
    return replace(matrix, scales=matrix.scales * factor)


def _map_parts(matrix: QuantisedMatrix, change: Callable[[Tensor], Tensor]) -> QuantisedMatrix:
    zeros, row_scale = matrix.zeros, matrix.row_scale
    return replace(
        matrix,
        codes=change(matrix.codes),
        scales=change(matrix.scales),
        zeros=None if zeros is None else change(zeros),
        row_scale=None if row_scale is None else change(row_scale),
    )


def expand_scales(matrix: QuantisedMatrix) -> Tensor:
    """Return the scale of each weight in float32, without `row_scale`."""
    scales = matrix.scales
    if matrix.kind == "mxfp4":
        scales = torch.exp2(scales.to(torch.float32) - EXPONENT_BIAS)
    rows = scales.to(torch.float32).repeat_interleave(matrix.group_rows, dim=-2)[..., : matrix.n, :]
    return rows.repeat_interleave(matrix.group_columns, dim=-1)[..., : matrix.k]


def stack_rows(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Return one matrix with the rows of all parts, whose kinds, groups and orders of columns must be the same.

    All parts but the last must have whole groups of rows.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(
        (part.kind, part.group_rows, part.group_columns, part.k)
        == (first.kind, first.group_rows, first.group_columns, first.k)
        for part in parts
    )
    assert all(part.n % part.group_rows == 0 for part in parts[:-1])
    return QuantisedMatrix(
        first.kind,
        torch.cat([part.codes for part in parts], dim=-2),
        torch.cat([part.scales for part in parts], dim=-2),
        first.group_rows,
        first.group_columns,
        None if first.zeros is None else torch.cat([_present(part.zeros) for part in parts], dim=-2),
        None if first.row_scale is None else torch.cat([_present(part.row_scale) for part in parts], dim=-1),
        first.columns,
    )


def _present(part: Tensor | None) -> Tensor:
    assert part is not None
    return part


def _decode(matrix: QuantisedMatrix) -> Tensor:
    if matrix.kind == "fp8":
        return matrix.codes.view(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1).flatten(-2)
    if matrix.kind != "int4":
        return torch.tensor(FLOAT4_VALUES, device=codes.device)[codes.long()]
    if matrix.zeros is None:
        return codes.to(torch.float32) - INT4_ZERO
    return codes.to(torch.float32) - matrix.zeros.repeat_interleave(matrix.group_columns, dim=-1).to(torch.float32)
