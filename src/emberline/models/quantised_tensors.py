"""select_model_tensors: the tensors that a model loads, with the parts of a quantised matrix joined to one.

Publishers store a quantised matrix as several tensors: its codes, the scales of its blocks, in one format its shape.
QuantisedTensorInfo describes them as the bfloat16 matrix that QuantisedMatrices (dequantise.py) makes of them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint, format_names
from emberline.hub.tensorfile import TensorInfo
from emberline.models.fields import ConfigFields
from emberline.models.textmodel import select_text_config, select_text_model
from emberline.models.weight_formats import WeightFormat, read_weight_format

KEPT_DTYPE = "BF16"
SCALE_DTYPES = ("F32", "BF16", "F16")
INT4_PER_WORD = 8
MXFP4_BLOCK_BYTES = 16


@dataclass(frozen=True)
class QuantisedTensorInfo(TensorInfo):
    """A matrix, or a matrix for each expert. Shape and dtype are those after dequantisation."""

    format: WeightFormat = field(kw_only=True)
    codes: TensorInfo = field(kw_only=True)
    scales: TensorInfo = field(kw_only=True)
    shape_tensor: TensorInfo | None = field(kw_only=True, default=None)  # has the shape of the matrix
    is_transposed: bool = field(kw_only=True, default=False)  # whether rows and columns of each matrix are exchanged


def read_loaded_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of the quantised matrices in a checkpoint; None: none are quantised.

    `config`: that of the language model. Raises UnsupportedModel if the format cannot be loaded."""
    fields = ConfigFields(config, "config.json")
    if not fields.values.get("quantization_config"):
        return None
    section = fields.section("quantization_config")
    found = read_weight_format(section)
    match section.text("quant_method"):
        case "fp8":
            _require(section, "weight_block_size", bool(found.group_rows and found.group_columns))
            _require(section, "activation_scheme", section.text("activation_scheme", "dynamic") == "dynamic")
            _require(section, "fmt", section.text("fmt", "e4m3") == "e4m3")
        case "compressed-tensors":
            weights = section.section("config_groups")
            weights = weights.section(next(iter(weights.values))).section("weights")
            _require(section, "format", section.text("format", "") == "pack-quantized")
            _require(weights, "num_bits", (found.name, found.group_rows) == ("int4", 1) and found.group_columns > 0)
            _require(weights, "symmetric", weights.flag("symmetric", True))
            _require(weights, "actorder", not weights.has_field("actorder"))
            _require(section, "kv_cache_scheme", not section.has_field("kv_cache_scheme"))
    return found


def _require(section: ConfigFields, name: str, is_supported: bool) -> None:
    if not is_supported:
        raise UnsupportedModel(
            f"{section.where}: {name} is {str(section.values.get(name))[:80]!r}, which is not supported",
            hint="supported: mxfp4, fp8 with weight_block_size, and symmetric int4 in groups (pack-quantized)",
        )


