"""norm_and_score: norms rows and computes the logits of a router, in one kernel for few rows."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

MAX_ROWS = 32  # up to so many rows, one kernel is faster than a norm and a product
EXPERTS_PER_PROGRAM = 8


@jit
def _norm_and_score(
    x: tensor, scale: tensor, weight: tensor, bias: tensor, normed: tensor, logits: tensor, x_stride: tensor,
    eps: tensor,
    COLUMNS: constexpr, BLOCK: constexpr, EXPERTS: constexpr, SCORED: constexpr, HAS_BIAS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Norm a row, as `norm.rms_norm` does, and compute the logits of SCORED experts for it."""
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    expert = tl.program_id(1) * SCORED + tl.arange(0, SCORED)
    factor = tl.load(scale + column, inside, 0.0)
    matrix = tl.load(
        weight + expert[:, None] * COLUMNS + column[None, :], (expert < EXPERTS)[:, None] & inside[None, :], 0.0
    )
    shift = tl.zeros([SCORED], tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + expert, expert < EXPERTS, 0.0)
    pdl_trigger_and_wait(PDL)  # the weights are read before the preceding kernel ends
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    size = tl.sum(value * value, 0) / COLUMNS
    unit = (value * tl.rsqrt(size + eps)).to(x.dtype.element_ty).to(tl.float32)
    result = (unit * factor).to(normed.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(normed + row * COLUMNS + column, result, inside)
    score = tl.sum(matrix.to(tl.float32) * result.to(tl.float32)[None, :], 1) + shift
    tl.store(logits + row * EXPERTS + expert, score, expert < EXPERTS)


def norm_and_score(
    x: Tensor, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the normed rows of x and the router's logits, float32 [rows, experts], for each of them.

    `scale`: weight of the norm, float32. `weight`: of the router, [experts, columns]. `bias`: float32 [experts].
    """
    (rows, columns), experts = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous() and scale.is_contiguous() and weight.shape[1] == columns
    normed = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    if rows:
        _norm_and_score[(rows, -(-experts // EXPERTS_PER_PROGRAM))](
            x, scale, weight, weight if bias is None else bias, normed, logits, x.stride(0), eps, columns,
            next_power_of_two(columns), experts, EXPERTS_PER_PROGRAM, bias is not None, pdl,
            num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return normed, logits
