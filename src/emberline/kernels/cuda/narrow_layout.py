"""pack: arranges matrices of 4-bit codes as `narrow.cu` reads them.

| format | a scale in a unit | left out of the sums |
|---|---|---|
| Int4 | float16, then with zeros 128 + zero as bf16 | the power of two by which scales were multiplied to fit float16 |
| Float4<4>: mxfp4 | exponent | 2 ** 32 |
| Float4<8>: nvfp4 | e4m3 | 2 ** 26 and the scale of the row |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from emberline.kernels.quantised_matrix import QuantisedMatrix

BLOCK_ROWS, GROUP_BLOCKS, UNIT_COLUMNS = (
    16,
    4,
    128,
)  # rows of a block, blocks whose units are adjacent, columns of a unit
CODE_BYTES = 1024  # of a unit
MAX_MXFP4_SCALE, MXFP4_FACTOR, NVFP4_FACTOR = 160, 2.0**32, 2.0**26
MAX_PACKED_AT_ONCE = 1 << 25  # weights; more would take gigabytes while they are packed


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeight:
    """A matrix [n, k], or the matrices of all experts of a layer."""

    data: Tensor  # uint8 [experts, groups of 4 blocks, units of a row, 4, bytes of a unit]
    format: str  # C++ type
    n: int
    k: int
    factor: float  # of all sums
    row_scales: Tensor | None  # nvfp4: float32 [experts, packed rows], with the factor
    columns: Tensor | None  # see QuantisedMatrix

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


def pack(matrix: QuantisedMatrix) -> NarrowWeight | None:
    """Return the matrix in the layout of `narrow.cu`, or None if that cannot represent it exactly."""
    found = _convert_scales(matrix)
    if found is None or matrix.n % (2 * BLOCK_ROWS) or matrix.k % BLOCK_ROWS:
        return None
    format_name, scales, factor = found
    codes, row_scale = (
        part if part is None or matrix.codes.dim() == 3 else part[None] for part in (matrix.codes, matrix.row_scale)
    )
    assert codes is not None
    units, padding = -(-matrix.k // UNIT_COLUMNS), -matrix.n % (BLOCK_ROWS * GROUP_BLOCKS)
    groups = (matrix.n + padding) // (BLOCK_ROWS * GROUP_BLOCKS)
    data = codes.new_empty(len(codes), groups, units, GROUP_BLOCKS, CODE_BYTES + scales.shape[-1] // units * BLOCK_ROWS)
    step = max(1, MAX_PACKED_AT_ONCE // (units * UNIT_COLUMNS * BLOCK_ROWS * GROUP_BLOCKS))  # groups
    for expert, target in enumerate(data):
        for at in range(0, groups, step):
            rows, part = slice(at * 64, min((at + step) * 64, matrix.n)), target[at : at + step]
            own, own_scales = (
                pad(values[expert, rows], (0, 0, 0, -(rows.stop - rows.start) % 64)) for values in (codes, scales)
            )
            part[..., :CODE_BYTES] = pack_codes(own, units, is_float4=matrix.kind != "int4")
            part[..., CODE_BYTES:] = (
                own_scales.view(-1, 4, 16, units, own_scales.shape[1] // units).permute(0, 3, 1, 2, 4).flatten(3)
            )
    if row_scale is not None:
        row_scale = pad(row_scale, (0, padding))
    return NarrowWeight(data, format_name, matrix.n, matrix.k, factor, row_scale, matrix.columns)


def pack_codes(codes: Tensor, units: int, *, is_float4: bool) -> Tensor:
    """Return the codes of rows [rows, k / 2], in groups of 4 blocks, as [groups, units, 4, CODE_BYTES]."""
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    values = pad(values, (0, units * UNIT_COLUMNS - values.shape[1]))
    # Dimensions: group, block, half of the block's rows, row of 8, unit, half of its columns, step of 16 columns,
    # half of a step, pair of columns, column of the pair. A lane has the same row of both halves, and a pair.
    parts = values.view(-1, 4, 2, 8, units, 2, 4, 2, 4, 2).permute(0, 4, 1, 5, 3, 8, 6, 9, 7, 2)
    places = torch.arange(4, device=codes.device).view(2, 2) * 16  # by half of the step, and half of the rows
    table = _float4_table(codes.device) if is_float4 else _int4_table(codes.device)
    bits = table[(parts.to(torch.int32) + places).flatten()].view(parts.shape)
    return bits.sum(dim=(-2, -1), dtype=torch.int32).to(torch.int16).flatten(3).view(torch.uint8)


@cache
def _int4_table(device: torch.device) -> Tensor:
    """Return the bits of 16 codes in each of 4 places of a half word."""
    return torch.tensor(
        [code << 4 * place for place in range(4) for code in range(16)], dtype=torch.int32, device=device
    )


@cache
def _float4_table(device: torch.device) -> Tensor:
    def place(code: int, shift: int) -> int:
        return (code >> 3) << 15 - shift | (code & 7) << 6 - shift

    def place_last(code: int) -> int:
        return (code >> 3) << 14 | (code >> 2 & 1) << 13 | (code & 3) << 10

    first = [place(code, shift) for shift in (0, 3, 6) for code in range(16)]
    return torch.tensor([*first, *map(place_last, range(16))], dtype=torch.int32, device=device)


def _convert_scales(matrix: QuantisedMatrix) -> tuple[str, Tensor, float] | None:
    """Return the C++ type, the bytes of the scales of each row [experts, n, units * bytes], and the factor of sums.

    The result is None if the layout has no such groups, or cannot represent the scales.
    """
    group = min(matrix.group_columns, matrix.k)
    per_unit = UNIT_COLUMNS // group if UNIT_COLUMNS % group == 0 else 1
    divides = group == matrix.k or UNIT_COLUMNS % group == 0 or group % UNIT_COLUMNS == 0
    if not divides or per_unit not in {"int4": (1, 2, 4), "mxfp4": (4,), "nvfp4": (8,)}.get(matrix.kind, ()):
        return None
    starts = torch.arange(-(-matrix.k // UNIT_COLUMNS) * per_unit, device=matrix.codes.device)
    index = (starts * (UNIT_COLUMNS // per_unit) // group).clamp(max=matrix.scales.shape[-1] - 1)
    scales, zeros = (
        None if part is None else part.view(-1, *part.shape[-2:])[..., index] for part in (matrix.scales, matrix.zeros)
    )
    assert scales is not None
    if matrix.kind == "nvfp4":
        return "Float4<8>", scales.view(torch.uint8), NVFP4_FACTOR
    if matrix.kind == "mxfp4":
        return ("Float4<4>", scales, MXFP4_FACTOR) if int(scales.max()) <= MAX_MXFP4_SCALE else None
    exponent = _choose_exponent(scales)
    halves = (scales.float() * 2.0**exponent).half()
    if not torch.equal(halves.float(), scales.float() * 2.0**exponent):
        return None
    if zeros is not None:
        halves = torch.stack([halves.view(torch.int16), (zeros.float() + 128).bfloat16().view(torch.int16)], dim=-1)
    name = f"Int4<{per_unit}, {'false' if zeros is None else 'true'}>"
    return name, halves.flatten(2).view(torch.uint8), 2.0**-exponent


def _choose_exponent(scales: Tensor) -> int:
    """Return the power of two by which the largest scale is multiplied to be near the largest float16."""
    largest = float(scales.float().abs().max())
    return 14 - math.frexp(largest)[1] if 0 < largest < math.inf else 0
