"""QuantisedPlanner: which matrices of a checkpoint stay quantised, or are quantised at load, on a device.

A matrix may be stacked from several tensors, its parts. Parts whose formats differ cannot be stacked while quantised,
so they are dequantised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from emberline.hub.checkpoint import Checkpoint, format_names
from emberline.kernels import ops
from emberline.kernels.quantised_matrix import INT4_ZERO, QuantisedMatrix, stack_rows
from emberline.models.quantisation_config import WeightFormat
from emberline.models.quantised_layouts import QuantisedTensorInfo
from emberline.models.quantised_load import describe_matrix
from emberline.models.weight_formats import choose_online_format
from emberline.models.weights import StackSource

log = logging.getLogger("emberline.models")


class QuantisedPlanner:
    """Describes quantised matrices before they are loaded, as tensors on the meta device."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, *, online: str = "", keeps_quantised: bool = True
    ) -> None:
        self._checkpoint, self._device, self._online = checkpoint, device, online
        self._keeps_quantised = keeps_quantised
        self._described: dict[object, QuantisedMatrix] = {}  # by form
        self._experts: dict[str, QuantisedMatrix | None] = {}  # of a layer, by the name of the first part
        self._mixed: list[str] = []  # quantised tensors that cannot be stacked with others

    def describe_linear(
        self, parts: Sequence[tuple[str, int]], columns: int, dtype: torch.dtype
    ) -> QuantisedMatrix | None:
        """Return the quantised matrix that the parts (name, rows) are stacked to; None: they are loaded as `dtype`."""
        names = [name for name, _ in parts]
        infos = self._list_quantised(names, dtype)
        if infos is None:
            return None
        if infos:
            aligned = align_parts([self._describe(info) for info in infos])
            shape = None if aligned is None else stack_rows(aligned)
            self._mixed += names if aligned is None else []
        else:
            online = choose_online_format(self._online, columns)
            shape = None if online is None else describe_quantised(online, sum(rows for _, rows in parts), columns)
        if shape is None or not ops.keeps_quantised(self._device, shape):
            return None
        return shape

    def describe_experts(
        self, shape: tuple[int, int, int], sources: Sequence[StackSource], dtype: torch.dtype
    ) -> QuantisedMatrix | None:
        """Return the quantised matrices [experts, n, k] that the parts form; None: they are loaded as `dtype`."""
        name = sources[0].name
        if name not in self._experts:
            self._experts[name] = self._describe_experts(shape, sources, dtype)
        return self._experts[name]

    def _describe_experts(
        self, shape: tuple[int, int, int], sources: Sequence[StackSource], dtype: torch.dtype
    ) -> QuantisedMatrix | None:
        infos = self._list_quantised([source.name for source in sources], dtype)
        if infos is None:
            return None
        count, n, k = shape
        if infos:
            described = [(self._describe(info), source.select) for info, source in zip(infos, sources, strict=True)]
            quantised = stack_experts_shape(shape, described)
            self._mixed += [source.name for source in sources] if quantised is None else []
        else:
            online = choose_online_format(self._online, k)
            quantised = None if online is None else split_experts(describe_quantised(online, count * n, k), count)
        if quantised is None or not ops.keeps_quantised(self._device, quantised):
            return None
        return quantised

    def log_mixed_parts(self) -> None:
        if self._mixed:
            reason = "parts of one matrix have several formats, or blocks that cross their edges"
            count, names = len(self._mixed), format_names(self._mixed)
            log.info("Weights dequantised: tensors=%d kept_as=bfloat16 reason=%r names=%s", count, reason, names)

    def _list_quantised(self, names: Sequence[str], dtype: torch.dtype) -> list[QuantisedTensorInfo] | None:
        """Return the tensors if all are quantised, [] if they are to be quantised at load, otherwise None."""
        if dtype is not torch.bfloat16 or not self._keeps_quantised:
            return None
        infos = [self._checkpoint.tensor_info(name) for name in names]
        quantised = [info for info in infos if isinstance(info, QuantisedTensorInfo)]
        if quantised and len(quantised) < len(infos):
            self._mixed += names
            return None
        return quantised if quantised or self._online else None

    def _describe(self, info: QuantisedTensorInfo) -> QuantisedMatrix:
        form = info.layout, info.format, tuple((part, t.dtype, t.shape) for part, t in info.parts.items())
        if form not in self._described:
            self._described[form] = describe_matrix(info)
        return self._described[form]


