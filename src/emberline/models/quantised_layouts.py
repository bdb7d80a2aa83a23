"""QuantisedTensorInfo: a quantised matrix, joined from the tensors in which its publisher stores it.

| layout | codes | other parts |
|---|---|---|
| blocks | X_blocks, uint8 [experts, rows, groups, 16] | X_scales |
| fp8 | X.weight, float8 e4m3 [n, k] | X.weight_scale_inv or X.weight_scale |
| int4 rows | X.weight_packed, int32 [n, k / 8] | weight_scale, weight_zero_point, weight_g_idx, weight_shape |
| float4 rows | X.weight_packed or X.weight, uint8 [n, k / 2] | weight_scale, weight_global_scale or weight_scale_2 |
| awq | X.qweight, int32 [k, n / 8] | qzeros, scales |
| gptq | X.qweight, int32 [k / 8, n] | qzeros, scales, g_idx |

Scales of activations are dropped. Shapes are checked here, before anything is read.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.tensorfile import TensorInfo
from emberline.models.quantisation_config import (
    CODES_PER_WORD,
    FP8_ROWS,
    FP8_TENSOR,
    METHODS_HINT,
    MXFP4,
    NVFP4,
    QuantisationConfig,
    WeightFormat,
)

KEPT_DTYPE = "BF16"
SCALE_DTYPES = ("F32", "BF16", "F16")
EXPONENT_DTYPES = ("U8", "F8_E8M0")
MXFP4_BLOCK_BYTES = 16
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_ub", "input_global_scale", "input_zero_point")
KV_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)

QuantisedLayout = Literal["blocks", "fp8", "int4 rows", "float4 rows", "awq", "gptq"]
QuantisedComponent = Literal["codes", "scales", "zeros", "global_scale", "groups", "shape"]


@dataclass(frozen=True)
class QuantisedTensorInfo(TensorInfo):
    """A matrix, or a matrix for each expert. Shape and dtype are those after dequantisation."""

    format: WeightFormat = field(kw_only=True)
    layout: QuantisedLayout = field(kw_only=True)
    parts: Mapping[QuantisedComponent, TensorInfo] = field(kw_only=True)
    zero_offset: int = field(kw_only=True, default=0)  # added to stored zero points
    divides_by_global_scale: bool = field(kw_only=True, default=False)

    @property
    def is_transposed(self) -> bool:
        """Whether each matrix is the transpose of its stored codes."""
        return self.layout == "blocks"

    @property
    def kept_bytes(self) -> int:
        """The bytes of the matrices if they stay quantised."""
        rows, columns = self.shape[-2:][:: -1 if self.is_transposed else 1]
        return prod(self.shape[:-2]) * self.format.kept_bytes(rows, columns)


class TensorJoiner:
    """Joins the tensors of a checkpoint to quantised matrices. It changes the mapping `tensors` in place."""

    def __init__(self, config: QuantisationConfig, tensors: dict[str, TensorInfo]) -> None:
        self.config = config
        self.tensors = tensors
        self.lacking: list[str] = []  # scales and zero points that are not there

    def join_all(self) -> None:
        for name in list(self.tensors):
            if name.endswith(KV_SCALES):
                del self.tensors[name]
        for name, info in list(self.tensors.items()):
            for suffix, join in self._joiners():
                if name not in self.tensors:  # it was joined to another tensor
                    break
                if name.endswith(suffix) and (joined := join(name, info, name.removesuffix(suffix))) is not None:
                    del self.tensors[name]
                    base, made = joined
                    self.tensors[base] = made
                    for scale in ACTIVATION_SCALES:
                        self.tensors.pop(f"{base.removesuffix('weight')}{scale}", None)
                    break

    def _joiners(self) -> Iterator[tuple[str, Callable[[str, TensorInfo, str], JoinedMatrix]]]:
        yield "", self._join_fp8
        match self.config.method:
            case "mxfp4":
                yield "_blocks", self._join_blocks
            case "compressed-tensors":
                yield "_packed", self._join_packed
            case "modelopt":
                yield ".weight", self._join_modelopt_float4
            case "awq":
                yield ".qweight", self._join_awq
            case "gptq":
                yield ".qweight", self._join_gptq

    def _join_blocks(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        """Join blocks [experts, rows, groups, 16] and scales [experts, rows, groups] to [experts, columns, rows]."""
        if info.dtype != "U8" or len(info.shape) != 4 or info.shape[3] != MXFP4_BLOCK_BYTES:
            raise _codes_error(name, info, f"U8 and a shape of four sizes that ends in {MXFP4_BLOCK_BYTES}")
        scales = self._pop(f"{base}_scales", info, EXPONENT_DTYPES, [info.shape[:3]])
        if scales is None:
            return None
        experts, rows, groups = info.shape[:3]
        shape = (experts, groups * MXFP4.group_columns, rows)
        return base, _make_info("blocks", MXFP4, shape, {"codes": info, "scales": scales})

    def _join_fp8(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        if info.dtype != "F8_E4M3" or len(info.shape) not in (2, 3) or name.endswith(("_scale", "_scale_inv")):
            return None
        *experts, rows, columns = info.shape
        candidates = self._candidates(name, "fp8")
        names = [each for each in (f"{name}_scale_inv", f"{name}_scale") if each in self.tensors]
        found = self.tensors[names[0]].shape if names else ()
        accepted = {
            tuple(shape): each for each in candidates for shape in _fp8_scale_shapes(each, experts, rows, columns)
        }
        wanted = names[0] if names else f"{name}_scale_inv" if candidates[0].group_columns else f"{name}_scale"
        scales = self._pop(wanted, info, SCALE_DTYPES, list(accepted))
        if scales is None:
            return None
        return name, _make_info("fp8", accepted[found], info.shape, {"codes": info, "scales": scales})

    def _join_packed(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        if info.dtype == "U8":
            return self._join_float4(name, info, base, f"{base}_global_scale", divides=True)
        found = self._choose_int4(name, base, info, (info.shape[0], info.shape[-1] * CODES_PER_WORD))
        rows, columns = info.shape[0], info.shape[1] * CODES_PER_WORD
        groups = columns // (found.group_columns or columns)
        parts = self._pop_parts(
            info,
            {
                "scales": (f"{base}_scale", SCALE_DTYPES, [(rows, groups)]),
                "zeros": (f"{base}_zero_point", ("I32",), [(-(-rows // CODES_PER_WORD), groups)]),
            },
            has_zeros=found.zero_bits > 0,
        )
        groups_of_columns = self._pop(f"{base}_g_idx", info, ("I32", "I64"), [(columns,)], is_optional=True)
        shape = self._pop(f"{base}_shape", info, ("I32", "I64"), [(2,)], is_optional=True)
        if parts is None:
            return None
        optional: dict[QuantisedComponent, TensorInfo | None] = {"groups": groups_of_columns, "shape": shape}
        parts |= {part: tensor for part, tensor in optional.items() if tensor is not None}
        return base, _make_info("int4 rows", found, (rows, columns), parts)

    def _join_modelopt_float4(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        if info.dtype != "U8":
            return None
        return self._join_float4(name, info, name, f"{name}_scale_2", divides=False)

    def _join_float4(self, name: str, info: TensorInfo, base: str, global_name: str, *, divides: bool) -> JoinedMatrix:
        """Join rows of codes of four bits. The dtype of the scales tells nvfp4 from mxfp4."""
        scale = self.tensors.get(f"{base}_scale")
        found = MXFP4 if scale is not None and scale.dtype in EXPONENT_DTYPES else NVFP4
        self._candidates(name, found.name)
        if len(info.shape) != 2 or info.shape[1] * 2 % found.group_columns:
            raise _codes_error(name, info, f"U8 and rows of whole groups of {found.group_columns} codes")
        rows, columns = info.shape[0], info.shape[1] * 2
        dtypes = EXPONENT_DTYPES if found is MXFP4 else ("F8_E4M3",)
        parts: dict[QuantisedComponent, TensorInfo] = {"codes": info}
        scales = self._pop(f"{base}_scale", info, dtypes, [(rows, columns // found.group_columns)])
        if found is NVFP4:
            whole = self._pop(global_name, info, ("F32",), [(), (1,)])
            if whole is None:
                return None
            parts["global_scale"] = whole
        if scales is None:
            return None
        parts["scales"] = scales
        made = _make_info("float4 rows", found, (rows, columns), parts)
        return base, replace(made, divides_by_global_scale=divides)

    def _join_awq(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        """Join codes [k, n / 8], zero points [groups, n / 8] and scales [groups, n]."""
        columns, words = _two_sizes(name, info)
        rows = words * CODES_PER_WORD
        found = self._choose_int4(name, base, info, (rows, columns))
        groups = columns // (found.group_columns or columns)
        wanted: dict[QuantisedComponent, ExpectedTensor] = {
            "scales": (f"{base}.scales", SCALE_DTYPES, [(groups, rows)]),
            "zeros": (f"{base}.qzeros", ("I32",), [(groups, words)]),
        }
        parts = self._pop_parts(info, wanted, has_zeros=found.zero_bits > 0)
        return None if parts is None else (f"{base}.weight", _make_info("awq", found, (rows, columns), parts))

    def _join_gptq(self, name: str, info: TensorInfo, base: str) -> JoinedMatrix:
        """Join codes [k / 8, n], zero points [groups, n / 8], scales [groups, n] and the group of each column [k]."""
        words, rows = _two_sizes(name, info)
        columns = words * CODES_PER_WORD
        found = self._choose_int4(name, base, info, (rows, columns))
        groups = columns // (found.group_columns or columns)
        wanted: dict[QuantisedComponent, ExpectedTensor] = {
            "scales": (f"{base}.scales", SCALE_DTYPES, [(groups, rows)]),
            "zeros": (f"{base}.qzeros", ("I32",), [(groups, -(-rows // CODES_PER_WORD))]),
        }
        parts = self._pop_parts(info, wanted, has_zeros=found.zero_bits > 0)
        has_order = any(scheme.has_column_order for scheme in self.config.schemes)
        order = self._pop(f"{base}.g_idx", info, ("I32", "I64"), [(columns,)], is_optional=not has_order)
        if parts is None:
            return None
        if has_order and order is not None:
            parts["groups"] = order
        made = _make_info("gptq", found, (rows, columns), parts)
        return f"{base}.weight", replace(made, zero_offset=self.config.zero_offset)

    def _choose_int4(self, name: str, base: str, info: TensorInfo, shape: tuple[int, int]) -> WeightFormat:
        """Return the config's int4 format that fits the columns and the stored scales, or the first if none does."""
        candidates, columns = self._candidates(name, "int4"), shape[1]
        if info.dtype != "I32" or len(info.shape) != 2:
            raise _codes_error(name, info, "I32 and two dimensions")
        stored = self.tensors.get(f"{base}_scale") or self.tensors.get(f"{base}.scales")
        numbers = 0 if stored is None else prod(stored.shape)
        for found in candidates:
            if not columns % (found.group_columns or columns) and numbers == shape[0] * (
                columns // (found.group_columns or columns)
            ):
                return found
        if columns % (candidates[0].group_columns or columns):
            raise _codes_error(name, info, f"rows of whole groups of {candidates[0].group_columns}")
        return candidates[0]

    def _candidates(self, name: str, kind: str) -> list[WeightFormat]:
        """Return the config's formats of this kind, first the one that it gives for the module of tensor `name`."""
        own = self.config.find_format(name.rpartition(".")[0])
        formats = dict.fromkeys([*([own] if own is not None else []), *(s.format for s in self.config.schemes)])
        found = [each for each in formats if each.name == kind]
        if not found:
            described = ", ".join(self.config.names)
            raise UnsupportedModel(
                f"tensor {name!r} has {kind} codes, but quantization_config describes {described}", hint=METHODS_HINT
            )
        return found

    def _pop_parts(
        self, codes: TensorInfo, wanted: Mapping[QuantisedComponent, ExpectedTensor], *, has_zeros: bool
    ) -> dict[QuantisedComponent, TensorInfo] | None:
        """Remove scales and zero points from the tensors, and return the parts of the matrix; None: some are missing.

        Zero points are used only with `has_zeros`."""
        scales = self._pop(wanted["scales"][0], codes, *wanted["scales"][1:])
        zeros = self._pop(wanted["zeros"][0], codes, *wanted["zeros"][1:], is_optional=not has_zeros)
        if scales is None or (has_zeros and zeros is None):
            return None
        parts: dict[QuantisedComponent, TensorInfo] = {"codes": codes, "scales": scales}
        return parts if zeros is None or not has_zeros else parts | {"zeros": zeros}

    def _pop(
        self,
        name: str,
        codes: TensorInfo,
        dtypes: tuple[str, ...],
        shapes: list[tuple[int, ...]],
        *,
        is_optional: bool = False,
    ) -> TensorInfo | None:
        """Remove tensor `name` from the tensors and return it; None: there is no such tensor."""
        part = self.tensors.pop(name, None)
        if part is None and not is_optional:
            self.lacking.append(name)
        if part is not None and (part.dtype not in dtypes or part.shape not in shapes):
            raise ModelFileError(
                f"tensor {name!r} in {part.file} has the dtype {part.dtype} and the shape {part.shape}; the codes, of"
                f" shape {codes.shape}, require {' or '.join(dtypes)} and {' or '.join(map(str, shapes))}"
            )
        return part


