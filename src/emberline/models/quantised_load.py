"""make_quantised_matrix: makes a QuantisedMatrix from the tensors in which its publisher stores it, on any device.

On the meta device, the result has sizes and dtypes, but no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.kernels.quantised_matrix import MXFP4_COLUMNS, NVFP4_COLUMNS, QuantisedMatrix
from emberline.models.quantised_layouts import QuantisedComponent, QuantisedTensorInfo

STORED_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # for each of eight rows, the position of its code in a 32-bit word
NAN_EXPONENT = 255
MAX_PENDING_CHECKS = 1024  # each takes 512 bytes of a GPU's memory


class ValueChecks:
    """Checks of values on a device. On a CPU each is made at once. On a GPU the results of many are read together."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, ModelFileError]] = []

    def require(self, is_valid: Tensor, error: ModelFileError) -> None:
        """Raise the error now or later, at the latest in `finish`, unless `is_valid` (of no dimension) is true."""
        if is_valid.device.type == "cpu":
            if not is_valid:
                raise error
        elif is_valid.device.type != "meta":
            self._pending.append((is_valid, error))
            if len(self._pending) >= MAX_PENDING_CHECKS:
                self.finish()

    def finish(self) -> None:
        """Raise the error of the first check that failed."""
        pending, self._pending = self._pending, []
        if pending:
            results = torch.stack([is_valid for is_valid, _ in pending]).tolist()
            for is_valid, (_, error) in zip(results, pending, strict=True):
                if not is_valid:
                    raise error


