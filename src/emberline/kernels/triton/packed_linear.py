"""linear: computes y = x w^T for few rows of x and a uw12 weight, which is decoded in registers.

docs/unweight-format.md describes the format. As in `linear.py`, a program multiplies 64 rows of w by all rows of x, for
a part of k, and the program of a tile that ends last adds the sums in the order of the parts. A unit has the codes of
16 rows and 64 columns. Escapes, the few weights without a 12-bit code, are zeros in the units; their products are added
after those of the units.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.cuda.uw12 import BLOCK_ROWS, STARTS_OFFSET, UNIT_BYTES, UNIT_K, UW12Weight, escapes_offset
from emberline.kernels.triton.jit import jit, jit_for_activations, next_power_of_two, pdl_trigger_and_wait
from emberline.kernels.triton.linear import (
    MAX_ROWS,
    MAX_SPLIT,
    MIN_DOT_ROWS,
    SkinnyTile,
    allocate_partials,
    count_sms,
    finish_part,
)

COLUMNS = constexpr(64)  # rows of w in a tile: four units
UNIT_WORDS = constexpr(UNIT_BYTES // 4)
START_WORDS = constexpr(STARTS_OFFSET // 2)  # 16-bit words in a header before the numbers of first escapes
ESCAPES = constexpr(16)  # of 16 rows that are multiplied at a time


@jit_for_activations("m", "split")
def _multiply_packed(
    x: tensor, planes: tensor, words: tensor, halves: tensor, bias: tensor, residual: tensor, out: tensor,
    partials: tensor, arrivals: tensor, m: tensor, n: tensor, k: tensor, split: tensor, header_words: tensor,
    escape_words: tensor, x_stride: tensor, out_stride: tensor,
    ROWS: constexpr, UNITS: constexpr, MAX_UNITS: constexpr, GROUP: constexpr, HAS_BIAS: constexpr, ADDS: constexpr,
    SPLITS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Multiply 64 rows of w, UNITS units of k at a time, by x [m, k].

    `words` and `halves` are the headers as int32 and int16. MAX_UNITS: the most units of a part, as a power of two.
    """
    pdl_trigger_and_wait(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    units = k // 64
    first, last = part * units // split, (part + 1) * units // split
    header = (column // 16).to(tl.int64) * header_words
    scale = (tl.load(words + header + column % 16) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    depth = tl.arange(0, 64 * UNITS)
    x_at = x + row.to(tl.int64)[None, :] * x_stride + depth[:, None]
    base = planes + (tile.to(tl.int64) * units) * (4 * UNIT_WORDS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for unit in range(first, last, UNITS):
        codes = _decode_units(base + unit * (4 * UNIT_WORDS), last - unit, UNITS)
        is_inside = (row < m)[None, :] & (depth < (last - unit) * 64)[:, None]
        inputs = tl.load(x_at + unit * 64, is_inside, 0.0)
        total = tl.dot(codes * scale[:, None], inputs, total)
    total = _add_escapes(
        total, x, words, halves, row, tile, m, first, last, header_words, escape_words, x_stride, ROWS, MAX_UNITS
    )
    finish_part(
        total, bias, residual, out, partials, arrivals, row, column, tile, part, split, m, n, out_stride,
        ROWS, COLUMNS, GROUP, HAS_BIAS, ADDS, SPLITS,
    )  # fmt: skip


@jit
def _decode_units(base: tensor, count: tensor, UNITS: constexpr) -> tensor:
    """Return the weights of 64 rows and 64 * UNITS columns, divided by 2^b, where b is the base of a row.

    `base`: pointer to the first unit. Units from `count` on are zeros. For q in 0..1, the word of lane 4g + t and
    fragment 2 * half + f has the low bytes of four weights: rows g + 8h and columns 8q + 2t + p, with h, p in 0..1.
    """
    unit = tl.arange(0, 4 * UNITS)
    inside = (unit // 4 < count)[:, None]
    at = base + unit[:, None] * UNIT_WORDS
    low = tl.load(at + tl.arange(0, 256)[None, :], inside, 0)
    place = tl.arange(0, 128)[None, :]  # 64 * half + 2 * lane + f
    lane, half, f = place % 64 // 2, place // 64, place % 2
    high = tl.load(at + (256 + 4 * lane + 2 * half + f), inside, 0)
    first, second = tl.split(tl.reshape(low, [4 * UNITS, 128, 2]))  # q = 0 and 1
    rotated = (high << 4) | ((high >> 28) & 15)
    even, odd = _decode_slots(first, high), _decode_slots(second, rotated)  # [.., 128, h, p]
    slots = tl.reshape(tl.join(even, odd), [UNITS, 4, 2, 8, 4, 2, 2, 2, 2])  # k, block, half, g, t, f, h, p, q
    return tl.reshape(tl.permute(slots, (1, 6, 3, 0, 2, 5, 8, 4, 7)), [COLUMNS, 64 * UNITS])


@jit
def _decode_slots(low: tensor, high: tensor) -> tensor:
    """Return the four bf16 values [.., h, p] of each pair of words.

    A word of `low` has the low bytes of the values. A word of `high` has their signs and high exponent bits; its other
    bits are ignored."""
    high = high & -2021161081  # 0x87878787
    a = ((low & 255) | ((high & 255) << 8)).to(tl.int16)
    b = (((low >> 8) & 255) | (high & 65280)).to(tl.int16)
    c = (((low >> 16) & 255) | ((high >> 8) & 65280)).to(tl.int16)
    d = (((low >> 24) & 255) | ((high >> 16) & 65280)).to(tl.int16)
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return pairs.to(tl.bfloat16, bitcast=True)


@jit
def _add_escapes(
    total: tensor, x: tensor, words: tensor, halves: tensor, row: tensor, tile: tensor, m: tensor, first: tensor,
    last: tensor, header_words: tensor, escape_words: tensor, x_stride: tensor, ROWS: constexpr, MAX_UNITS: constexpr,
) -> tensor:  # fmt: skip
    """Add the products of the escapes in the units [first, last) to the sums, and return them."""
    block = tl.arange(0, 4)
    header = (4 * tile + block).to(tl.int64) * header_words
    starts = halves + 2 * header + START_WORDS
    begin, end = tl.load(starts + first).to(tl.int32) & 65535, tl.load(starts + last).to(tl.int32) & 65535
    unit = first + 1 + tl.arange(0, MAX_UNITS)
    ends = tl.load(starts[:, None] + unit[None, :], (unit <= last)[None, :], -1).to(tl.int32) & 65535
    for at in range(0, tl.max(end - begin, 0), ESCAPES):
        number = begin[:, None] + at + tl.arange(0, ESCAPES)[None, :]
        found = number < end[:, None]
        escape = tl.load(words + header[:, None] + escape_words + number, found, 0)
        units = first + tl.sum((ends[:, None, :] <= number[:, :, None]).to(tl.int32), 2)
        lane, register = escape & 31, (escape >> 5) & 15
        column = 64 * units + 16 * (register // 4) + 8 * (register % 4 // 2) + 2 * (lane % 4) + ((escape >> 9) & 1)
        weight_row = tl.where(found, 16 * block[:, None] + lane // 4 + 8 * (register % 2), -1)
        value = (escape >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        column, weight_row = tl.reshape(column, [4 * ESCAPES]), tl.reshape(weight_row, [4 * ESCAPES])
        value = tl.reshape(value, [4 * ESCAPES])
        is_place = tl.arange(0, COLUMNS)[:, None] == weight_row[None, :]
        weights = tl.where(is_place, value[None, :], tl.zeros([1, 1], tl.bfloat16))
        is_inside = (row < m)[None, :] & (weight_row >= 0)[:, None]
        inputs = tl.load(x + row.to(tl.int64)[None, :] * x_stride + column[:, None], is_inside, 0.0)
        total = tl.dot(weights, inputs, total)
    return total


def supports(m: int, group: int = 0) -> bool:
    """Return whether `linear` supports so many rows of x. `group`: as for `linear`."""
    return 0 < m <= MAX_ROWS and 32 % max(2 * group, 1) == 0


def linear(
    x: Tensor,
    w: UW12Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group: int = 0,
    tile: SkinnyTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `triton.linear.linear`.

    `tile.columns` must be 64, and `tile.depth` a multiple of 64.
    """
    (m, k), n = x.shape, w.n
    assert supports(m, group) and k == w.k and x.dtype is torch.bfloat16 and x.stride(1) == out.stride(1) == 1
    assert out.shape == (m, n // 2 if group else n) and (residual is None or residual.stride() == out.stride())
    tile = tile or choose_tile(m, n, k, count_sms(x.device))
    assert tile.columns == COLUMNS.value and tile.depth % UNIT_K == 0
    rows, tiles, units = max(MIN_DOT_ROWS, next_power_of_two(m)), n // tile.columns, k // UNIT_K
    partials, counters = allocate_partials(out, tiles, tile, rows)
    headers = w.headers.view(torch.int32)
    _multiply_packed[(tiles, tile.split)](
        x, w.planes.view(torch.int32), headers, w.headers.view(torch.int16), out if bias is None else bias,
        out if residual is None else residual, out, partials, counters, m, n, k, tile.split, headers.stride(0),
        escapes_offset(k) // 4, x.stride(0), out.stride(0), rows, tile.depth // UNIT_K,
        next_power_of_two(-(-units // tile.split) + 1), group, bias is not None, residual is not None, tile.split > 1,
        pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@cache
def choose_tile(m: int, n: int, k: int, num_sms: int) -> SkinnyTile:
    """Return the tile for a product: few parts of k, but enough programs for all multiprocessors."""
    tiles, units = n // COLUMNS.value, k // UNIT_K
    split = max(1, min(MAX_SPLIT, 2 * num_sms // tiles, units // 8))
    return SkinnyTile(COLUMNS.value, 2 * UNIT_K if units % 2 == 0 else UNIT_K, split, 4, 4)


assert BLOCK_ROWS == 16 and UNIT_K == 64
