"""multiply_gate_up, multiply_down, add_expert_outputs: a mixture of experts for rows that are sorted by expert.

A program computes a tile: the rows of one tile of `SortedRows`, and some columns of the expert's matrix. The launch has
programs for the most tiles that may exist; those without a tile end at once. So only experts with rows are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.triton.jit import (
    has_bulk_copies,
    jit,
    next_power_of_two,
    pdl_trigger_and_wait,
    pdl_wait_and_trigger,
)
from emberline.kernels.triton.routing import SortedRows

MAX_SUM_BLOCK = 1024  # columns of a program that adds outputs


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The part of a product that one program computes, and how."""

    columns: int  # of the result
    depth: int  # columns of the inputs that are multiplied at a time
    warps: int
    stages: int  # of the pipeline of loads
    bulk: bool = False  # whether weights are loaded by bulk copies (TMA), if the GPU has them and sizes are multiples


@jit
def finish_products(
    product: tensor, up: tensor, bias: tensor, weights: tensor, assignment: tensor, is_row: tensor, expert: tensor,
    column: tensor, alpha: tensor, limit: tensor,
    WIDTH: constexpr, GATED: constexpr, HAS_BIAS: constexpr, CLAMPED: constexpr, SCALED: constexpr,
) -> tensor:  # fmt: skip
    """Apply bias, routing weight and, if GATED, activation to the products of a tile, and return the result."""
    if GATED:
        if SCALED:
            factor = tl.load(weights + assignment, is_row, 0.0)[:, None]
            product, up = product * factor, up * factor
        if HAS_BIAS:
            bias_at = bias + expert * (2 * WIDTH) + column
            product += tl.load(bias_at, column < WIDTH, 0.0)[None, :]
            up += tl.load(bias_at + WIDTH, column < WIDTH, 0.0)[None, :]
        if CLAMPED:
            gate = tl.minimum(product, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            product = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        else:
            product = product / (1.0 + tl.exp(-product)) * up
    else:
        if HAS_BIAS:
            product += tl.load(bias + expert * WIDTH + column, column < WIDTH, 0.0)[None, :]
        if SCALED:
            product = product * tl.load(weights + assignment, is_row, 0.0)[:, None]
    return product


@jit
def _multiply_experts(
    x: tensor, w: tensor, bias: tensor, weights: tensor, order: tensor, tile_experts: tensor, tile_counts: tensor,
    num_tiles: tensor, out: tensor, alpha: tensor, limit: tensor,
    DEPTH: constexpr, WIDTH: constexpr, DIVISOR: constexpr, ROWS: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    GATED: constexpr, HAS_BIAS: constexpr, CLAMPED: constexpr, SCALED: constexpr, BULK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Multiply rows of x [*, DEPTH] by an expert's matrix.

    The matrix has WIDTH rows; if GATED, WIDTH rows of gate, then WIDTH rows of up. The input of an assignment is row
    assignment // DIVISOR of x, its output is row `assignment` of out. With SCALED, the products of a row are multiplied
    by the assignment's weight: before the activation if GATED, which equals scaled inputs, and otherwise after the
    bias. With BULK, w is a tensor descriptor of all matrices as one, for bulk copies (TMA).
    """
    blocks = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    pdl_wait_and_trigger(PDL)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    is_row = tl.arange(0, ROWS) < tl.load(tile_counts + tile)
    assignment = tl.load(order + tile * ROWS + tl.arange(0, ROWS), is_row, 0)
    column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (assignment // DIVISOR).to(tl.int64)[:, None] * DEPTH + k[None, :]
    w_row = expert * (2 * WIDTH if GATED else WIDTH) + tl.program_id(0) % blocks * BLOCK_N
    if not BULK:
        w_at = w + (w_row + tl.arange(0, BLOCK_N))[None, :] * DEPTH + k[:, None]
    product = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        x_inside, w_inside = is_row[:, None], (column < WIDTH)[None, :]
        if DEPTH % BLOCK_K:
            x_inside = x_inside & (start + k < DEPTH)[None, :]
            w_inside = w_inside & (start + k < DEPTH)[:, None]
        inputs = tl.load(x_at + start, x_inside, 0.0)
        if BULK:
            product = tl.dot(inputs, w.load([w_row.to(tl.int32), start]).T, product)
            if GATED:
                up = tl.dot(inputs, w.load([w_row.to(tl.int32) + WIDTH, start]).T, up)
        elif WIDTH % BLOCK_N == 0 and DEPTH % BLOCK_K == 0:
            product = tl.dot(inputs, tl.load(w_at + start), product, input_precision="ieee")
            if GATED:
                up = tl.dot(inputs, tl.load(w_at + start + WIDTH * DEPTH), up, input_precision="ieee")
        else:
            product = tl.dot(inputs, tl.load(w_at + start, w_inside, 0.0), product, input_precision="ieee")
            if GATED:
                matrix = tl.load(w_at + start + WIDTH * DEPTH, w_inside, 0.0)
                up = tl.dot(inputs, matrix, up, input_precision="ieee")
    product = finish_products(
        product, up, bias, weights, assignment, is_row, expert, column, alpha, limit,
        WIDTH, GATED, HAS_BIAS, CLAMPED, SCALED,
    )  # fmt: skip
    out_at = out + assignment.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_at, product.to(out.dtype.element_ty), is_row[:, None] & (column < WIDTH)[None, :])


def multiply_gate_up(
    x: Tensor,
    weight: Tensor,
    rows: SortedRows,
    tile: ProductTile,
    *,
    bias: Tensor | None = None,
    clamp: ClampedSwiGLU | None = None,
    scaled: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return the activations [rows * experts per row, width] of each row's experts.

    `weight`: [experts, 2 * width, k], the rows of gate before those of up. `bias`: float32 [experts, 2 * width].
    `scaled`: whether inputs are multiplied by the routing weights.
    """
    width = weight.shape[1] // 2
    return _launch(x, weight, rows, tile, width, bias=bias, clamp=clamp, scaled=scaled, gated=True, pdl=pdl)


def multiply_down(
    inner: Tensor,
    weight: Tensor,
    rows: SortedRows,
    tile: ProductTile,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
    pdl: bool = False,
) -> Tensor:
    """Return the outputs [rows * experts per row, n] of each row's experts. `weight`: [experts, n, width].

    `scaled`: whether outputs are multiplied by the routing weights.
    """
    return _launch(inner, weight, rows, tile, weight.shape[1], bias=bias, scaled=scaled, gated=False, pdl=pdl)


def _launch(
    x: Tensor,
    weight: Tensor,
    rows: SortedRows,
    tile: ProductTile,
    width: int,
    *,
    bias: Tensor | None,
    scaled: bool,
    gated: bool,
    pdl: bool,
    clamp: ClampedSwiGLU | None = None,
) -> Tensor:
    depth, assignments = x.shape[1], len(rows.weights)
    assert weight.shape[1:] == (2 * width if gated else width, depth) and weight.dtype is x.dtype
    assert x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    assert len(x) == (assignments // rows.experts_per_row if gated else assignments)
    out = torch.empty(assignments, width, dtype=x.dtype, device=x.device)
    alpha, limit = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    is_even = x.dtype is torch.bfloat16 and depth % tile.depth == 0 and width % tile.columns == 0
    is_bulk = tile.bulk and is_even and has_bulk_copies()
    source = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.depth]) if is_bulk else weight
    _multiply_experts[(rows.max_tiles * -(-width // tile.columns),)](
        x, source, x if bias is None else bias, rows.weights, rows.order, rows.tile_experts, rows.tile_counts,
        rows.num_tiles, out, alpha, limit,
        DEPTH=depth, WIDTH=width, DIVISOR=rows.experts_per_row if gated else 1, ROWS=rows.tile_rows,
        BLOCK_N=tile.columns, BLOCK_K=tile.depth, GATED=gated, HAS_BIAS=bias is not None, CLAMPED=clamp is not None,
        SCALED=scaled, BULK=is_bulk, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@jit
def _add_outputs(
    x: tensor, outputs: tensor, shared: tensor, shared_gate: tensor, shared_scale: tensor, places: tensor,
    weights: tensor, x_stride: tensor,
    COLUMNS: constexpr, TOP: constexpr, BLOCK: constexpr, HAS_SHARED: constexpr, HAS_GATE: constexpr,
    SORTED: constexpr, WEIGHTED: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    if HAS_SHARED:
        factor = shared_scale
        if HAS_GATE:
            factor = shared_scale / (1.0 + tl.exp(-tl.load(shared_gate + row)))
        total += factor * tl.load(shared + row * COLUMNS + column, inside, 0.0).to(tl.float32)
    for rank in tl.static_range(TOP):
        at = row * TOP + rank
        if SORTED:
            output = tl.load(outputs + tl.load(places + at).to(tl.int64) * COLUMNS + column, inside, 0.0)
            total += output.to(tl.float32) * (tl.load(weights + at) if WEIGHTED else 1.0)
        else:
            total += tl.load(outputs + at * COLUMNS + column, inside, 0.0).to(tl.float32)
    tl.store(x + row * x_stride + column, total.to(x.dtype.element_ty), inside)


def add_expert_outputs(
    x: Tensor,
    outputs: Tensor,
    experts_per_row: int,
    *,
    places: Tensor | None = None,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Add the outputs of each row's experts to x in place, in the order in which the row selected them.

    An assignment is a pair of a row and one of its experts. `places`: int32, the row of `outputs` for each assignment;
    None: `outputs` is in the order of assignments. `weights`: float32, the routing weight of each assignment, only with
    `places`; None: outputs are already multiplied by it. `shared`: outputs of a shared expert [rows, n], which are
    added first, times `shared_scale` and the sigmoid of `shared_gate`, float32 [rows, 1].
    """
    rows, columns = x.shape
    assert x.stride(1) == 1 and outputs.is_contiguous() and outputs.shape[1] == columns
    assert len(outputs) == rows * experts_per_row if places is None else len(places) == rows * experts_per_row
    assert weights is None or places is not None
    assert shared is None or (shared.is_contiguous() and shared.shape == x.shape)
    block = min(MAX_SUM_BLOCK, max(32, next_power_of_two(columns)))
    _add_outputs[(rows, -(-columns // block))](
        x, outputs, x if shared is None else shared, x if shared_gate is None else shared_gate, shared_scale,
        x if places is None else places, x if weights is None else weights, x.stride(0), columns, experts_per_row,
        block, shared is not None, shared_gate is not None, places is not None, weights is not None, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return x