def make_quantised_matrix(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    """Return the matrix. `tensors`: the parts of the matrix, with the dtypes of STORED_DTYPES.

    If scales or groups have invalid values, ModelFileError is raised, by this function or later by `checks`."""
    _check_scales(name, info, tensors, checks)
    _check_shape(name, info, tensors, checks)
    return CONVERTERS[info.layout](name, info, tensors, checks)


def describe_matrix(info: QuantisedTensorInfo) -> QuantisedMatrix:
    """Return a matrix on the meta device with the sizes and dtypes of the real one."""
    parts = {
        part: torch.empty(tensor.shape, dtype=STORED_DTYPES[tensor.dtype], device="meta")
        for part, tensor in info.parts.items()
    }
    return make_quantised_matrix("", info, parts, ValueChecks())


def _check_scales(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> None:
    """Check that scales are finite. A scale of 0 is valid: all weights of its group are 0."""
    scales, stored = tensors["scales"], info.parts["scales"]
    where = f"the scales of tensor {name!r} in {stored.file}"
    if info.format.name == "mxfp4":
        checks.require((scales != NAN_EXPONENT).all(), ModelFileError(f"{where} have a NaN"))
        return
    wide = scales.to(torch.float32)
    checks.require(torch.isfinite(wide).all(), ModelFileError(f"{where} have a value that is NaN or infinite"))
    whole = tensors.get("global_scale")
    if whole is not None:
        message = f"the global scale of tensor {name!r} in {stored.file} is NaN, infinite, or a divisor that is near 0"
        is_valid = torch.isfinite(whole) & (torch.isfinite(1 / whole) | (not info.divides_by_global_scale))
        checks.require(is_valid.all(), ModelFileError(message))


def _check_shape(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> None:
    if (stored := tensors.get("shape")) is not None and stored.device.type != "meta":
        error = ModelFileError(
            f"tensor {name!r} in {info.file} has the shape {info.shape}, but its weight_shape is another"
        )
        checks.require((stored == torch.tensor(info.shape, device=stored.device)).all(), error)


def _convert_blocks(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    return QuantisedMatrix("mxfp4", tensors["codes"].flatten(-2), tensors["scales"], 1, MXFP4_COLUMNS)


def _convert_fp8(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    """Return the matrix with unchanged scales of blocks, or with a scale for each row."""
    codes, scales, found = tensors["codes"].view(torch.uint8), tensors["scales"], info.format
    *experts, rows, columns = codes.shape
    if found.group_rows and found.group_columns:
        groups = (-(-rows // found.group_rows), -(-columns // found.group_columns))
        return QuantisedMatrix("fp8", codes, scales.reshape(*experts, *groups), found.group_rows, found.group_columns)
    each = scales.to(torch.float32).reshape(*experts, -1, 1).expand(*experts, rows, 1).contiguous()
    return QuantisedMatrix("fp8", codes, each, 1, columns)


def _convert_int4_rows(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    rows, columns = info.shape
    zeros = tensors.get("zeros")
    if zeros is not None:  # a word has the zero points of eight rows
        zeros = _transpose(_split_words(_transpose(zeros))[:, :rows])
    codes = tensors["codes"].view(torch.uint8)
    matrix = QuantisedMatrix("int4", codes, tensors["scales"], 1, info.format.group_columns or columns, zeros)
    return _sort_columns(name, info, matrix, tensors.get("groups"), checks)


def _convert_float4_rows(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    codes, scales = tensors["codes"], tensors["scales"]
    if (whole := tensors.get("global_scale")) is None:
        return QuantisedMatrix("mxfp4", codes, scales, 1, MXFP4_COLUMNS)
    whole = 1 / whole if info.divides_by_global_scale else whole
    rows = whole.reshape(1).expand(len(codes)).contiguous()
    return QuantisedMatrix("nvfp4", codes, scales, 1, NVFP4_COLUMNS, row_scale=rows)


def _convert_awq(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    places = torch.tensor(AWQ_PLACES, device=tensors["codes"].device)

    def split(words: Tensor) -> Tensor:
        codes = _split_words(words)
        return _transpose(codes.view(len(codes), -1, len(AWQ_PLACES))[:, :, places].flatten(1))

    zeros = tensors.get("zeros")
    return QuantisedMatrix(
        "int4",
        _join_halves(split(tensors["codes"])),
        _transpose(tensors["scales"]),
        1,
        info.format.group_columns or info.shape[1],
        None if zeros is None else split(zeros),
    )


def _convert_gptq(
    name: str, info: QuantisedTensorInfo, tensors: Mapping[QuantisedComponent, Tensor], checks: ValueChecks
) -> QuantisedMatrix:
    rows, columns = info.shape
    zeros = tensors.get("zeros")
    if zeros is not None:  # a stored 15 stands for 0 if the offset is 1
        zeros = (_transpose(_split_words(zeros)[:, :rows]) + info.zero_offset) & 15
    codes, scales = _transpose(tensors["codes"]).view(torch.uint8), _transpose(tensors["scales"])
    matrix = QuantisedMatrix("int4", codes, scales, 1, info.format.group_columns or columns, zeros)
    return _sort_columns(name, info, matrix, tensors.get("groups"), checks)


def _sort_columns(
    name: str, info: QuantisedTensorInfo, matrix: QuantisedMatrix, groups: Tensor | None, checks: ValueChecks
) -> QuantisedMatrix:
    """Return the matrix with its columns sorted by group. `groups`: the group of each column; None: already sorted."""
    if groups is None:
        return matrix
    columns = torch.argsort(groups, stable=True)
    expected = torch.arange(matrix.k, device=groups.device) // matrix.group_columns
    error = ModelFileError(
        f"the groups of columns of tensor {name!r} in {info.file} do not have {matrix.group_columns} columns each"
    )
    checks.require((groups[columns] == expected).all(), error)
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1).flatten(-2)
    return replace(matrix, codes=_join_halves(codes[:, columns]), columns=columns)


def _transpose(matrix: Tensor) -> Tensor:
    """Return a transposed copy. A `contiguous` call would keep the strides of a matrix with one row or column."""
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _split_words(words: Tensor) -> Tensor:
    """Split int32 words [m, n] into codes of four bits [m, 8 n], one in each byte, from the lowest bits on."""
    halves = words.view(torch.uint8)
    return torch.stack([halves & 15, halves >> 4], dim=-1).flatten(-2)


def _join_halves(codes: Tensor) -> Tensor:
    """Pack codes of four bits, one in each byte, into half as many bytes."""
    return codes[:, ::2] | codes[:, 1::2] << 4


CONVERTERS: Mapping[
    str, Callable[[str, QuantisedTensorInfo, Mapping[QuantisedComponent, Tensor], ValueChecks], QuantisedMatrix]
] = {
    "blocks": _convert_blocks,
    "fp8": _convert_fp8,
    "int4 rows": _convert_int4_rows,
    "float4 rows": _convert_float4_rows,
    "awq": _convert_awq,
    "gptq": _convert_gptq,
}
