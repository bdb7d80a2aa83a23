"""rms_norm, layer_norm: norms of rows.

As in transformers, the RMS norm rounds the normalised x before applying the weight, and the layer norm does not.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

MAX_GRID_WARPS = 4224  # fills any GPU: 32 for each of 132 SMs; a program keeps the weight in registers for all its rows


@jit
def _rms_norm(
    x: tensor,
    weight: tensor,
    out: tensor,
    rows: tensor,
    x_stride: tensor,
    out_stride: tensor,
    eps: tensor,
    COLUMNS: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    scale = tl.load(weight + column, inside, 0.0)
    pdl_trigger_and_wait(PDL)
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    next_values = tl.load(x + first * x_stride + column, inside, 0.0)
    for row in range(first, rows, step):
        value = next_values.to(tl.float32)
        next_row = row + step
        next_values = tl.load(x + next_row * x_stride + column, inside & (next_row < rows), 0.0)
        size = tl.sum(value * value, 0) / COLUMNS
        normed = (value * tl.rsqrt(size + eps)).to(x.dtype.element_ty).to(tl.float32)
        tl.store(out + row * out_stride + column, (normed * scale).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """Return the normalised rows, written to `out` if given. `out` may be x.

    `weight` is float32. With `pdl` it is read before the preceding kernel ends, so that kernel must not write it.
    """
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous() and weight.dtype == torch.float32
    block = next_power_of_two(max(columns, 32))
    warps = min(max(block // 512, 1), 16)
    if rows:
        _rms_norm[(min(rows, MAX_GRID_WARPS // warps),)](
            x, weight, out, rows, x.stride(0), out.stride(0), eps, columns, block, pdl, num_warps=warps, launch_pdl=pdl
        )
    return out


@jit
def _layer_norm(
    x: tensor,
    weight: tensor,
    out: tensor,
    x_stride: tensor,
    out_stride: tensor,
    eps: tensor,
    WIDTH: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    pdl_trigger_and_wait(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    column = group * WIDTH + at
    value = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    centered = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    size = tl.sum(centered * centered, 0) / WIDTH
    normed = centered * tl.rsqrt(size + eps) * tl.load(weight + column, inside, 0.0)
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), inside)


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Write the layer norm of each row, or of each group of columns, into `out` and return it; `out` may be x.

    `weight` is float32, [width] or [groups, width].
    """
    rows, width = len(x), weight.shape[-1]
    groups = weight.numel() // width
    assert x.shape == out.shape == (rows, groups * width) and x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous() and weight.dtype == torch.float32
    block = next_power_of_two(max(width, 32))
    if rows:
        _layer_norm[(rows, groups)](
            x, weight, out, x.stride(0), out.stride(0), eps, width, block, pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out
