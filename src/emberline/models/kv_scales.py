"""read_kv_factors: the scales of a float8 KV cache as factors of the weights of attention.

A checkpoint may say by which numbers keys and values are to be divided before they are rounded to float8. Rounded up to
powers of two, these divisions can be moved into the weights: those of keys and values are divided, and those of queries
and of the output projection are multiplied. This is exact, so no result changes but for the rounding of the cache, and
no kernel needs the scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil, isfinite, log2

from torch import Tensor

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.tensorfile import TensorInfo
from emberline.models.quantised_load import STORED_DTYPES

SCALE_NAMES = re.compile(r"(model\.layers\.\d+\.self_attn)\.(?:attn\.)?(?:([kv])_proj\.)?(?:([kv])_scale|output_scale)")
ReadBytes = Callable[[str, TensorInfo], Tensor]  # returns the flat bytes of a tensor


def read_kv_factors(stored: Mapping[str, TensorInfo], names: set[str], read: ReadBytes) -> dict[str, float]:
    """Return the factors by which weights of attention are multiplied, by tensor name.

    `stored`: the tensors of the files. `names`: those that the model loads. Raises ModelFileError for a scale that is
    not one positive number, UnsupportedModel if a layer's projections are not separate tensors."""
    factors: dict[str, float] = {}
    for name, info in stored.items():
        if (found := SCALE_NAMES.fullmatch(name)) is None or not (kind := found[2] or found[3]):
            continue
        at, factor = found[1], 2.0 ** ceil(log2(_read_scale(name, info, read)))
        pairs = {"k": ("q", "k"), "v": ("o", "v")}[kind]
        for projection, by in zip(pairs, (factor, 1 / factor), strict=True):
            norm = f"{at}.{projection}_norm.weight"
            if f"{at}.{projection}_proj.weight" not in names:
                raise UnsupportedModel(
                    f"{info.file} has the scale {name!r} of a float8 KV cache, but no tensor {at}.{projection}_proj",
                    hint="use --kv-dtype bfloat16, which needs no scales",
                )
            if norm in names:
                factors[norm] = by
            else:
                factors[f"{at}.{projection}_proj.weight"] = by
                factors |= {} if projection == "o" else {f"{at}.{projection}_proj.bias": by}
    return factors


def _read_scale(name: str, info: TensorInfo, read: ReadBytes) -> float:
    values = (
        [] if info.dtype not in STORED_DTYPES else read(name, info).clone().view(STORED_DTYPES[info.dtype]).tolist()
    )
    if len(values) != 1 or not isfinite(values[0]) or values[0] <= 0:
        raise ModelFileError(
            f"tensor {name!r} in {info.file} has the dtype {info.dtype}, the shape {info.shape} and the value"
            f" {str(values)[:40]}; a scale of a KV cache must be one positive number"
        )
    return float(values[0])
