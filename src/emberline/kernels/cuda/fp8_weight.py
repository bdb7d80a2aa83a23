"""FP8Weight: a float8 weight [n, k] as our kernels read it, made from a QuantisedMatrix.

Rows are those of the matrix; gate and up rows alternate in groups of 16 if the weight is gated. The order of columns
within each 16 is that of fp8.cuh. There is a float32 scale for each row, or one for each 16 rows and 128 columns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.cuda.driver import TensorMap, make_tensor_map
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.work_limits import (
    FP8_COLUMN_GRAIN,
    FP8_ROW_GRAIN,
    GATE_GROUP_ROWS,
    MAX_FP8_COLUMNS,
    supports_fp8_shape,
)

UNIT_K = 128  # columns (k) that a kernel reads at a time
BLOCK_ROWS, TILE_ROWS = 16, FP8_ROW_GRAIN  # rows that share a scale, and rows that a warpgroup computes
ORDER_GROUP = FP8_COLUMN_GRAIN  # columns among which codes are in another order
MAX_TILE_BLOCKS = 4  # blocks of rows in a tile, of which all but the first may be beyond n
MAX_K = MAX_FP8_COLUMNS  # columns of which quantise.cu has one row in registers


class _KernelRows(ctypes.Structure):
    """A weight as a kernel parameter, passed by value: `Fp8Rows` and `Fp8Blocks` of linear.cu."""

    _fields_ = (("map", TensorMap), ("scales", ctypes.c_void_p), ("padding", ctypes.c_uint64 * 7))


@dataclass(slots=True, eq=False)
class FP8Weight:
    """The codes of a weight, and the scales of its rows or of its blocks of 16 rows and 128 columns; not both."""

    codes: Tensor  # uint8 [n, k]
    row_scales: Tensor | None = None  # float32 [n]
    # Float32 [n / 16 + 3, k / 128 rounded up]; the last rows are zeros, which a tile that exceeds n reads.
    block_scales: Tensor | None = None
    _maps: dict[tuple[int, bool], TensorMap] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.codes.dtype is torch.uint8 and self.codes.is_contiguous()
        assert (self.row_scales is None) is not (self.block_scales is None)

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def scales(self) -> Tensor:
        scales = self.row_scales if self.block_scales is None else self.block_scales
        assert scales is not None
        return scales

    @property
    def has_blocks(self) -> bool:
        return self.block_scales is not None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def kernel_source(self) -> str:
        """The name of the weight's type in linear.cu."""
        return "Fp8Blocks" if self.has_blocks else "Fp8Rows"

    def drop_tensor_maps(self) -> None:
        """Drop the tensor maps, because the data may be at a different address on the next use."""
        self._maps.clear()

    def get_tensor_map(self, row_blocks: int, *, paired: bool = False) -> TensorMap:
        """Return the tensor map for tiles of 16 * `row_blocks` rows; see `BF16Weight.get_tensor_map`."""
        if (row_blocks, paired) not in self._maps:
            if paired:
                result = make_tensor_map(self.codes.unflatten(0, (-1, 2, 16)), (row_blocks // 2, 2, 8, UNIT_K))
            else:
                result = make_tensor_map(self.codes, (BLOCK_ROWS * row_blocks, UNIT_K))
            self._maps[row_blocks, paired] = result
        return self._maps[row_blocks, paired]

    def get_kernel_rows(self, row_blocks: int) -> ctypes.Structure:
        return _KernelRows(self.get_tensor_map(row_blocks), self.scales.data_ptr())


def supports_shape(n: int, k: int) -> bool:
    """Return whether our kernels have products with float8 weights of this shape."""
    return supports_fp8_shape(n, k)


def supports(matrix: QuantisedMatrix) -> bool:
    """Return whether our kernels can read this matrix.

    It must have scales for whole rows, or for blocks of a multiple of 16 rows and a multiple of 128 columns."""
    n, k = matrix.n, matrix.k
    if matrix.kind != "fp8" or matrix.codes.dim() != 2 or matrix.columns is not None or not supports_shape(n, k):
        return False
    if matrix.group_columns >= k:
        return True
    return matrix.group_columns % UNIT_K == 0 and matrix.group_rows % BLOCK_ROWS == 0


def pack(matrix: QuantisedMatrix, *, gated: bool = False) -> FP8Weight:
    """Return the weight on the device of the matrix, which `supports` accepts."""
    n, k, scales = matrix.n, matrix.k, matrix.scales.to(torch.float32)
    codes = order_columns(matrix.codes)
    if matrix.group_columns >= k:
        rows = scales[:, 0].repeat_interleave(matrix.group_rows)[:n].contiguous()
        if gated:
            codes, rows = interleave_gates(codes, GATE_GROUP_ROWS), interleave_gates(rows, GATE_GROUP_ROWS)
        return FP8Weight(codes, row_scales=rows)
    blocks = scales.repeat_interleave(matrix.group_rows // BLOCK_ROWS, 0)[: n // BLOCK_ROWS]
    blocks = blocks.repeat_interleave(matrix.group_columns // UNIT_K, 1)[:, : -(-k // UNIT_K)].contiguous()
    if gated:
        codes, blocks = interleave_gates(codes, GATE_GROUP_ROWS), interleave_gates(blocks, 1)
    return FP8Weight(codes, block_scales=F.pad(blocks, (0, 0, 0, MAX_TILE_BLOCKS - 1)))


def order_columns(codes: Tensor) -> Tensor:
    """Return the codes [.., k] with each 16 columns in the order of fp8.cuh."""
    parts: Tensor = codes.unflatten(-1, (-1, 2, 4, 2))  # k is 16g + 8b + 2t + e, its place 16g + 4t + 2e + b
    return parts.movedim(-3, -1).flatten(-4).contiguous()


def restore_columns(codes: Tensor) -> Tensor:
    """Return the codes with columns in the order of k."""
    parts: Tensor = codes.unflatten(-1, (-1, 4, 2, 2))
    return parts.movedim(-1, -3).flatten(-4).contiguous()


def interleave_gates(rows: Tensor, group: int) -> Tensor:
    """Return the rows with `group` rows of the first half (gates), then as many of the second (ups), and so on."""
    parts: Tensor = rows.unflatten(0, (2, -1, group))
    return parts.transpose(0, 1).flatten(0, 2).contiguous()
