"""Converts GGUF metadata to config.json and generation_config.json."""

from __future__ import annotations

import math
from array import array
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.gguf_architectures import GGUFArchitecture
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_model import GGUFModel
from emberline.hub.gguf_rope import build_rope_scaling
from emberline.hub.gguftokenizer import CONTROL

END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")  # that end a chat message
QK_NORM = "blk.0.attn_q_norm.weight"
# From the keys in which llama.cpp stores the publisher's sampling parameters to the names in generation_config.json.
SAMPLING_FIELDS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


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
    if head_dim < 1:
        raise ModelFileError(f"{model.path} has attention heads of {head_dim} dimensions; they must have at least one")
    rotated = fields.get_integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not architecture.has_partial_rope:
        raise UnsupportedModel(
            f"{model.path} applies rope to {rotated} of {head_dim} dimensions of a head, but must apply it to all"
        )
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.get_integer("feed_forward_length"),
        # The last blocks may be for multi-token prediction, which is not converted.
        "num_hidden_layers": fields.get_integer("block_count") - fields.get_integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get_integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get_integer("context_length"),
        **_build_norm_fields(fields, architecture),
        "rope_theta": fields.get_decimal("rope.freq_base", 10000.0),
        "rope_scaling": build_rope_scaling(model, fields, architecture.build_yarn_fields),
        "vocab_size": model.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        architecture.bias_field: "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "torch_dtype": torch_dtype,
        "bos_token_id": fields.special_token_id("bos"),
        "eos_token_id": fields.special_token_id("eos"),
        **({architecture.qk_norm_field: QK_NORM in model.tensors} if architecture.qk_norm_field else {}),
        **architecture.build_fields(fields),
    }


def _build_norm_fields(fields: GGUFMetadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    if architecture.has_layer_norms:
        return {"layer_norm_eps": fields.get_decimal("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": fields.get_decimal("attention.layer_norm_rms_epsilon")}


def build_generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    fields = GGUFMetadata(metadata)
    ends = [fields.special_token_id(key) for key in ("eos", "eot", "eom")] + _end_of_turn_ids(metadata)
    return {
        "bos_token_id": fields.special_token_id("bos"),
        "eos_token_id": list(dict.fromkeys(e for e in ends if e is not None)),
        "pad_token_id": fields.special_token_id("padding"),
        **_build_sampling_fields(metadata),
    }


def _build_sampling_fields(metadata: dict[str, Any]) -> dict[str, float]:
    """Return the publisher's sampling parameters. Values that are not finite numbers are left out."""
    found: dict[str, float] = {}
    for key, name in SAMPLING_FIELDS.items():
        value = metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
        elif isinstance(value, float) and math.isfinite(value):
            found[name] = float(f"{value:.7g}")
    return found


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
