"""The GGUF architectures that can be converted, and the names of their tensors in Hugging Face checkpoints.

An architecture is one entry of ARCHITECTURES: its class, the names of tensors that differ from Llama's, and a function
that returns the fields of config.json that not all architectures have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.gguf import GGUFTensor
from emberline.hub.gguf_metadata import GGUFMetadata

ROPE_FREQS = "rope_freqs.weight"
GEMMA3_27B_LAYERS = 62
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
TENSOR_NAME_PATTERN = re.compile(
    r"(?:blk\.(?P<layer>[0-9]{1,4})\.)?(?P<name>[a-z_]+)(?:\.(?P<expert>[0-9]{1,4}))?\.(?P<kind>weight|bias)"
)


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture of experts in a checkpoint's layer. `{}` is the number of an expert."""

    router: str
    gate: str
    up: str
    down: str

    def find(self, gguf_name: str) -> str | None:
        """Return the pattern of a tensor that holds all experts, as ffn_gate_exps does, or of one expert's."""
        return {"ffn_gate": self.gate, "ffn_up": self.up, "ffn_down": self.down}.get(gguf_name.removesuffix("_exps"))


def _no_fields(fields: GGUFMetadata) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFArchitecture:
    class_name: str  # in transformers
    model_type: str
    has_rotary_pairs: bool = False  # rows of q and k are stored with the two halves of a rotation side by side
    experts: ExpertNames | None = None
    other_tensors: Mapping[str, str] = field(default_factory=dict)  # names that Llama does not have, or has differently
    norm_offset: float = 0.0  # llama.cpp adds this to the norm weights of a checkpoint
    build_fields: Callable[[GGUFMetadata], dict[str, Any]] = _no_fields  # of config.json

    def list_checkpoint_tensors(self, tensor: GGUFTensor) -> list[tuple[str, GGUFTensor]]:
        """Return the checkpoint's tensors, with their names, that a GGUF tensor holds: one, or one for each expert.

        The result is empty for a tensor that becomes part of config.json. Raise UnsupportedModel for an unknown tensor.
        """
        if tensor.name == ROPE_FREQS:
            return []
        match = TENSOR_NAME_PATTERN.fullmatch(tensor.name)
        if match is not None and match["layer"] is None:
            if match["name"] in TOP_TENSORS and match["expert"] is None:
                return [(f"{TOP_TENSORS[match['name']]}.{match['kind']}", tensor)]
        elif match is not None:
            prefix = f"model.layers.{int(match['layer'])}"
            if found := self._list_layer_tensors(tensor, match["name"], match["expert"]):
                return [(f"{prefix}.{name}.{match['kind']}", part) for name, part in found]
        hint = f"supported architectures: {', '.join(ARCHITECTURES)}"
        raise UnsupportedModel(f"GGUF tensor {tensor.name!r} is not known for {self.model_type}", hint=hint)

    def _list_layer_tensors(self, tensor: GGUFTensor, name: str, expert: str | None) -> list[tuple[str, GGUFTensor]]:
        experts = self.experts
        if experts is not None:
            if name == "ffn_gate_inp" and expert is None:
                return [(experts.router, tensor)]
            pattern = experts.find(name)
            if pattern is not None and expert is not None:  # files of 2023 have a tensor for each expert
                return [(pattern.format(int(expert)), tensor)]
            if pattern is not None and name.endswith("_exps"):
                return [(pattern.format(i), part) for i, part in enumerate(_split_experts(tensor))]
        known = {**LAYER_TENSORS, **self.other_tensors}
        return [(known[name], tensor)] if name in known and expert is None else []


def _split_experts(tensor: GGUFTensor) -> list[GGUFTensor]:
    """Return the matrices of a tensor with three dimensions, the first of which is the number of the expert."""
    if len(tensor.shape) != 3:
        raise ModelFileError(f"GGUF tensor {tensor.name!r} must have three dimensions, not the shape {tensor.shape}")
    count, size = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    return [replace(tensor, shape=tensor.shape[1:], start=tensor.start + i * size, nbytes=size) for i in range(count)]


def _build_sliding_window(fields: GGUFMetadata) -> dict[str, Any]:
    if not fields.has("attention.sliding_window"):
        return {}
    return {"sliding_window": fields.get_integer("attention.sliding_window")}


def _build_mixtral_fields(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_local_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        **_build_sliding_window(fields),
    }


def _build_qwen3_moe_fields(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "moe_intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp does so for every model of this architecture
        "decoder_sparse_step": 1,
    }


def _build_gemma3_fields(fields: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of config.json that Gemma 3 has. A GGUF file lacks those that llama.cpp knows."""
    usual = fields.get_integer("embedding_length") // fields.get_integer("attention.head_count")
    is_27b = fields.get_integer("block_count") == GEMMA3_27B_LAYERS
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": usual if is_27b else fields.get_integer("attention.key_length", usual),
        "sliding_window_pattern": 6,
        "rope_theta": fields.get_decimal("rope.freq_base", 1000000.0),
        "rope_local_base_freq": fields.get_decimal("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": fields.get_number("final_logit_softcapping", 0.0) or None,
        **_build_sliding_window(fields),
    }


LLAMA = GGUFArchitecture("LlamaForCausalLM", "llama", has_rotary_pairs=True)
MISTRAL = replace(LLAMA, class_name="MistralForCausalLM", model_type="mistral", build_fields=_build_sliding_window)
MIXTRAL = GGUFArchitecture(
    "MixtralForCausalLM",
    "mixtral",
    has_rotary_pairs=True,
    experts=ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    build_fields=_build_mixtral_fields,
)
QWEN3_MOE = GGUFArchitecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    experts=ExpertNames("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    build_fields=_build_qwen3_moe_fields,
)
GEMMA3 = GGUFArchitecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    other_tensors={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
    build_fields=_build_gemma3_fields,
)
ARCHITECTURES = {  # by the name that llama.cpp gives them, general.architecture
    "llama": LLAMA,
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", build_fields=_build_sliding_window),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", build_fields=_build_sliding_window),
    "qwen3moe": QWEN3_MOE,
    "gemma3": GEMMA3,
}


def select_architecture(metadata: dict[str, Any]) -> GGUFArchitecture:
    """Return the architecture of a GGUF model. Raise UnsupportedModel if it is not supported."""
    fields = GGUFMetadata(metadata)
    found = ARCHITECTURES.get(fields.arch)
    has_experts = fields.get_integer("expert_count", 0) > 0
    if found is LLAMA and has_experts:
        return MIXTRAL
    if found is LLAMA and fields.has("attention.sliding_window"):
        return MISTRAL
    if found is None or has_experts != (found.experts is not None):
        kind = " with experts" if has_experts else ""
        raise UnsupportedModel(
            f"GGUF architecture {fields.arch!r}{kind} is not supported", hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    return found
