"""Converts GGUF metadata to config.json and generation_config.json."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.dequant import dequantise
from emberline.hub.gguf_architectures import ROPE_FREQS, GGUFArchitecture
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_model import GGUFModel
from emberline.hub.gguftokenizer import CONTROL

END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")  # that end a chat message
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def build_model_config(model: GGUFModel, architecture: GGUFArchitecture, torch_dtype: str) -> dict[str, Any]:
    fields = GGUFMetadata(model.metadata)
    if "token_embd.weight" not in model.tensors:
        raise ModelFileError(f"{model.path} has no token_embd.weight")
    heads, hidden = fields.get_integer("attention.head_count"), fields.get_integer("embedding_length")
    if heads < 1 or hidden < 1:
        raise ModelFileError(
            f"{model.path} must have at least one attention head and one hidden dimension, not {heads} and {hidden}"
        )
    head_dim = fields.get_integer("attention.key_length", hidden // heads)
    if (rotated := fields.get_integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(
            f"{model.path} applies rope to {rotated} of {head_dim} dimensions of a head, but must apply it to all"
        )
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.get_integer("feed_forward_length"),
        "num_hidden_layers": fields.get_integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get_integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get_integer("context_length"),
        "rms_norm_eps": fields.get_decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get_decimal("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(model, fields),
        "vocab_size": model.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "torch_dtype": torch_dtype,
        "bos_token_id": fields.special_token_id("bos"),
        "eos_token_id": fields.special_token_id("eos"),
        **architecture.build_fields(fields),
    }


def build_generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    fields = GGUFMetadata(metadata)
    ends = [fields.special_token_id(key) for key in ("eos", "eot", "eom")] + _end_of_turn_ids(metadata)
    return {
        "bos_token_id": fields.special_token_id("bos"),
        "eos_token_id": list(dict.fromkeys(e for e in ends if e is not None)),
        "pad_token_id": fields.special_token_id("padding"),
    }


def _end_of_turn_ids(metadata: dict[str, Any]) -> list[int | None]:
    """Return the ids of well-known end-of-turn tokens. Older GGUF files do not list these tokens."""
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list | array):
        return []
    return [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in END_OF_TURN_TOKENS
    ]


def _rope_scaling(model: GGUFModel, fields: GGUFMetadata) -> dict[str, Any] | None:
    factor = fields.get_number(
        "rope.scaling.factor", fields.get_number("rope.scale_linear", 0.0)
    )  # the second is older
    kind = fields.get_text(f"{fields.arch}.rope.scaling.type", "linear" if factor else "none")
    if ROPE_FREQS in model.tensors:
        return _detect_llama3_scaling(model, fields)
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
    return scaling


def _detect_llama3_scaling(model: GGUFModel, fields: GGUFMetadata) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope scaling. Raise UnsupportedModel if they are unusual.

    A GGUF file does not contain these parameters, only the frequency divisors that result from them. So the divisors in
    the file are compared with those of the usual parameters.
    """
    tensor = model.tensors[ROPE_FREQS]
    divisors = dequantise(model.raw_bytes(tensor), tensor.type.name, tensor.type.block_bytes)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_ROPE}
    expected = _llama3_divisors(scaling, fields.get_number("rope.freq_base", 10000.0), 2 * len(divisors))
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModel(f"the rope frequencies in {model.path} are not those of Llama 3")
    return scaling


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors
