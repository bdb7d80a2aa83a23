"""pack, linear, gate_up_silu: linear layers with float8 weights, with the kernel that suits the number of rows.

With few rows, reading the weights takes nearly all the time: inputs stay bf16 (`cuda/linear.py`), which is most exact.
With more rows, inputs are quantised to float8 too, with a scale for each row or, if the weight has scales of blocks,
for each 128 columns of a row. Then the tensor cores multiply twice as fast, and inputs take half of the L2's bandwidth:
`cuda/fp8_wide.py` and `cuda/fp8_gate_up.py` for dozens of rows, and above that `cuda/fp8_gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import fp8_gate_up, fp8_gemm, fp8_weight, fp8_wide
from emberline.kernels.cuda import linear as skinny
from emberline.kernels.cuda.fp8_weight import FP8Weight
from emberline.kernels.cuda.quantise_rows import QuantisedRows, quantise_rows
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton import norm

MAX_EXACT_ROWS = 16  # rows of x up to which inputs stay bf16
# The same if inputs are not normed: then there is no kernel before the product that could quantise them. Larger weights
# are faster with float8 inputs.
MAX_PLAIN_ROWS, MAX_PLAIN_WEIGHTS = skinny.MAX_ROWS, 4096 * 16384
MAX_WIDE_ROWS = 128  # rows of x up to which fp8_wide is faster than fp8_gemm
MAX_DEEP_WIDE_ROWS = 256  # the same for weights with more columns than rows, of which fp8_gemm has too few tiles


def pack(matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight | None:
    """Return the weight as `linear` and `gate_up_silu` read it, or None if our kernels do not support the matrix.

    A gated matrix has the rows of gate before those of up.
    """
    if not fp8_weight.supports(matrix):
        return None
    weight, layout = fp8_weight.pack(matrix, gated=gated), WeightLayout.QUANTISED
    address = weight.codes.data_ptr()
    return PackedWeight(weight.codes, weight.n, weight.k, torch.bfloat16, layout, gated, address, weight)


def linear(x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
    """Return y = norm(x) W^T + bias, as `OpBackend.linear` does."""
    w = _weight_of(layer)
    y = output.add_to if output.add_to is not None else output.out
    if y is None:
        y = torch.empty(len(x), w.n, dtype=torch.float32 if output.float32 else torch.bfloat16, device=x.device)
    return _multiply(x, layer, y, residual=output.add_to)


def gate_up_silu(x: Tensor, layer: LinearLayer, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, as `OpBackend.gate_up_silu` does. The layer's bias is ignored."""
    w = _weight_of(layer)
    y = torch.empty(len(x), w.n // 2, dtype=torch.bfloat16, device=x.device) if out is None else out
    return _multiply(x, layer, y, gated=True)


def _weight_of(layer: LinearLayer) -> FP8Weight:
    assert isinstance(layer.weight.handle, FP8Weight)
    return layer.weight.handle


def _multiply(
    x: Tensor, layer: LinearLayer, out: Tensor, *, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    w, m, bias = _weight_of(layer), len(x), None if gated else layer.bias
    if m == 0:
        return out
    if m <= _max_exact_rows(layer):
        normed = x if layer.norm is None else norm.rms_norm(x, layer.norm, layer.eps, pdl=True)
        return skinny.linear(normed, w, out=out, bias=bias, residual=residual, gated=gated)
    rows = quantise_rows(x, norm=layer.norm, eps=layer.eps, blocks=w.has_blocks)
    if gated and fp8_gate_up.supports(m, w):
        return fp8_gate_up.gate_up(rows, w, out=out)
    if m <= MAX_WIDE_ROWS or (m <= MAX_DEEP_WIDE_ROWS and w.k > w.n and not w.has_blocks):
        return fp8_wide.linear(rows, w, out=out, bias=bias, residual=residual, gated=gated)
    if out.dtype is torch.float32:
        return _multiply_in_parts(rows, w, out, bias)
    if m <= fp8_gemm.MAX_ROWS:  # slicing costs host time, which limits the speed of prompts
        fp8_gemm.linear(rows, w, out=out, residual=residual, gated=gated)
    else:
        _multiply_many_rows(rows, w, out, residual, gated)
    return out if bias is None else out.add_(bias)


def _multiply_many_rows(rows: QuantisedRows, w: FP8Weight, out: Tensor, residual: Tensor | None, gated: bool) -> None:
    for first in range(0, len(out), fp8_gemm.MAX_ROWS):
        end = min(len(out), first + fp8_gemm.MAX_ROWS)
        own_residual = None if residual is None else residual[first:end]
        fp8_gemm.linear(rows.slice_rows(first, end), w, out=out[first:end], residual=own_residual, gated=gated)


def _max_exact_rows(layer: LinearLayer) -> int:
    is_plain = layer.norm is None and layer.weight.n * layer.weight.k <= MAX_PLAIN_WEIGHTS
    return MAX_PLAIN_ROWS if is_plain else MAX_EXACT_ROWS


def _multiply_in_parts(rows: QuantisedRows, w: FP8Weight, out: Tensor, bias: Tensor | None) -> Tensor:
    """Write the product in float32 into `out`, without rounding its sums to bf16, and return it."""
    for first in range(0, len(out), MAX_WIDE_ROWS):
        end = min(len(out), first + MAX_WIDE_ROWS)
        fp8_wide.linear(rows.slice_rows(first, end), w, out=out[first:end], bias=bias)
    return out
