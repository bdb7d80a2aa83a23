"""build_rope_scaling: the scaling of rotary embeddings in a GGUF file, as config.json describes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.dequant import dequantise
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_model import GGUFModel

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCOUT_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}


def build_rope_scaling(
    model: GGUFModel, fields: GGUFMetadata, build_yarn_fields: Callable[[GGUFMetadata], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the field rope_scaling of config.json. `build_yarn_fields`: returns the fields that yarn also needs."""
    factor = fields.get_number(
        "rope.scaling.factor", fields.get_number("rope.scale_linear", 0.0)
    )  # the second is older
    kind = fields.get_text(f"{fields.arch}.rope.scaling.type", "linear" if factor else "none")
    if ROPE_FREQS in model.tensors:
        return _detect_llama3_scaling(model, fields)
    if LONG_FACTORS in model.tensors:
        return _build_longrope(model, fields)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not supported", hint="supported: none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if fields.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = fields.get_integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if fields.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = fields.get_number(f"rope.scaling.yarn_{name}")
    if fields.has("rope.scaling.attn_factor"):  # a multiple of the default; config.json has the product
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        scaling["attention_factor"] = fields.get_number("rope.scaling.attn_factor") * usual
    if fields.has("rope.scaling.yarn_attn_factor"):  # config.json's own value
        scaling["attention_factor"] = fields.get_decimal("rope.scaling.yarn_attn_factor")
    return {**scaling, **build_yarn_fields(fields)}


def _build_longrope(model: GGUFModel, fields: GGUFMetadata) -> dict[str, Any]:
    long, short = (
        [float(f"{value:.7g}") for value in _read_vector(model, name)] for name in (LONG_FACTORS, SHORT_FACTORS)
    )
    original = fields.get_integer("rope.scaling.original_context_length")
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    scaling["original_max_position_embeddings"] = original
    ratio = max(1.0, fields.get_integer("context_length") / max(1, original))
    usual = math.sqrt(1 + math.log(ratio) / math.log(max(2, original)))
    attention = fields.get_number("rope.scaling.attn_factor", usual)
    return scaling if math.isclose(attention, usual, rel_tol=1e-6) else scaling | {"attention_factor": attention}


def _read_vector(model: GGUFModel, name: str) -> NDArray[np.float32]:
    if name not in model.tensors:
        raise ModelFileError(f"{model.path} has no tensor {name}")
    tensor = model.tensors[name]
    return dequantise(model.raw_bytes(tensor), tensor.type.name, tensor.type.block_bytes)


def _detect_llama3_scaling(model: GGUFModel, fields: GGUFMetadata) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope scaling. Raise UnsupportedModel if they are unusual.

    A GGUF file does not contain these parameters, only the frequency divisors that result from them. So the divisors in
    the file are compared with those of the usual parameters, of Llama 3 and of Llama 4 Scout.
    """
    divisors = _read_vector(model, ROPE_FREQS)
    for usual in (LLAMA3_ROPE, SCOUT_ROPE):
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **usual}
        expected = _llama3_divisors(scaling, fields.get_number("rope.freq_base", 10000.0), 2 * len(divisors))
        if np.allclose(divisors, expected, rtol=1e-3):
            return scaling
    raise UnsupportedModel(f"the rope frequencies in {model.path} are neither those of Llama 3 nor of Llama 4 Scout")


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0) if high > low else (rotations >= low).astype(float)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors
