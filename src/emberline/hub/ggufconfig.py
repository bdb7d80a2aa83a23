"""Converts GGUF metadata to config.json, and GGUF tensor names to those of Hugging Face checkpoints."""

from __future__ import annotations

import math
import re
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.dequant import dequantise
from emberline.hub.gguf import GGUFFile
from emberline.hub.gguftokenizer import CONTROL

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Names of tensors that differ from those above.
OTHER_LAYER_TENSORS = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
NORM_OFFSETS = {"gemma3": 1.0}  # llama.cpp adds this to the norm weights of a checkpoint
GEMMA3_27B_LAYERS = 62
LAYER_NUMBER = re.compile(r"[0-9]{1,4}")
END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")  # that end a chat message
ROPE_FREQS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def checkpoint_tensor_name(gguf_name: str, architecture: str = "llama") -> str | None:
    """Return the checkpoint's name for a GGUF tensor, or None if the tensor becomes part of config.json."""
    layer_tensors = {**LAYER_TENSORS, **OTHER_LAYER_TENSORS.get(architecture, {})}
    if gguf_name == ROPE_FREQS:
        return None
    parts = gguf_name.split(".")
    if parts[-1] not in ("weight", "bias"):
        parts = []
    if len(parts) == 2 and parts[0] in TOP_TENSORS:
        return f"{TOP_TENSORS[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and LAYER_NUMBER.fullmatch(parts[1]) and parts[2] in layer_tensors:
        return f"model.layers.{int(parts[1])}.{layer_tensors[parts[2]]}.{parts[3]}"
    hint = f"supported architectures: {', '.join(ARCHITECTURES)}"
    raise UnsupportedModel(f"GGUF tensor {gguf_name!r} belongs to an unsupported architecture", hint=hint)


class GGUFMetadata:
    """Typed access to the metadata of a GGUF file.

    Raise ModelFileError if a value is missing or has the wrong type.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.arch = self.get_text("general.architecture")

    def get_text(self, key: str, default: str | None = None) -> str:
        return self._get(key, (str,), default)  # type: ignore[no-any-return]

    def get_integer(self, key: str, default: int | None = None) -> int:
        return self._get(f"{self.arch}.{key}", (int,), default)  # type: ignore[no-any-return]

    def get_number(self, key: str, default: float | None = None) -> float:
        return float(self._get(f"{self.arch}.{key}", (int, float), default))

    def special_token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if type(value) is int else None

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def _get(self, key: str, allowed_types: tuple[type, ...], default: Any) -> Any:
        value = self.metadata.get(key, default)
        if type(value) not in allowed_types or (isinstance(value, float) and not math.isfinite(value)):
            raise ModelFileError(
                f"the GGUF key {key!r} must have a value of type {allowed_types[-1].__name__}, not {str(value)[:80]!r}"
            )
        return value


def build_model_config(file: GGUFFile, torch_dtype: str) -> dict[str, Any]:
    fields = GGUFMetadata(file.metadata)
    if fields.arch not in ARCHITECTURES or fields.get_integer("expert_count", 0):
        raise UnsupportedModel(
            f"GGUF architecture {fields.arch!r} is not supported", hint=f"supported: dense {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path} has no token_embd.weight")
    name, model_type = ARCHITECTURES[fields.arch]
    heads, hidden = fields.get_integer("attention.head_count"), fields.get_integer("embedding_length")
    if heads < 1 or hidden < 1:
        raise ModelFileError(
            f"{file.path} must have at least one attention head and one hidden dimension, not {heads} and {hidden}"
        )
    head_dim = fields.get_integer("attention.key_length", hidden // heads)
    if (rotated := fields.get_integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(
            f"{file.path} applies rope to {rotated} of {head_dim} dimensions of a head, but must apply it to all"
        )
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.get_integer("feed_forward_length"),
        "num_hidden_layers": fields.get_integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get_integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get_integer("context_length"),
        "rms_norm_eps": _shortest_decimal(fields.get_number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_decimal(fields.get_number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, fields),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": torch_dtype,
        "bos_token_id": fields.special_token_id("bos"),
        "eos_token_id": fields.special_token_id("eos"),
    }
    if fields.has("attention.sliding_window"):
        config["sliding_window"] = fields.get_integer("attention.sliding_window")
        if fields.arch == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config if fields.arch != "gemma3" else {**config, **_build_gemma3_fields(fields, config)}


def _build_gemma3_fields(fields: GGUFMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that Gemma 3 has. A GGUF file lacks those that llama.cpp knows."""
    is_27b = config["num_hidden_layers"] == GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window_pattern": 6,
        "rope_theta": _shortest_decimal(fields.get_number("rope.freq_base", 1000000.0)),
        "rope_local_base_freq": _shortest_decimal(fields.get_number("rope.freq_base_swa", 10000.0)),
        "final_logit_softcapping": fields.get_number("final_logit_softcapping", 0.0) or None,
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


def _rope_scaling(file: GGUFFile, fields: GGUFMetadata) -> dict[str, Any] | None:
    factor = fields.get_number(
        "rope.scaling.factor", fields.get_number("rope.scale_linear", 0.0)
    )  # the second is older
    kind = fields.get_text(f"{fields.arch}.rope.scaling.type", "linear" if factor else "none")
    if ROPE_FREQS in file.tensors:
        return _detect_llama3_scaling(file, fields)
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


def _detect_llama3_scaling(file: GGUFFile, fields: GGUFMetadata) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope scaling. Raise UnsupportedModel if they are unusual.

    A GGUF file does not contain these parameters, only the frequency divisors that result from them. So the divisors in
    the file are compared with those of the usual parameters.
    """
    tensor = file.tensors[ROPE_FREQS]
    divisors = dequantise(file.raw_bytes(tensor), tensor.type.name, tensor.type.block_bytes)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_ROPE}
    expected = _llama3_divisors(scaling, fields.get_number("rope.freq_base", 10000.0), 2 * len(divisors))
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModel(f"the rope frequencies in {file.path} are not those of Llama 3")
    return scaling


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors


def _shortest_decimal(value: float) -> float:
    """Return the decimal number that a float32 was rounded from: 1e-05 instead of 9.99999974e-06."""
    return float(f"{value:.7g}")
