"""QuantisedMatrices: the bfloat16 values of a quantised tensor.

Four-bit formats store two codes in a byte, the first in its low half. A table has the values of both for each byte.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.dequant import MXFP4_DOUBLED_VALUES, MXFP4_EXPONENT_BIAS
from emberline.hub.tensorfile import TensorInfo
from emberline.models.quantised_tensors import QuantisedTensorInfo
from emberline.models.weight_formats import WeightFormat

ReadTensor = Callable[[TensorInfo], Tensor]  # returns the flat bytes of a stored tensor
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
INT4_VALUES = np.arange(-8, 8, dtype=np.int8)
INTEGERS = {"I32": torch.int32, "I64": torch.int64}


class QuantisedMatrices:
    """The matrices of a quantised tensor: one, or one for each expert. Each is dequantised when it is read."""

    def __init__(self, name: str, info: QuantisedTensorInfo, read: ReadTensor) -> None:
        self._info = info
        self._codes = read(info.codes).view(info.codes.shape if info.codes.dtype != "I32" else (info.shape[0], -1))
        self._scales = _view_as(read(info.scales), SCALE_DTYPES[info.scales.dtype]).view(info.scales.shape)
        if info.shape_tensor is not None:
            stored = _view_as(read(info.shape_tensor), INTEGERS[info.shape_tensor.dtype]).tolist()
            if tuple(stored) != info.shape:
                message = f"tensor {name!r} in {info.file} has the shape {info.shape}, but its weight_shape is {stored}"
                raise ModelFileError(message)

    def __len__(self) -> int:
        return self._info.shape[0]

    def whole(self) -> Tensor:
        """Return all values."""
        return self._decode(self._codes, self._scales)

    def part(self, index: int) -> Tensor:
        """Return the matrix of an expert."""
        return self._decode(self._codes[index], self._scales[index])

    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        values = DECODERS[self._info.format.name](codes, scales, self._info.format)
        return values.transpose(-1, -2) if self._info.is_transposed else values


def _view_as(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as values of this dtype; they are copied if their address is not aligned."""
    return (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype)


def _make_pair_table(values: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return for each byte the values of its two codes in bfloat16, as the bits of one number."""
    codes = np.arange(256)
    pairs = np.stack([values[codes & 15], values[codes >> 4]], axis=1)
    return torch.from_numpy(pairs).to(torch.bfloat16).view(torch.int32).flatten().numpy()


MXFP4_POWERS = torch.from_numpy(np.ldexp(np.float32(1), np.arange(256) - MXFP4_EXPONENT_BIAS)).to(torch.bfloat16)
MXFP4_PAIRS, INT4_PAIRS = _make_pair_table(MXFP4_DOUBLED_VALUES), _make_pair_table(INT4_VALUES)


def _look_up_pairs(table: NDArray[np.int32], packed: Tensor) -> Tensor:
    """Return the values of codes, of which each byte of `packed` has two."""
    found = np.take(table, packed.numpy(), mode="clip")  # no byte is outside the table, so nothing needs a check
    return torch.from_numpy(found).view(torch.bfloat16)


def _decode_mxfp4(blocks: Tensor, scales: Tensor, found: WeightFormat) -> Tensor:
    return _look_up_pairs(MXFP4_PAIRS, blocks).mul_(MXFP4_POWERS[scales.to(torch.int64)][..., None]).flatten(-2)


def _decode_fp8(codes: Tensor, scales: Tensor, found: WeightFormat) -> Tensor:
    rows, columns = codes.shape
    wide = scales.to(torch.float32).repeat_interleave(min(found.group_columns, columns), dim=1)[:, :columns]
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    for block, start in enumerate(range(0, rows, found.group_rows)):  # a block of rows at a time, to bound memory
        part = codes[start : start + found.group_rows].view(torch.float8_e4m3fn).to(torch.float32)
        values[start : start + found.group_rows] = part * wide[block]
    return values


def _decode_int4(codes: Tensor, scales: Tensor, found: WeightFormat) -> Tensor:
    values = _look_up_pairs(INT4_PAIRS, codes).view(*scales.shape, found.group_columns)
    if scales.dtype is torch.bfloat16:
        return values.mul_(scales[..., None]).flatten(-2)
    return (values.to(torch.float32) * scales.to(torch.float32)[..., None]).to(torch.bfloat16).flatten(-2)


DECODERS: dict[str, Callable[[Tensor, Tensor, WeightFormat], Tensor]] = {
    "mxfp4": _decode_mxfp4,
    "fp8": _decode_fp8,
    "int4": _decode_int4,
}
