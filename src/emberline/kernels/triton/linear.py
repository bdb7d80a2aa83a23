"""linear: computes y = x w^T for few rows of x, where reading the weights takes most of the time.

A Triton program multiplies some rows of w by all rows of x, for a part of k. Of a tile with several parts, each program
writes its sums, and the one that ends last adds them in the order of the parts. So a result does not depend on the
order in which programs run. The program that has the sums adds bias and residual, or computes silu(gate) * up.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, jit_for_activations, next_power_of_two, pdl_trigger_and_wait

MIN_DOT_ROWS, MAX_ROWS = 16, 64  # rows of x that a program multiplies
MAX_SPLIT = 8  # parts of k
MAX_TILES = 8192  # tiles of a product whose k is split


class SkinnyTile(NamedTuple):
    """The part of a product that one program computes, and how."""

    columns: int  # rows of w, which are columns of the result
    depth: int  # columns of x and w that are multiplied at a time
    split: int  # parts of k
    warps: int
    stages: int  # of the pipeline of loads


@jit_for_activations("m", "split")
def _multiply_few_rows(
    x: tensor, w: tensor, bias: tensor, residual: tensor, out: tensor, partials: tensor, arrivals: tensor, m: tensor,
    n: tensor, k: tensor, split: tensor, x_stride: tensor, out_stride: tensor,
    ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr, GROUP: constexpr, HAS_BIAS: constexpr, ADDS: constexpr,
    SPLITS: constexpr, EVEN: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Multiply rows of w by x [m, k]. GROUP: rows of gate that alternate with as many of up; 0: w is not gated."""
    pdl_trigger_and_wait(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    row, column, depth = tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    steps = (k + DEPTH - 1) // DEPTH
    x_at = x + row.to(tl.int64)[None, :] * x_stride + depth[:, None]
    w_at = w + column.to(tl.int64)[:, None] * k + depth[None, :]
    is_row, is_column = (row < m)[None, :], (column < n)[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(part * steps // split, (part + 1) * steps // split):
        at = step * DEPTH
        if EVEN:
            weights = tl.load(w_at + at)
            inputs = tl.load(x_at + at, is_row, 0.0)
        else:
            inside = depth < k - at
            weights = tl.load(w_at + at, is_column & inside[None, :], 0.0)
            inputs = tl.load(x_at + at, is_row & inside[:, None], 0.0)
        total = tl.dot(weights, inputs, total)
    finish_part(
        total, bias, residual, out, partials, arrivals, row, column, tile, part, split, m, n, out_stride,
        ROWS, COLUMNS, GROUP, HAS_BIAS, ADDS, SPLITS,
    )  # fmt: skip


@jit
def finish_part(
    total: tensor, bias: tensor, residual: tensor, out: tensor, partials: tensor, arrivals: tensor, row: tensor,
    column: tensor, tile: tensor, part: tensor, split: tensor, m: tensor, n: tensor, out_stride: tensor,
    ROWS: constexpr, COLUMNS: constexpr, GROUP: constexpr, HAS_BIAS: constexpr, ADDS: constexpr, SPLITS: constexpr,
) -> None:  # fmt: skip
    """Store the sums [COLUMNS, ROWS] of a part of k. The program that ends last stores the result of all parts."""
    if not SPLITS:
        _finish_tile(
            total, bias, residual, out, row, column, tile, m, n, out_stride, ROWS, COLUMNS, GROUP, HAS_BIAS, ADDS
        )  # fmt: skip
    else:
        place = tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
        first = partials + tile * split * (COLUMNS * ROWS) + place
        tl.store(first + part * (COLUMNS * ROWS), total)
        tl.debug_barrier()  # all threads have stored before one of them announces it
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == split - 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for each in range(split):
                total += tl.load(first + each * (COLUMNS * ROWS), cache_modifier=".cg")  # other SMs wrote them
            _finish_tile(
                total, bias, residual, out, row, column, tile, m, n, out_stride, ROWS, COLUMNS, GROUP, HAS_BIAS, ADDS
            )  # fmt: skip


@jit
def _finish_tile(
    total: tensor, bias: tensor, residual: tensor, out: tensor, row: tensor, column: tensor, tile: tensor, m: tensor,
    n: tensor, out_stride: tensor,
    ROWS: constexpr, COLUMNS: constexpr, GROUP: constexpr, HAS_BIAS: constexpr, ADDS: constexpr,
) -> None:  # fmt: skip
    """Store the sums [COLUMNS, ROWS] of a tile, with bias and residual, or as silu(gate) * up."""
    if HAS_BIAS:
        total += tl.load(bias + column, column < n, 0.0)[:, None]
    if GROUP:
        pairs = tl.reshape(total, [COLUMNS // (2 * GROUP), 2, GROUP, ROWS])
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, [COLUMNS // 2, ROWS]), tl.reshape(up, [COLUMNS // 2, ROWS])
        total = gate / (1.0 + tl.exp(-gate)) * up
        column = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        n = n // 2
    values = tl.trans(total)
    at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    if ADDS:
        values += tl.load(residual + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), inside)


def supports(m: int, n: int, k: int, dtype: torch.dtype, group: int = 0) -> bool:
    """Return whether `linear` supports this shape. `group`: as for `linear`."""
    return 0 < m <= MAX_ROWS and dtype is torch.bfloat16 and k % 8 == 0 and n > 0 and 32 % max(2 * group, 1) == 0


def linear(
    x: Tensor,
    w: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group: int = 0,
    tile: SkinnyTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Write x w^T into `out`, bf16 or float32, and return it.

    `residual` is added to the product and may be `out` itself. With a `group`, that many rows of gate alternate with
    as many rows of up in w, and the result is silu(gate) * up, [m, n / 2]. `tile` overrides the chosen tile.
    """
    (m, k), n = x.shape, len(w)
    assert supports(m, n, k, x.dtype, group) and w.shape == (n, k) and w.is_contiguous() and w.dtype is x.dtype
    assert x.stride(1) == out.stride(1) == 1 and out.shape == (m, n // 2 if group else n)
    assert residual is None or residual.stride() == out.stride()
    tile = tile or choose_tile(m, n, k, count_sms(x.device))
    rows, tiles = max(MIN_DOT_ROWS, next_power_of_two(m)), -(-n // tile.columns)
    partials, counters = allocate_partials(out, tiles, tile, rows)
    _multiply_few_rows[(tiles, tile.split)](
        x, w, out if bias is None else bias, out if residual is None else residual, out, partials, counters, m, n, k,
        tile.split, x.stride(0), out.stride(0), rows, tile.columns, tile.depth, group, bias is not None,
        residual is not None, tile.split > 1, n % tile.columns == 0 and k % tile.depth == 0, pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@cache
def choose_tile(m: int, n: int, k: int, num_sms: int) -> SkinnyTile:
    """Return the tile for a product: few parts of k, but enough programs for all multiprocessors.

    The depths and stages were measured on an H200, with the layers of Llama 8B."""
    columns, depth = 64, 128
    tiles, steps = -(-n // columns), -(-k // depth)
    split = max(1, min(MAX_SPLIT, num_sms // tiles, steps // 4))
    if tiles * split > num_sms:  # several programs share a multiprocessor
        return SkinnyTile(columns, depth, split, 4, 4 if m <= 32 else 3)
    if m <= 32 and (split == 1 or k % (2 * depth) == 0):
        return SkinnyTile(columns, 2 * depth, split, 4, 3)
    return SkinnyTile(columns, depth, split, 4, 5)


@cache
def count_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def allocate_partials(out: Tensor, tiles: int, tile: SkinnyTile, rows: int) -> tuple[Tensor, Tensor]:
    """Return memory for the sums of the parts of k, and counters; if k is not split, `out` stands for both."""
    if tile.split == 1:
        return out, out
    assert tiles <= MAX_TILES
    sums = torch.empty(tiles * tile.split * tile.columns * rows, dtype=torch.float32, device=out.device)
    return sums, arrival_counters(out.device)


def arrival_counters(device: torch.device) -> Tensor:
    """Return counters, which are 0 between launches. Launches on one stream share them."""
    return _counters_of_stream(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _counters_of_stream(device: torch.device, stream: int) -> Tensor:
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "a captured graph would zero the counters in every replay"
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
