"""slice_tensor: describes which bytes of a file have a rank's part of a stored tensor.

A part that is contiguous in its file is described as a shorter tensor, other parts by a TensorSlice. Quantised weights
are cut at the edges of the groups that share a scale, or of the blocks of a GGUF file.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import DTYPE_BYTES, TensorInfo, TensorSlice
from emberline.models.quantisation_config import CODES_PER_WORD
from emberline.models.quantised_layouts import MXFP4_BLOCK_BYTES, QuantisedComponent, QuantisedTensorInfo

CODES_PER_BYTE = 2  # of four bits


class DimensionSlice(NamedTuple):
    """The part of a tensor's dimension that a rank has."""

    dimension: int
    size: int  # of the whole dimension
    ranges: tuple[tuple[int, int], ...]  # (begin, end)

    @property
    def num_kept(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


class Axis(NamedTuple):
    """A dimension of a stored tensor: the matrix dimension that it stores, and the matrix elements per stored entry."""

    dimension: int
    unit: int = 1


def slice_tensor(name: str, info: TensorInfo, slices: Sequence[DimensionSlice]) -> TensorInfo:
    """Return a part of a tensor.

    Raises UnsupportedModel if a group of quantised weights would be divided, and ModelFileError if a dimension of the
    tensor has not the size that its slice expects. If two dimensions are sliced, the first of them must be dimension 0,
    with one range."""
    for span in slices:
        if info.shape[span.dimension] != span.size:
            raise ModelFileError(
                f"tensor {name!r} in {info.file} has the shape {info.shape}; "
                f"config.json requires {span.size} in dimension {span.dimension}"
            )
    slices = [span for span in slices if span.num_kept < span.size]
    if not slices:
        return info
    if isinstance(info, QuantisedTensorInfo):
        return _slice_quantised(name, info, slices)
    if isinstance(info, GGUFTensorInfo):
        return _slice_gguf(name, info, slices)
    return _slice_stored(info, info.shape, slices, DTYPE_BYTES[info.dtype])


def _slice_stored(
    info: TensorInfo, stored_shape: tuple[int, ...], slices: Sequence[DimensionSlice], element_bytes: int
) -> TensorInfo:
    """Return a part of a tensor whose stored elements have this shape and size."""
    *outer, last = sorted(slices)
    inner = prod(stored_shape[last.dimension + 1 :]) * element_bytes
    record_bytes, num_records, first = last.size * inner, prod(stored_shape[: last.dimension]), 0
    for whole in outer:
        assert whole.dimension == 0 and len(whole.ranges) == 1
        records = num_records // whole.size
        first, num_records = whole.ranges[0][0] * records, whole.num_kept * records
    ranges = tuple((begin * inner, end * inner) for begin, end in last.ranges)
    part = replace(info, shape=_slice_shape(info.shape, slices))
    stored_slice = TensorSlice(info.shape, record_bytes, first, num_records, ranges)
    if info.packing is not None:  # the checksums cover the whole tensor
        return replace(part, stored_slice=stored_slice)
    start = info.offset + first * record_bytes
    if num_records == 1 and len(ranges) == 1:
        return replace(part, offset=start + ranges[0][0], nbytes=ranges[0][1] - ranges[0][0])
    return replace(
        part, offset=start, nbytes=num_records * record_bytes, stored_slice=replace(stored_slice, first_record=0)
    )


def _slice_shape(shape: tuple[int, ...], slices: Sequence[DimensionSlice]) -> tuple[int, ...]:
    parts = {span.dimension: span.num_kept for span in slices}
    return tuple(parts.get(dimension, size) for dimension, size in enumerate(shape))


def _slice_gguf(name: str, info: GGUFTensorInfo, slices: Sequence[DimensionSlice]) -> GGUFTensorInfo:
    if info.latent_values is not None:
        return _slice_latents(info, slices)
    last, kind, heads = len(info.shape) - 1, info.block_type, info.rotary_heads
    units = [span for span in slices if span.dimension != last]
    units += [_divide_units(name, span, kind.block_elements, "block") for span in slices if span.dimension == last]
    row_units = (*info.shape[:-1], info.shape[-1] // kind.block_elements)
    part = _slice_stored(info, row_units, units, kind.block_bytes)
    assert isinstance(part, GGUFTensorInfo)
    part = replace(part, shape=_slice_shape(info.shape, slices))
    rows = next((span for span in slices if span.dimension == max(0, last - 1)), None)
    if not heads or rows is None:
        return part
    assert len(rows.ranges) == 1, "rows in rotary order are cut by heads"
    return replace(part, rotary_heads=heads * rows.num_kept // rows.size)


def _slice_latents(info: GGUFTensorInfo, slices: Sequence[DimensionSlice]) -> GGUFTensorInfo:
    """Return the kept heads of the keys and values of latent attention. Heads are stored one after the other."""
    (span,), values = slices, info.latent_values
    assert values is not None and span.dimension == 0 and len(span.ranges) == 1
    begin, end = (row * values.shape[0] // span.size for row in span.ranges[0])

    def select(part: GGUFTensorInfo) -> GGUFTensorInfo:
        each = part.nbytes // values.shape[0]
        return replace(part, offset=part.offset + begin * each, nbytes=(end - begin) * each)

    kept = replace(select(values), shape=(end - begin, *values.shape[1:]))
    return replace(select(info), shape=_slice_shape(info.shape, slices), latent_values=kept)


def _slice_quantised(name: str, info: QuantisedTensorInfo, slices: Sequence[DimensionSlice]) -> QuantisedTensorInfo:
    parts: dict[QuantisedComponent, TensorInfo] = {}
    for part, stored in sorted(info.parts.items(), key=lambda item: item[0] != "scales"):  # to name groups in errors
        if part == "shape":  # it is that of the whole matrix
            continue
        axes = enumerate(_list_axes(info, part))
        found = [
            (place, span, axis.unit) for place, axis in axes for span in slices if span.dimension == axis.dimension
        ]
        if part == "groups" and found:
            raise UnsupportedModel(
                f"tensor {name!r} cannot be divided among ranks by columns: with act order, a "
                f"group of {info.format.group_columns} columns may be on several ranks",
                hint="use one rank, or a checkpoint without act order",
            )
        divided = [_divide_units(name, span, unit, "group")._replace(dimension=place) for place, span, unit in found]
        parts[part] = _slice_stored(stored, stored.shape, divided, DTYPE_BYTES[stored.dtype]) if divided else stored
    return replace(info, shape=_slice_shape(info.shape, slices), parts=parts)


def _divide_units(name: str, span: DimensionSlice, unit: int, what: str) -> DimensionSlice:
    """Return a slice counted in units of `unit` elements. Raises UnsupportedModel if it would divide a unit."""
    for begin, end in span.ranges:
        if begin % unit or (end % unit and end != span.size):
            raise UnsupportedModel(
                f"tensor {name!r} cannot be divided among ranks: a part from {begin} to {end} of {span.size} "
                f"would divide a {what} of {unit} weights",
                hint="use fewer ranks",
            )
    ranges = tuple((begin // unit, -(-end // unit)) for begin, end in span.ranges)
    return DimensionSlice(span.dimension, -(-span.size // unit), ranges)


def _list_axes(info: QuantisedTensorInfo, part: QuantisedComponent) -> list[Axis]:
    """Return the axes of a stored tensor (codes, scales, ..). Dimension -1 marks one that is never cut."""
    first, group = len(info.shape) - 2, info.format.group_columns
    experts = [Axis(dimension) for dimension in range(first)]
    rows, columns = (first + 1, first) if info.is_transposed else (first, first + 1)
    by_group = Axis(columns, group) if group else Axis(-1)
    if info.layout == "fp8":
        return experts + (_list_fp8_axes(info, part, rows, columns))
    tables: Mapping[str, Mapping[QuantisedComponent, list[Axis]]] = {
        "blocks": {
            "codes": [*experts, Axis(rows), Axis(columns, 2 * MXFP4_BLOCK_BYTES)],
            "scales": [*experts, Axis(rows), Axis(columns, 2 * MXFP4_BLOCK_BYTES)],
        },
        "int4 rows": {
            "codes": [Axis(rows), Axis(columns, CODES_PER_WORD)],
            "scales": [Axis(rows), by_group],
            "zeros": [Axis(rows, CODES_PER_WORD), by_group],
        },
        "float4 rows": {"codes": [Axis(rows), Axis(columns, CODES_PER_BYTE)], "scales": [Axis(rows), by_group]},
        "awq": {
            "codes": [Axis(columns), Axis(rows, CODES_PER_WORD)],
            "scales": [by_group, Axis(rows)],
            "zeros": [by_group, Axis(rows, CODES_PER_WORD)],
        },
        "gptq": {
            "codes": [Axis(columns, CODES_PER_WORD), Axis(rows)],
            "scales": [by_group, Axis(rows)],
            "zeros": [by_group, Axis(rows, CODES_PER_WORD)],
        },
    }
    return [Axis(columns)] if part == "groups" else tables[info.layout].get(part, [])


def _list_fp8_axes(info: QuantisedTensorInfo, part: QuantisedComponent, rows: int, columns: int) -> list[Axis]:
    """Return the axes of codes or scales (of blocks, rows or the whole matrix), without the axis of experts."""
    if part == "codes":
        return [Axis(rows), Axis(columns)]
    found, shape = info.format, info.parts[part].shape[len(info.shape) - 2 :]
    if found.group_rows and found.group_columns:
        by_rows, by_columns = Axis(rows, found.group_rows), Axis(columns, found.group_columns)
        return [by_rows, by_columns] if len(shape) == 2 else [by_rows, Axis(-1), by_columns]
    return [Axis(rows)] if shape[:1] == (info.shape[rows],) and shape[0] > 1 else []
