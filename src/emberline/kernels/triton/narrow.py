"""multiply, multiply_gate_up, multiply_down, dequantise_rows: products with matrices of narrow codes.

The codes are decoded in registers. `kernels.quantised_matrix.dequantise` defines the values. A program computes a tile
of the result, as in `grouped.py`. If a scale covers at least as many columns as are multiplied at a time, the sum of
these columns is multiplied by it. Otherwise the weights are multiplied by it, and then rounded to the type of x; for
float4 formats, that rounding changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.quantised_matrix import INT4_ZERO, CodeKind, QuantisedMatrix
from emberline.kernels.triton.grouped import ProductTile, finish_products
from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_wait_and_trigger
from emberline.kernels.triton.routing import SortedRows

KIND_NUMBERS: dict[CodeKind, int] = {"fp8": 0, "int4": 1, "mxfp4": 2, "nvfp4": 3}
INT4, MXFP4, NVFP4 = constexpr(1), constexpr(2), constexpr(3)
ZERO = constexpr(float(INT4_ZERO))
MIN_SUMMED_GROUP = 64  # columns that share a scale which multiplies their sum, at least
MIN_GROUP = 16  # columns that share a scale, at least: the depth of the smallest matrix instruction
# (rows of x, at most; rows of a tile; tile)
TILES = (
    (16, 16, ProductTile(32, 128, 4, 4)),
    (32, 32, ProductTile(64, 128, 4, 4)),
    (64, 64, ProductTile(64, 128, 4, 3)),
)
LARGE_TILE = (128, ProductTile(128, 64, 8, 3))
DEQUANTISED_ROWS, DEQUANTISED_COLUMNS = 32, 128  # of a program that only dequantises


def supports(matrix: QuantisedMatrix) -> bool:
    """Return whether the kernels of this module can read the matrix."""
    group = matrix.group_columns
    return matrix.k % MIN_GROUP == 0 and (group >= matrix.k or (group >= MIN_GROUP and group & (group - 1) == 0))


@jit
def _decode(codes: tensor, KIND: constexpr) -> tensor:
    """Return the values of codes in float32, without zero and scale."""
    if KIND == INT4:
        return codes.to(tl.float32)
    wide = codes.to(tl.int16)
    if KIND >= MXFP4:  # float4, as float16 with the smallest exponents
        return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def _convert_scale(scale: tensor, KIND: constexpr) -> tensor:
    if KIND == MXFP4:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if KIND == NVFP4:
        return _decode(scale, 0)
    return scale.to(tl.float32)


@jit
def _load_weights(
    codes: tensor, scales: tensor, zeros: tensor, row: tensor, start: tensor, inside: tensor,
    DEPTH: constexpr, GROUP_ROWS: constexpr, GROUP: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, KIND: constexpr,
    HAS_ZEROS: constexpr,
) -> tensor:  # fmt: skip
    """Return weights [BLOCK_N, BLOCK_K] in float32, without scale if it covers BLOCK_K columns or more.

    `row`: int64 [BLOCK_N], of the whole tensor. `inside`: whether each row exists. Columns from DEPTH on are undefined.
    """
    SIZE: constexpr = BLOCK_K if KIND == 0 else BLOCK_K // 2  # bytes
    WIDTH: constexpr = DEPTH if KIND == 0 else DEPTH // 2
    byte = (start if KIND == 0 else start // 2) + tl.arange(0, SIZE)
    mask = inside[:, None]
    if DEPTH % BLOCK_K:
        mask = mask & (byte < WIDTH)[None, :]
    packed = tl.load(codes + row[:, None] * WIDTH + byte[None, :], mask, 0)
    if KIND == 0:
        values = _decode(packed, KIND)
    else:
        pair = tl.join(_decode(packed & 15, KIND), _decode(packed >> 4, KIND))
        values = tl.reshape(pair, [BLOCK_N, BLOCK_K])
    COLUMNS: constexpr = (DEPTH + GROUP - 1) // GROUP  # scales of a row
    if GROUP >= BLOCK_K:
        if HAS_ZEROS:
            values -= tl.load(zeros + row * COLUMNS + start // GROUP, inside, 0).to(tl.float32)[:, None]
    else:
        GROUPS: constexpr = BLOCK_K // GROUP
        group = start // GROUP + tl.arange(0, GROUPS)
        at = (row // GROUP_ROWS)[:, None] * COLUMNS + group[None, :]
        mask = inside[:, None] & (group < COLUMNS)[None, :]
        scale = _convert_scale(tl.load(scales + at, mask, 0), KIND)
        parts = tl.reshape(values, [BLOCK_N, GROUPS, GROUP])
        if HAS_ZEROS:
            parts -= tl.load(zeros + at, mask, 0).to(tl.float32)[:, :, None]
        elif KIND == INT4:
            parts -= ZERO
        values = tl.reshape(parts * scale[:, :, None], [BLOCK_N, BLOCK_K])
    if KIND == INT4 and not HAS_ZEROS and GROUP >= BLOCK_K:
        values -= ZERO
    return values


@jit
def _load_scale(
    scales: tensor, row: tensor, start: tensor, inside: tensor, DEPTH: constexpr, GROUP_ROWS: constexpr,
    GROUP: constexpr, KIND: constexpr,
) -> tensor:  # fmt: skip
    """Return the scales [BLOCK_N] of the columns from `start` on."""
    COLUMNS: constexpr = (DEPTH + GROUP - 1) // GROUP
    return _convert_scale(tl.load(scales + row // GROUP_ROWS * COLUMNS + start // GROUP, inside, 0), KIND)


@jit
def _scale_sums(
    sums: tensor, scales: tensor, row_scales: tensor, row: tensor, inside: tensor, DEPTH: constexpr,
    GROUP_ROWS: constexpr, GROUP: constexpr, KIND: constexpr,
) -> tensor:  # fmt: skip
    """Return the sums of products, multiplied by the scales of whole rows."""
    if GROUP >= DEPTH:
        sums = sums * _load_scale(scales, row, 0, inside, DEPTH, GROUP_ROWS, GROUP, KIND)[None, :]
    if KIND == NVFP4:
        sums = sums * tl.load(row_scales + row, inside, 0.0)[None, :]
    return sums


@jit
def _multiply_narrow(
    x: tensor, codes: tensor, scales: tensor, zeros: tensor, row_scales: tensor, bias: tensor, residual: tensor,
    weights: tensor, order: tensor, tile_experts: tensor, tile_counts: tensor, num_tiles: tensor, out: tensor,
    rows: tensor, alpha: tensor, limit: tensor,
    DEPTH: constexpr, WIDTH: constexpr, KIND: constexpr, GROUP_ROWS: constexpr, GROUP: constexpr, DIVISOR: constexpr,
    ROWS: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, SORTED: constexpr, GATED: constexpr, HAS_ZEROS: constexpr,
    HAS_BIAS: constexpr, HAS_RESIDUAL: constexpr, CLAMPED: constexpr, SCALED: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Multiply x [*, DEPTH] by a matrix. If SORTED, rows are sorted by expert; each tile has its expert's matrix."""
    tile = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_N)
    pdl_wait_and_trigger(PDL)
    if SORTED:
        if tile >= tl.load(num_tiles):
            return
        expert = tl.load(tile_experts + tile).to(tl.int64)
        is_row = tl.arange(0, ROWS) < tl.load(tile_counts + tile)
        assignment = tl.load(order + tile * ROWS + tl.arange(0, ROWS), is_row, 0)
    else:
        expert = tile.to(tl.int64) * 0
        assignment = tile * ROWS + tl.arange(0, ROWS)
        is_row = assignment < rows
    column = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < WIDTH
    w_row = expert * (2 * WIDTH if GATED else WIDTH) + column
    k = tl.arange(0, BLOCK_K)
    x_at = x + (assignment // DIVISOR).to(tl.int64)[:, None] * DEPTH + k[None, :]
    product = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        x_inside = is_row[:, None]
        if DEPTH % BLOCK_K:
            x_inside = x_inside & (start + k < DEPTH)[None, :]
        inputs = tl.load(x_at + start, x_inside, 0.0)
        for half in tl.static_range(2 if GATED else 1):
            matrix_row = w_row + half * WIDTH
            matrix = _load_weights(
                codes, scales, zeros, matrix_row, start, inside,
                DEPTH, GROUP_ROWS, GROUP, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS,
            ).to(x.dtype.element_ty).T  # fmt: skip
            sums = up if half else product
            if GROUP < DEPTH and GROUP >= BLOCK_K:
                factor = _load_scale(scales, matrix_row, start, inside, DEPTH, GROUP_ROWS, GROUP, KIND)
                sums += tl.dot(inputs, matrix, input_precision="ieee") * factor[None, :]
            else:
                sums = tl.dot(inputs, matrix, sums, input_precision="ieee")
            if half:
                up = sums
            else:
                product = sums
    product = _scale_sums(product, scales, row_scales, w_row, inside, DEPTH, GROUP_ROWS, GROUP, KIND)
    if GATED:
        up = _scale_sums(up, scales, row_scales, w_row + WIDTH, inside, DEPTH, GROUP_ROWS, GROUP, KIND)
    product = finish_products(
        product, up, bias, weights, assignment, is_row, expert, column, alpha, limit,
        WIDTH, GATED, HAS_BIAS, CLAMPED, SCALED,
    )  # fmt: skip
    place, mask = assignment.to(tl.int64)[:, None] * WIDTH + column[None, :], is_row[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        product += tl.load(residual + place, mask, 0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask)


def multiply(
    x: Tensor,
    matrix: QuantisedMatrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tile: tuple[int, ProductTile] | None = None,
    pdl: bool = False,
) -> Tensor:
    """Write x w^T + bias + residual into `out`, which may be the residual, and return it.

    With `gated`, the matrix has the rows of gate before those of up, and the result is silu(gate) * up. `bias`: float32
    [n]. `tile`: (rows of a tile, tile), which overrides the chosen ones.
    """
    rows, width = out.shape
    assert len(x) == rows and matrix.codes.dim() == 2 and matrix.n == (2 * width if gated else width)
    if matrix.columns is not None:
        x = x[:, matrix.columns]
    if not rows:
        return out
    tile_rows, shape = tile or next(((size, found) for most, size, found in TILES if rows <= most), LARGE_TILE)
    grid = -(-rows // tile_rows) * -(-width // shape.columns)
    _launch(
        grid, x, matrix, shape, out, rows=rows, tile_rows=tile_rows, bias=bias, residual=residual, gated=gated, pdl=pdl
    )
    return out


def multiply_gate_up(
    x: Tensor,
    matrices: QuantisedMatrix,
    rows: SortedRows,
    tile: ProductTile,
    *,
    bias: Tensor | None = None,
    clamp: ClampedSwiGLU | None = None,
    scaled: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return the activations of the rows' experts, as `grouped.multiply_gate_up` does."""
    assert len(x) == len(rows.weights) // rows.experts_per_row
    out = x.new_empty(len(rows.weights), matrices.n // 2)
    _launch_sorted(x, matrices, rows, tile, out, bias=bias, clamp=clamp, scaled=scaled, gated=True, pdl=pdl)
    return out


def multiply_down(
    inner: Tensor,
    matrices: QuantisedMatrix,
    rows: SortedRows,
    tile: ProductTile,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
    pdl: bool = False,
) -> Tensor:
    """Return the outputs of the rows' experts, as `grouped.multiply_down` does."""
    assert len(inner) == len(rows.weights)
    out = inner.new_empty(len(inner), matrices.n)
    _launch_sorted(inner, matrices, rows, tile, out, bias=bias, clamp=None, scaled=scaled, gated=False, pdl=pdl)
    return out


def _launch_sorted(
    x: Tensor, matrices: QuantisedMatrix, rows: SortedRows, tile: ProductTile, out: Tensor, *, gated: bool, **kinds: Any
) -> None:
    assert matrices.codes.dim() == 3 and matrices.columns is None
    grid = rows.max_tiles * -(-out.shape[1] // tile.columns)
    divisor = rows.experts_per_row if gated else 1
    _launch(
        grid, x, matrices, tile, out, sorted_rows=rows, tile_rows=rows.tile_rows, divisor=divisor, gated=gated, **kinds
    )


def _launch(
    grid: int,
    x: Tensor,
    matrix: QuantisedMatrix,
    tile: ProductTile,
    out: Tensor,
    *,
    tile_rows: int,
    gated: bool,
    pdl: bool,
    rows: int = 0,
    sorted_rows: SortedRows | None = None,
    divisor: int = 1,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    clamp: ClampedSwiGLU | None = None,
    scaled: bool = False,
) -> None:
    assert supports(matrix) and x.shape[1] == matrix.k and x.is_contiguous() and out.is_contiguous()
    assert matrix.codes.is_contiguous() and matrix.scales.is_contiguous()
    places, (group, block) = sorted_rows, _choose_depth(matrix, tile.depth)
    alpha, limit = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    _multiply_narrow[(grid,)](
        x, matrix.codes, _as_bytes(matrix.scales), x if matrix.zeros is None else matrix.zeros,
        x if matrix.row_scale is None else matrix.row_scale, x if bias is None else bias,
        x if residual is None else residual, *(
            (x,) * 5 if places is None
            else (places.weights, places.order, places.tile_experts, places.tile_counts, places.num_tiles)
        ), out, rows, alpha, limit,
        DEPTH=matrix.k, WIDTH=out.shape[1], KIND=KIND_NUMBERS[matrix.kind], GROUP_ROWS=matrix.group_rows,
        GROUP=group, DIVISOR=divisor, ROWS=tile_rows, BLOCK_N=tile.columns, BLOCK_K=block,
        SORTED=places is not None, GATED=gated, HAS_ZEROS=matrix.zeros is not None, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, CLAMPED=clamp is not None, SCALED=scaled, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def _choose_depth(matrix: QuantisedMatrix, depth: int) -> tuple[int, int]:
    """Return the columns of a group, and the columns that are multiplied at a time."""
    group = matrix.group_columns
    if group >= matrix.k:
        return max(next_power_of_two(matrix.k), depth), depth
    return group, min(depth, group) if group >= MIN_SUMMED_GROUP else max(depth, group)


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype is torch.float8_e4m3fn else scales


@jit
def _dequantise(
    codes: tensor, scales: tensor, zeros: tensor, row_scales: tensor, out: tensor, rows: tensor,
    DEPTH: constexpr, KIND: constexpr, GROUP_ROWS: constexpr, GROUP: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    HAS_ZEROS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_wait_and_trigger(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    inside = row < rows
    values = _load_weights(
        codes, scales, zeros, row, start, inside, DEPTH, GROUP_ROWS, GROUP, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS
    )
    if GROUP >= BLOCK_K:
        values = values * _load_scale(scales, row, start, inside, DEPTH, GROUP_ROWS, GROUP, KIND)[:, None]
    if KIND == NVFP4:
        values = values * tl.load(row_scales + row, inside, 0.0)[:, None]
    column = start + tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (column < DEPTH)[None, :]
    tl.store(out + row[:, None] * DEPTH + column[None, :], values.to(out.dtype.element_ty), mask)


def dequantise_rows(matrix: QuantisedMatrix, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Write the values of the matrix [n, k] into `out`, with columns in the order of the codes, and return it."""
    assert supports(matrix) and matrix.codes.dim() == 2 and out.shape == (matrix.n, matrix.k) and out.is_contiguous()
    group, block = _choose_depth(matrix, DEQUANTISED_COLUMNS)
    _dequantise[(-(-matrix.n // DEQUANTISED_ROWS), -(-matrix.k // block))](
        matrix.codes, _as_bytes(matrix.scales), out if matrix.zeros is None else matrix.zeros,
        out if matrix.row_scale is None else matrix.row_scale, out, matrix.n,
        DEPTH=matrix.k, KIND=KIND_NUMBERS[matrix.kind], GROUP_ROWS=matrix.group_rows, GROUP=group,
        BLOCK_N=DEQUANTISED_ROWS, BLOCK_K=block, HAS_ZEROS=matrix.zeros is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
