"""Pending weights: quantised matrices whose parts arrive on a device one by one, and that are packed when complete.

Parts whose columns are in different orders cannot be stacked while quantised, so they are dequantised to bf16.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise_to_bf16, stack_rows
from emberline.models.quantised_layouts import QuantisedComponent, QuantisedTensorInfo
from emberline.models.quantised_load import STORED_DTYPES, ValueChecks, make_quantised_matrix
from emberline.models.quantised_plan import align_parts, split_experts

log = logging.getLogger("emberline.models")
MAX_QUANTISED_WEIGHTS = 16 << 20  # weights quantised at a time, to bound the memory for float32 values


class PendingQuantisedTensor:
    """The parts of a quantised tensor (codes, scales and so on), each allocated when its first bytes arrive.

    When the last part is complete, the matrix is passed to `on_complete`.
    """

    def __init__(
        self,
        name: str,
        info: QuantisedTensorInfo,
        device: torch.device,
        checks: ValueChecks,
        on_complete: Callable[[QuantisedMatrix], None],
    ) -> None:
        self._name, self._info, self._device, self._checks = name, info, device, checks
        self._on_complete = on_complete
        self.parts: list[QuantisedComponent] = list(info.parts)
        self._tensors: dict[QuantisedComponent, Tensor] = {}
        self._missing_parts = len(self.parts)

    def get_destination(self, index: int) -> Tensor:
        part = self.parts[index]
        stored = self._info.parts[part]
        if part not in self._tensors:
            self._tensors[part] = torch.empty(stored.shape, dtype=STORED_DTYPES[stored.dtype], device=self._device)
        return self._tensors[part]

    def mark_part_complete(self) -> None:
        self._missing_parts -= 1
        if self._missing_parts == 0:
            tensors, self._tensors = self._tensors, {}
            self._on_complete(make_quantised_matrix(self._name, self._info, tensors, self._checks))


class PendingLinear:
    """A weight that is stacked from quantised parts and packed when all have arrived."""

    def __init__(self, name: str, count: int, weight: ops.PackedWeight, on_packed: Callable[[int], None]) -> None:
        self._name, self._weight, self._on_packed = name, weight, on_packed
        self._parts: list[QuantisedMatrix | None] = [None] * count

    def set_part(self, index: int, matrix: QuantisedMatrix) -> None:
        self._parts[index] = matrix
        parts = [part for part in self._parts if part is not None]
        if len(parts) < len(self._parts):
            return
        self._parts = []
        if (aligned := align_parts(parts)) is not None:
            self._on_packed(ops.fill_quantised_weight(self._weight, stack_rows(aligned)))
        else:
            reason = "its parts have columns in different orders"
            log.info("Weights dequantised: tensor=%s kept_as=bfloat16 reason=%r", self._name, reason)
            values = torch.cat([dequantise_to_bf16(part) for part in parts])
            self._on_packed(ops.fill_dequantised_weight(self._weight, values))


class PendingExperts:
    """The matrices of all experts of a layer, whose quantised parts are copied to their rows as they arrive."""

    def __init__(
        self,
        shape: QuantisedMatrix,
        device: torch.device,
        num_parts: int,
        on_packed: Callable[[int], None],
        *,
        gated: bool = False,
    ) -> None:
        """`shape`: matrices of the final sizes, on the meta device."""
        count, rows = shape.codes.shape[:2]
        self.experts = ops.PackedExperts(count, rows, shape.k, WeightLayout.QUANTISED, shape, shape.nbytes, gated)
        self._shape, self._device, self._on_packed = shape, device, on_packed
        self._missing_parts = num_parts
        self._matrices: QuantisedMatrix | None = None

    def set_part(self, select: Callable[[Tensor], Tensor], matrix: QuantisedMatrix) -> None:
        """Copy `matrix`, such as the gates of one expert, into the matrices of all experts.

        `select` determines where: given a tensor [experts, rows of an expert, 1], it returns the rows for `matrix`."""
        if self._matrices is None:
            self._matrices = allocate_like(self._shape, self._device, zeroed=True)  # some experts may stay unused
        whole, count, n = self._matrices, self._shape.codes.shape[0], self._shape.n
        rows = select(torch.arange(count * n, device=self._device).view(count, n, 1)).flatten()
        _copy_rows(whole.codes, rows, matrix.codes)
        _copy_rows(whole.scales, rows[:: whole.group_rows] // whole.group_rows, matrix.scales)
        if whole.zeros is not None and matrix.zeros is not None:
            _copy_rows(whole.zeros, rows, matrix.zeros)
        if whole.row_scale is not None and matrix.row_scale is not None:
            whole.row_scale.view(-1)[rows] = matrix.row_scale.flatten()
        self._missing_parts -= 1
        if self._missing_parts == 0:
            self._matrices = None
            self._on_packed(ops.fill_quantised_experts(self.experts, whole))


def _copy_rows(stacked: Tensor, rows: Tensor, part: Tensor) -> None:
    """Copy a part to the `rows` of the stacked matrices. Both are viewed as bytes, because few ops support float8."""
    flat = stacked.view(-1, stacked.shape[-1])
    flat.view(torch.uint8)[rows] = part.reshape(-1, part.shape[-1]).view(torch.uint8)


def allocate_like(shape: QuantisedMatrix, device: torch.device, *, zeroed: bool = False) -> QuantisedMatrix:
    """Allocate a matrix on the device with the sizes and dtypes of `shape`, which is on the meta device."""

    def allocate(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        made = torch.empty(part.shape, dtype=part.dtype, device=device)
        if zeroed:
            made.view(torch.uint8).zero_()
        return made

    codes, scales = allocate(shape.codes), allocate(shape.scales)
    assert codes is not None and scales is not None
    columns = None if shape.columns is None else torch.arange(shape.k, device=device)
    zeros, row_scale = allocate(shape.zeros), allocate(shape.row_scale)
    return replace(shape, codes=codes, scales=scales, zeros=zeros, row_scale=row_scale, columns=columns)


def quantise_rows(values: Tensor, shape: QuantisedMatrix) -> QuantisedMatrix:
    """Quantise bf16 values [.., n, k] to the format of `shape`, some rows at a time to save memory."""
    flat = values.reshape(-1, values.shape[-1])
    step = max(1, MAX_QUANTISED_WEIGHTS // flat.shape[1])
    pieces = (flat[at : at + step] for at in range(0, len(flat), step))
    matrix = stack_rows([quantise(piece, shape.kind, 1, shape.group_columns, search=True) for piece in pieces])
    return matrix if values.ndim == 2 else split_experts(matrix, len(values))