def select_model_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with only the tensors of the language model, under the names that the model loads.

    Raises ModelFileError, with a list, if quantised tensors lack scales."""
    selected = select_text_model(checkpoint)
    found = read_loaded_format(select_text_config(checkpoint.config))
    if found is None:
        return selected
    tensors, lacking = dict(selected.tensors), list[str]()
    for name, info in selected.tensors.items():
        joined = JOINERS[found.name](name, info, tensors, found, lacking)
        if joined is not None:
            tensors[joined[0]] = joined[1]
    if lacking:
        raise ModelFileError(
            f"{checkpoint.directory} lacks the scales of quantised tensors ({len(lacking)}): {format_names(lacking)}",
            hint="check that all files of the model are there",
        )
    return replace(selected, tensors=tensors)


Joined = tuple[str, QuantisedTensorInfo] | None


def _make_info(
    found: WeightFormat,
    codes: TensorInfo,
    scales: TensorInfo,
    shape: tuple[int, ...],
    *,
    shape_tensor: TensorInfo | None = None,
    is_transposed: bool = False,
) -> QuantisedTensorInfo:
    return QuantisedTensorInfo(
        KEPT_DTYPE,
        shape,
        codes.file,
        codes.offset,
        codes.nbytes,
        format=found,
        codes=codes,
        scales=scales,
        shape_tensor=shape_tensor,
        is_transposed=is_transposed,
    )


def _pop_scales(
    name: str, codes: TensorInfo, tensors: dict[str, TensorInfo], dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> TensorInfo | None:
    """Remove the scales from the tensors and return them; None: there are none."""
    scales = tensors.pop(name, None)
    if scales is not None and (scales.dtype not in dtypes or scales.shape != shape):
        raise ModelFileError(
            f"tensor {name!r} in {scales.file} has the dtype {scales.dtype} and the shape {scales.shape}; "
            f"the codes, of shape {codes.shape}, require {' or '.join(dtypes)} and {shape}"
        )
    return scales


def _join_mxfp4(
    name: str, info: TensorInfo, tensors: dict[str, TensorInfo], found: WeightFormat, lacking: list[str]
) -> Joined:
    """Join blocks [experts, rows, groups, 16] and scales [experts, rows, groups] to [experts, columns, rows]."""
    if not name.endswith("_blocks"):
        return None
    if info.dtype != "U8" or len(info.shape) != 4 or info.shape[3] != MXFP4_BLOCK_BYTES:
        raise _codes_error(name, info, f"U8 and a shape of four sizes that ends in {MXFP4_BLOCK_BYTES}")
    base = name.removesuffix("_blocks")
    scales = _pop_scales(f"{base}_scales", info, tensors, ("U8",), info.shape[:3])
    if scales is None:
        lacking.append(f"{base}_scales")
        return None
    del tensors[name]
    experts, rows, groups = info.shape[:3]
    return base, _make_info(found, info, scales, (experts, groups * found.group_columns, rows), is_transposed=True)


def _join_fp8(
    name: str, info: TensorInfo, tensors: dict[str, TensorInfo], found: WeightFormat, lacking: list[str]
) -> Joined:
    if info.dtype != "F8_E4M3" or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    shape = (-(-rows // found.group_rows), -(-columns // found.group_columns))
    scales = _pop_scales(f"{name}_scale_inv", info, tensors, SCALE_DTYPES, shape)
    if scales is None:
        lacking.append(f"{name}_scale_inv")
        return None
    return name, _make_info(found, info, scales, info.shape)


def _join_int4(
    name: str, info: TensorInfo, tensors: dict[str, TensorInfo], found: WeightFormat, lacking: list[str]
) -> Joined:
    if not name.endswith(".weight_packed"):
        return None
    if info.dtype != "I32" or len(info.shape) != 2 or info.shape[1] * INT4_PER_WORD % found.group_columns:
        raise _codes_error(name, info, f"I32 and rows of whole groups of {found.group_columns}")
    base, rows, columns = name.removesuffix("_packed"), info.shape[0], info.shape[1] * INT4_PER_WORD
    scales = _pop_scales(f"{base}_scale", info, tensors, SCALE_DTYPES, (rows, columns // found.group_columns))
    if scales is None:
        lacking.append(f"{base}_scale")
        return None
    del tensors[name]
    shape = tensors.pop(f"{base}_shape", None)
    if shape is not None and (shape.dtype not in ("I32", "I64") or shape.shape != (2,)):
        raise _codes_error(f"{base}_shape", shape, "I32 or I64 and the shape (2,)")
    return base, _make_info(found, info, scales, (rows, columns), shape_tensor=shape)


def _codes_error(name: str, info: TensorInfo, expected: str) -> ModelFileError:
    return ModelFileError(
        f"tensor {name!r} in {info.file} has the dtype {info.dtype} and the shape {info.shape}; it must have {expected}"
    )


JOINERS: Mapping[str, Callable[[str, TensorInfo, dict[str, TensorInfo], WeightFormat, list[str]], Joined]] = {
    "mxfp4": _join_mxfp4,
    "fp8": _join_fp8,
    "int4": _join_int4,
}