ExpectedTensor = tuple[str, tuple[str, ...], list[tuple[int, ...]]]  # name, dtypes and shapes of a part
JoinedMatrix = tuple[str, QuantisedTensorInfo] | None  # name and description of a matrix


def _fp8_scale_shapes(found: WeightFormat, experts: list[int], rows: int, columns: int) -> list[tuple[int, ...]]:
    if found.group_rows and found.group_columns:
        groups = (-(-rows // found.group_rows), -(-columns // found.group_columns))
        return [(*experts, *groups), (*experts, groups[0], 1, groups[1], 1)]
    each = [(*experts, rows, 1), (*experts, rows)]
    if found == FP8_ROWS:
        return each
    assert found == FP8_TENSOR
    return [(), (1,), (1, 1), *each] if not experts else [tuple(experts), (*experts, 1), (*experts, 1, 1), *each]


def _two_sizes(name: str, info: TensorInfo) -> tuple[int, int]:
    if info.dtype != "I32" or len(info.shape) != 2:
        raise _codes_error(name, info, "I32 and two dimensions")
    return info.shape[0], info.shape[1]


def _make_info(
    layout: QuantisedLayout, found: WeightFormat, shape: tuple[int, ...], parts: Mapping[QuantisedComponent, TensorInfo]
) -> QuantisedTensorInfo:
    codes = parts["codes"]
    return QuantisedTensorInfo(
        KEPT_DTYPE, shape, codes.file, codes.offset, codes.nbytes, format=found, layout=layout, parts=parts
    )


def _codes_error(name: str, info: TensorInfo, expected: str) -> ModelFileError:
    return ModelFileError(
        f"tensor {name!r} in {info.file} has the dtype {info.dtype} and the shape {info.shape}; it must have {expected}"
    )
