"""pack: arranges matrices of 4-bit codes as `narrow.cu` reads them.

A unit has the codes of 16 rows and 128 columns, followed by their scales. Kernels multiply the finished sums by a
factor that the stored codes and scales lack.

| format | form of a scale in a unit | factor of the finished sums |
|---|---|---|
| Int4 | float16, then -zero / 64 as bf16 if there are zeros | 64 and the power of two that makes scales fit float16 |
| Float4<4>: mxfp4 | exponent + 94, rotated right by 1 bit | 2 ** 32 |
| Float4<8>: nvfp4 | e4m3, rotated by 4 bits | 2 ** 26 and the scale of the row |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import xor

import torch
from torch import Tensor
from torch.nn.functional import pad

from emberline.kernels.four_bit_size import (
    BLOCK_ROWS,
    CODE_BYTES,
    GROUP_BLOCKS,
    UNIT_COLUMNS,
    can_pack,
    count_groups_per_unit,
    count_packed_bytes,
)
from emberline.kernels.quantised_matrix import QuantisedMatrix

MXFP4_FACTOR, NVFP4_FACTOR, INT4_FACTOR = 2.0**32, 2.0**26, 64.0
# Added to the exponents of mxfp4. Decoded codes are too small by 2 ** 126: 2 ** 94 and the factor correct that.
MXFP4_OFFSET = 94
MAX_MXFP4_SCALE = 254 - MXFP4_OFFSET
# This factor leaves room for scales from 2 ** -27 to 2 ** 5, which float16 represents as exactly as bf16 does.
COMMON_INT4_FACTOR = INT4_FACTOR * 2.0**-10
GATE_ROWS = 8  # rows of gate in a block of a gated matrix
MAX_PACKED_AT_ONCE = 1 << 25  # weights; more would take gigabytes while they are packed
# For each of the 8 codes in a word, and each bit of the code from the lowest: the bits of the word that it flips.
# This is the inverse of `Float4::decode`.
FLOAT4_BITS = (
    (0x00004040, 0x00000080, 0x00000100, 0x00008000),
    (0x00000001, 0x00000002, 0x00000004, 0x00000200),
    (0x00000400, 0x00000800, 0x00001010, 0x00080000),
    (0x00000010, 0x00000020, 0x00004000, 0x00002020),
    (0x40400000, 0x00800000, 0x01000000, 0x80000000),
    (0x00010000, 0x00020000, 0x00040000, 0x02000000),
    (0x04000000, 0x08000000, 0x10100000, 0x00000008),
    (0x00100000, 0x00202020, 0x40000000, 0x20202020),
)
INT4_BITS = tuple(tuple(1 << 4 * place + bit for bit in range(4)) for place in range(8))


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeight:
    """A matrix [n, k] of 4-bit codes as `narrow.cu` reads it, or the matrices of all experts of a layer."""

    data: Tensor  # uint8 [experts, groups of 4 blocks, units of a row, 4, bytes of a unit]
    format: str  # C++ type
    n: int
    k: int
    factor: float  # of all sums
    row_scales: Tensor | None  # float32 [experts, packed rows], in the order of `QuantisedMatrix`
    columns: Tensor | None  # see QuantisedMatrix
    gated: bool = False  # whether each block has rows of gate, then their rows of up

    @property
    def blocks(self) -> int:
        return self.data.shape[1] * GROUP_BLOCKS

    @property
    def units(self) -> int:
        return self.data.shape[2]

    @property
    def unit_bytes(self) -> int:
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.row_scales, self.columns) if part is not None)


def supports(matrix: QuantisedMatrix) -> bool:
    """Return whether a matrix can be packed. This depends only on its sizes and dtypes, not on its values."""
    has_layout = can_pack(matrix.kind, matrix.n, matrix.k, matrix.group_columns)
    return has_layout and not (matrix.kind == "int4" and matrix.scales.dtype is torch.float32)


def count_bytes(matrix: QuantisedMatrix) -> int | None:
    """Return the size of a matrix after `pack` in bytes; None: it cannot be packed. It may be on the meta device."""
    if not supports(matrix):
        return None
    has_zeros = matrix.zeros is not None
    size = count_packed_bytes(matrix.kind, matrix.n, matrix.k, matrix.group_columns, has_zeros=has_zeros)
    order = 0 if matrix.columns is None else matrix.columns.nbytes
    return math.prod(matrix.codes.shape[:-2]) * size + order


def pack(matrix: QuantisedMatrix, *, gated: bool = False) -> FourBitWeight | None:
    """Return the matrix in the layout of `narrow.cu`, or None if `supports` is false.

    `gated`: whether the first half of the rows are those of gate and the second half those of up.
    """
    if not supports(matrix):
        return None
    found = _convert_scales(matrix)
    codes, scales = matrix.codes if matrix.codes.dim() == 3 else matrix.codes[None], found.scales
    units, padding = -(-matrix.k // UNIT_COLUMNS), -matrix.n % (BLOCK_ROWS * GROUP_BLOCKS)
    groups = (matrix.n + padding) // (BLOCK_ROWS * GROUP_BLOCKS)
    data = codes.new_empty(len(codes), groups, units, GROUP_BLOCKS, CODE_BYTES + scales.shape[-1] // units * BLOCK_ROWS)
    step = max(1, MAX_PACKED_AT_ONCE // (units * UNIT_COLUMNS * BLOCK_ROWS * GROUP_BLOCKS))  # groups
    for expert, target in enumerate(data):
        for at in range(0, groups, step):
            first, last, part = at * 64, min((at + step) * 64, matrix.n), target[at : at + step]
            own, own_scales = (
                pad(_select_rows(values[expert], first, last, gated=gated), (0, 0, 0, (first - last) % 64))
                for values in (codes, scales)
            )
            part[..., :CODE_BYTES] = pack_codes(own, units, is_float4=matrix.kind != "int4")
            part[..., CODE_BYTES:] = (
                own_scales.view(-1, 4, 16, units, own_scales.shape[1] // units).permute(0, 3, 1, 2, 4).flatten(3)
            )
    row_scales = found.row_factors if matrix.row_scale is None else matrix.row_scale.view(len(codes), -1)
    if row_scales is not None:
        row_scales = pad(row_scales, (0, padding))
    return FourBitWeight(data, found.format, matrix.n, matrix.k, found.factor, row_scales, matrix.columns, gated)


def _select_rows(values: Tensor, first: int, last: int, *, gated: bool) -> Tensor:
    """Return the rows [first, last) of the packed order; if gated, 8 rows of gate and 8 of up alternate in it."""
    if not gated:
        return values[first:last]
    pairs = values.view(2, -1, GATE_ROWS, values.shape[1])[:, first // BLOCK_ROWS : last // BLOCK_ROWS]
    return pairs.transpose(0, 1).reshape(last - first, -1)


def pack_codes(codes: Tensor, units: int, *, is_float4: bool) -> Tensor:
    """Return codes [rows, k / 2] as bytes of units: [groups of 4 blocks, units, 4, CODE_BYTES].

    A block has 16 rows, and `units` units side by side. The units of the 4 blocks of a group alternate."""
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    values = pad(values, (0, units * UNIT_COLUMNS - values.shape[1]))
    # Dimensions: group, block, half of the block's rows, row of 8, unit, half of its columns, step of 16 columns,
    # half of a step, pair of columns, column of the pair. A lane has the same row of both halves, and a pair.
    parts = values.view(-1, 4, 2, 8, units, 2, 4, 2, 4, 2).permute(0, 4, 1, 5, 3, 8, 6, 9, 7, 2).flatten(-3)
    table = _make_table(FLOAT4_BITS if is_float4 else INT4_BITS).to(codes.device)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for place, bits in enumerate(table):
        words ^= bits[parts[..., place].int()]
    return words.flatten(3).view(torch.uint8)


@cache
def _make_table(places: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return a table [8 places, 16 codes] of the bits of a word that a code flips at a place.

    `places`: for each place of a 32-bit word, the masks of the bits that the four bits of a code flip."""
    table = [[_combine(bits, code) for code in range(16)] for bits in places]
    return torch.tensor(table, dtype=torch.int64).to(torch.int32)


