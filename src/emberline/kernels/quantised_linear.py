"""multiply_quantised: products with matrices of narrow codes on a GPU, for any number of rows.

For few rows, where reading the codes takes most of the time, `triton/narrow.py` decodes them in registers. For more
rows, a part of the matrix at a time is dequantised to bf16 and multiplied by cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.quantised_matrix import QuantisedMatrix, slice_rows
from emberline.kernels.triton import activation, narrow
from emberline.kernels.work_limits import MAX_DEQUANTISED_WEIGHTS

MAX_DECODED_ROWS = 128  # rows of x for which codes are decoded in registers


def supports(matrix: QuantisedMatrix) -> bool:
    """Return whether the kernels can multiply by the matrix, which may be the stacked matrices of experts."""
    return narrow.supports(matrix) and (matrix.codes.dim() == 2 or matrix.columns is None)


def multiply_quantised(
    x: Tensor, matrix: QuantisedMatrix, *, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Write x w^T + bias + residual into `out`, bf16 or float32, which may be the residual, and return it."""
    if len(x) > MAX_DECODED_ROWS:
        if residual is not None and residual is not out:
            out.copy_(residual)
        return _multiply_dequantised(x, matrix, out, bias, adds=residual is not None)
    y = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    narrow.multiply(x.contiguous(), matrix, y, bias=bias, residual=residual, pdl=True)
    return y if y is out else out.copy_(y)


def multiply_gated(x: Tensor, matrix: QuantisedMatrix, out: Tensor) -> Tensor:
    """Write silu(gate) * up into `out` and return it. The matrix has the rows of gate before those of up."""
    if len(x) <= MAX_DECODED_ROWS and out.is_contiguous():
        return narrow.multiply(x.contiguous(), matrix, out, gated=True, pdl=True)
    gate_and_up = _multiply_dequantised(x, matrix, x.new_empty(len(x), matrix.n), None, adds=False)
    return activation.silu_mul(gate_and_up, out, matrix.n // 2, pdl=True)


def _multiply_dequantised(
    x: Tensor, matrix: QuantisedMatrix, out: Tensor, bias: Tensor | None, *, adds: bool
) -> Tensor:
    if matrix.columns is not None:
        x = x[:, matrix.columns]
    step = max(1, MAX_DEQUANTISED_WEIGHTS // matrix.k // matrix.group_rows) * matrix.group_rows
    for begin in range(0, matrix.n, step):
        part = slice_rows(matrix, begin, min(begin + step, matrix.n))
        rows = narrow.dequantise_rows(part, x.new_empty(part.n, part.k), pdl=True)
        target = out[:, begin : begin + part.n]
        if adds:
            target.addmm_(x, rows.t())
        elif out.dtype is x.dtype:
            torch.mm(x, rows.t(), out=target)
        else:
            torch.mm(x, rows.t(), out_dtype=out.dtype, out=target)
        del rows  # its memory is used again for the next part
    return out if bias is None else out.add_(bias)
