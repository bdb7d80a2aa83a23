"""norm_and_gate, apply_sigmoid_gate: the gates of the outputs of recurrent layers and of gated attention."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

BLOCK_VALUES = 1024  # of a program


@jit
def _norm_and_gate(
    x: tensor, gate: tensor, weight: tensor, x_stride: tensor, gate_stride: tensor, eps: tensor,
    HEADS: constexpr, WIDTH: constexpr, TILE: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    at = x + row * x_stride + head * WIDTH + column
    value = tl.load(at, inside, 0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    z = tl.load(gate + row * gate_stride + head * WIDTH + column, inside, 0.0).to(tl.float32)
    result = normed * tl.load(weight + column, column < WIDTH, 0.0) * z / (1.0 + tl.exp(-z))
    tl.store(at, result.to(x.dtype.element_ty), inside)


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Replace each head of x, as wide as the float32 `weight`, by its RMS norm times silu(gate); return x."""
    (rows, columns), width = x.shape, len(weight)
    assert x.stride(1) == gate.stride(1) == 1 and gate.shape == x.shape and columns % width == 0
    heads, block = columns // width, next_power_of_two(width)
    tile = min(max(1, BLOCK_VALUES // block), next_power_of_two(heads))
    if rows:
        _norm_and_gate[(rows, -(-heads // tile))](
            x, gate, weight, x.stride(0), gate.stride(0), eps, heads, width, tile, block, pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return x


@jit
def _sigmoid_gate(
    x: tensor, gate: tensor, x_stride: tensor, gate_stride: tensor,
    COLUMNS: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = x + row * x_stride + column
    z = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    result = tl.load(at, inside, 0.0).to(tl.float32) / (1.0 + tl.exp(-z))
    tl.store(at, result.to(x.dtype.element_ty), inside)


def apply_sigmoid_gate(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """Multiply x by the sigmoid of the gate in place and return x."""
    rows, columns = x.shape
    assert x.stride(1) == gate.stride(1) == 1 and gate.shape == x.shape
    if rows:
        _sigmoid_gate[(rows, -(-columns // BLOCK_VALUES))](
            x, gate, x.stride(0), gate.stride(0), columns, BLOCK_VALUES, pdl, num_warps=4, launch_pdl=pdl
        )
    return x