def _combine(bits: tuple[int, ...], code: int) -> int:
    return reduce(xor, (mask for i, mask in enumerate(bits) if code >> i & 1), 0)


@dataclass(frozen=True, slots=True)
class _PackedScales:
    format: str  # C++ type
    scales: Tensor  # bytes of the scales of each row, [experts, n, units * bytes]
    factor: float  # of all sums
    row_factors: Tensor | None = None  # float32 [experts, n], if scales differ too much for one factor


def _convert_scales(matrix: QuantisedMatrix) -> _PackedScales:
    group = min(matrix.group_columns, matrix.k)
    per_unit = count_groups_per_unit(matrix.kind, matrix.k, group)
    assert per_unit is not None
    starts = torch.arange(-(-matrix.k // UNIT_COLUMNS) * per_unit, device=matrix.codes.device)
    index = (starts * (UNIT_COLUMNS // per_unit) // group).clamp(max=matrix.scales.shape[-1] - 1)
    scales, zeros = (
        None if part is None else part.view(-1, *part.shape[-2:])[..., index] for part in (matrix.scales, matrix.zeros)
    )
    assert scales is not None
    if matrix.kind == "nvfp4":
        return _PackedScales("Float4<8>", _rotate_right(scales.view(torch.uint8), 4), NVFP4_FACTOR)
    if matrix.kind == "mxfp4":
        return _limit_exponents(scales)
    halves, factor, row_factors = _convert_to_float16(scales)
    if zeros is not None:
        zeros_bits = (zeros.float() / -INT4_FACTOR).bfloat16().view(torch.int16)
        halves = torch.stack([halves.view(torch.int16), zeros_bits], dim=-1)
    name = f"Int4<{per_unit}, {'false' if zeros is None else 'true'}>"
    return _PackedScales(name, halves.flatten(2).view(torch.uint8), INT4_FACTOR * factor, row_factors)


def _limit_exponents(scales: Tensor) -> _PackedScales:
    """Return the scales of mxfp4 with exponents of at most MAX_MXFP4_SCALE.

    Rows with larger exponents, which no model has, get factors for their sums."""
    if int(scales.max()) <= MAX_MXFP4_SCALE:
        return _PackedScales("Float4<4>", _rotate_right(scales + MXFP4_OFFSET, 1), MXFP4_FACTOR)
    excess = (scales.amax(-1, keepdim=True).int() - MAX_MXFP4_SCALE).clamp(min=0)
    kept = (scales.int() - excess).clamp(min=0).to(torch.uint8)
    packed = _rotate_right(kept + MXFP4_OFFSET, 1)
    return _PackedScales("Float4<4>", packed, MXFP4_FACTOR, torch.exp2(excess[..., 0].float()))


def _rotate_right(bytes_: Tensor, bits: int) -> Tensor:
    return bytes_ >> bits | bytes_ << 8 - bits


def _convert_to_float16(scales: Tensor) -> tuple[Tensor, float, Tensor | None]:
    """Return bf16 or float16 scales as float16, and the powers of two by which they were divided.

    If one power of two is enough for all scales, it is the second result, and the third is None. If scales differ by
    more than float16 can represent, the second result is 1.0, and the third has a power of two for each row. A scale
    that is rounded then is 2 ** 30 times smaller than another scale of its row, so rounding it does not change the
    row's sums.
    """
    exponent = _choose_exponent(scales)
    scaled = scales.double() * 2.0**exponent
    if torch.equal(scaled.half().double(), scaled):
        return scaled.half(), 2.0**-exponent, None
    exponents = (14 - torch.frexp(scales.float().abs().amax(-1)).exponent).double()
    return (scales.double() * torch.exp2(exponents)[..., None]).half(), 1.0, torch.exp2(-exponents).float()


def _choose_exponent(scales: Tensor) -> int:
    """Return the exponent of the power of two that brings the largest scale near the largest float16."""
    largest = float(scales.float().abs().max())
    return 14 - math.frexp(largest)[1] if 0 < largest < math.inf else 0


def use_common_factor(weight: FourBitWeight) -> FourBitWeight | None:
    """Return the weight with the factor of all weights of its format, so that experts can move.

    All sums of a weight are multiplied by its `factor`. Its scales are changed in place to fit the new factor. Return
    None if scales would have to be rounded, or if rows have factors of their own; some scales may be changed then."""
    if weight.format == "Float4<8>":
        return weight
    if weight.row_scales is not None:
        return None
    if not weight.format.startswith("Int4"):
        return weight
    ratio = weight.factor / COMMON_INT4_FACTOR
    for expert in weight.data:
        scales = expert[..., CODE_BYTES:].view(torch.float16)[..., :: 2 if weight.format.endswith("true>") else 1]
        wanted = scales.double() * ratio
        if not torch.equal(wanted.half().double(), wanted):
            return None
        scales.copy_(wanted)
    return replace(weight, factor=COMMON_INT4_FACTOR)
