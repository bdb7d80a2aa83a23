"""QuantisedMatrices: the bfloat16 values of a quantised tensor, computed in main memory.

Four-bit formats store two codes in a byte, the first in its low half. A table maps each byte to the two values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.hub.dequant import MXFP4_DOUBLED_VALUES, MXFP4_EXPONENT_BIAS
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise_to_bf16, select_expert
from emberline.models.quantised_layouts import QuantisedTensorInfo
from emberline.models.quantised_load import STORED_DTYPES, ValueChecks, make_quantised_matrix

ReadTensor = Callable[[TensorInfo], Tensor]  # returns the flat bytes of a stored tensor
INT4_VALUES = np.arange(-8, 8, dtype=np.int8)


class QuantisedMatrices:
    """The matrices of a quantised tensor: one, or one for each expert. Each is dequantised when it is read."""

    def __init__(self, name: str, info: QuantisedTensorInfo, read: ReadTensor) -> None:
        self._info = info
        parts = {
            part: _view_as(read(stored), STORED_DTYPES[stored.dtype]).view(stored.shape)
            for part, stored in info.parts.items()
        }
        self._matrix = make_quantised_matrix(name, info, parts, ValueChecks())

    def __len__(self) -> int:
        return self._info.shape[0]

    def decode_all(self) -> Tensor:
        """Return all values."""
        return self._decode(self._matrix)

    def decode_matrix(self, index: int) -> Tensor:
        """Return the matrix of an expert."""
        return self._decode(select_expert(self._matrix, index))

    def _decode(self, matrix: QuantisedMatrix) -> Tensor:
        values = decode_on_host(matrix)
        return values.transpose(-1, -2) if self._info.is_transposed else values


def decode_on_host(matrix: QuantisedMatrix) -> Tensor:
    """Return the values of `dequantise_to_bf16`, computed with a table of pairs of codes if the format allows it."""
    if matrix.kind == "mxfp4":
        powers = MXFP4_POWERS[matrix.scales.to(torch.int64)][..., None]
        return _look_up_pairs(MXFP4_PAIRS, matrix.codes).view(*matrix.scales.shape, -1).mul_(powers).flatten(-2)
    is_plain = matrix.zeros is None and matrix.columns is None
    if matrix.kind == "int4" and is_plain and matrix.scales.dtype is torch.bfloat16:
        values = _look_up_pairs(INT4_PAIRS, matrix.codes).view(*matrix.scales.shape, -1)
        return values.mul_(matrix.scales[..., None]).flatten(-2)
    return dequantise_to_bf16(matrix)


def _view_as(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as values of this dtype; they are copied if their address is not aligned."""
    return (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype)


def _make_pair_table(values: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return a table that maps each byte to the bfloat16 values of its two codes, joined to 32 bits."""
    codes = np.arange(256)
    pairs = np.stack([values[codes & 15], values[codes >> 4]], axis=1)
    return torch.from_numpy(pairs).to(torch.bfloat16).view(torch.int32).flatten().numpy()


MXFP4_POWERS = torch.from_numpy(np.ldexp(np.float32(1), np.arange(256) - MXFP4_EXPONENT_BIAS)).to(torch.bfloat16)
MXFP4_PAIRS, INT4_PAIRS = _make_pair_table(MXFP4_DOUBLED_VALUES), _make_pair_table(INT4_VALUES)


def _look_up_pairs(table: NDArray[np.int32], packed: Tensor) -> Tensor:
    """Return the values of the codes in `packed`, which has two in each byte."""
    found = np.take(table, packed.numpy(), mode="clip")  # no byte is outside the table, so nothing needs a check
    return torch.from_numpy(found).view(torch.bfloat16)