def align_parts(parts: Sequence[QuantisedMatrix]) -> list[QuantisedMatrix] | None:
    """Return the parts of a stacked matrix, all with zero points if one has them; None: they cannot be stacked.

    Parts can be stacked if they have the same format and order of columns, and whole groups of rows. On the meta
    device, the order is unknown and assumed to be the same."""
    first = parts[0]
    form = (first.kind, first.group_rows, first.group_columns, first.k, first.scales.dtype, first.columns is None)
    forms = {(p.kind, p.group_rows, p.group_columns, p.k, p.scales.dtype, p.columns is None) for p in parts}
    if forms != {form} or any(part.n % part.group_rows for part in parts[:-1]):
        return None
    has_values = first.codes.device.type != "meta"
    if has_values and first.columns is not None and not all(_has_columns(part, first.columns) for part in parts):
        return None
    if all(part.zeros is None for part in parts):
        return list(parts)
    return [
        replace(p, zeros=torch.full(p.scales.shape, INT4_ZERO, dtype=torch.uint8, device=p.codes.device))
        if p.zeros is None
        else p
        for p in parts
    ]


def _has_columns(matrix: QuantisedMatrix, columns: Tensor) -> bool:
    return matrix.columns is not None and torch.equal(matrix.columns, columns)


def stack_experts_shape(
    shape: tuple[int, ...], parts: Sequence[tuple[QuantisedMatrix, Callable[[Tensor], Tensor]]]
) -> QuantisedMatrix | None:
    """Return quantised matrices of `shape`, [experts, n, k], on the meta device; None: the parts cannot be stacked.

    `parts`: matrices, each with a function that returns the rows of a stacked tensor that the matrix fills."""
    count, n, k = shape
    first = parts[0][0]
    rows = torch.empty(count, n, 1, dtype=torch.uint8, device="meta")
    for matrix, select in parts:
        same = (matrix.kind, matrix.group_rows, matrix.group_columns, matrix.k, matrix.scales.dtype)
        if same != (first.kind, first.group_rows, first.group_columns, k, first.scales.dtype):
            return None
        if matrix.columns is not None or (matrix.zeros is None) != (first.zeros is None):
            return None
        has_all_rows = select(rows).numel() == matrix.codes.numel() // matrix.codes.shape[-1]
        if not has_all_rows or matrix.n % matrix.group_rows:
            return None

    def resize(part: Tensor, height: int) -> Tensor:
        return torch.empty(count, height, part.shape[-1], dtype=part.dtype, device="meta")

    row_scale = first.row_scale
    return replace(
        first,
        codes=resize(first.codes, n),
        scales=resize(first.scales, n // first.group_rows),
        zeros=None if first.zeros is None else resize(first.zeros, n),
        row_scale=None if row_scale is None else torch.empty(count, n, dtype=row_scale.dtype, device="meta"),
    )


def describe_quantised(weight_format: WeightFormat, rows: int, columns: int) -> QuantisedMatrix:
    """Return a matrix like those of `quantise_rows`, on the meta device."""
    kind = "fp8" if weight_format.name == "fp8" else "int4"
    group = weight_format.group_columns or columns
    codes = torch.empty(rows, columns * weight_format.bits // 8, dtype=torch.uint8, device="meta")
    dtype = torch.float32 if kind == "fp8" else torch.bfloat16
    scales = torch.empty(rows, columns // group, dtype=dtype, device="meta")
    return QuantisedMatrix("fp8" if kind == "fp8" else "int4", codes, scales, 1, group)


def split_experts(matrix: QuantisedMatrix, count: int) -> QuantisedMatrix:
    """Return a matrix that has the rows of all experts one after the other as `count` matrices."""
    codes, scales = (part.unflatten(0, (count, -1)) for part in (matrix.codes, matrix.scales))
    return replace(matrix, codes=codes, scales=scales)
