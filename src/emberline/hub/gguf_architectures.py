"""The GGUF architectures that can be converted, and the names of their tensors in Hugging Face checkpoints.

Each entry of ARCHITECTURES is one architecture: its class in transformers, the names of tensors that differ from
Llama's, and a function of gguf_fields.py that returns the fields of config.json that not all architectures have. Values
that a file lacks are the defaults of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub import gguf_fields
from emberline.hub.gguf import GGUFTensor
from emberline.hub.gguf_fields import no_fields
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_rope import LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS

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
LAYER_PATTERN = re.compile(r"blk\.([0-9]{1,4})\.")


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture of experts in a checkpoint's layer. `{}` is the number of an expert."""

    router: str
    gate: str
    up: str
    down: str

    def find(self, gguf_name: str) -> str | None:
        """Return the checkpoint's name pattern for a GGUF tensor of one expert or of all (`ffn_gate_exps`), or None."""
        return {"ffn_gate": self.gate, "ffn_up": self.up, "ffn_down": self.down}.get(gguf_name.removesuffix("_exps"))


@dataclass(frozen=True)
class GGUFArchitecture:
    class_name: str  # in transformers
    model_type: str
    has_rotary_pairs: bool = False  # rows of q and k are stored with the two halves of a rotation side by side
    experts: ExpertNames | None = None
    other_tensors: Mapping[str, str] = field(default_factory=dict)  # tensors that Llama lacks or names differently
    whole_names: Mapping[str, str] = field(default_factory=dict)  # of tensors without "weight" or "bias" in their name
    row_tensors: frozenset[str] = frozenset()  # matrices with one row, which GGUF files store as vectors
    config_tensors: frozenset[str] = frozenset({ROPE_FREQS})  # tensors that become fields of config.json
    norm_offset: float = 0.0  # llama.cpp adds this to the norm weights of a checkpoint
    has_layer_norms: bool = False  # layer norms instead of RMS norms
    has_partial_rope: bool = False  # whether only a part of a head may be rotated
    bias_field: str = "attention_bias"
    qk_norm_field: str = ""  # field that says whether queries and keys have norms
    build_fields: Callable[[GGUFMetadata], dict[str, Any]] = no_fields  # of config.json
    build_yarn_fields: Callable[[GGUFMetadata], dict[str, Any]] = no_fields  # of rope_scaling

    def list_checkpoint_tensors(self, tensor: GGUFTensor, layers: int | None = None) -> list[tuple[str, GGUFTensor]]:
        """Return the checkpoint tensors, with their names, that a GGUF tensor contains: one, or one for each expert.

        The result is empty for a tensor that becomes part of config.json, and for tensors of the layers after the first
        `layers`, which are for multi-token prediction. Raise UnsupportedModel for an unknown tensor."""
        layer = LAYER_PATTERN.match(tensor.name)
        if tensor.name in self.config_tensors or (layers is not None and layer and int(layer[1]) >= layers):
            return []
        match = TENSOR_NAME_PATTERN.fullmatch(tensor.name)
        if match is not None and match["layer"] is None:
            if match["name"] in TOP_TENSORS and match["expert"] is None:
                return [(f"{TOP_TENSORS[match['name']]}.{match['kind']}", tensor)]
        elif match is not None:
            prefix = f"model.layers.{int(match['layer'])}"
            whole = f"{match['name']}.{match['kind']}"
            if whole in self.whole_names and match["expert"] is None:
                return [(f"{prefix}.{self.whole_names[whole]}", tensor)]
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
        if name in self.row_tensors and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        return [(known[name], tensor)] if name in known and expert is None else []


def _split_experts(tensor: GGUFTensor) -> list[GGUFTensor]:
    """Return the matrices of a tensor with three dimensions, the first of which is the number of the expert.

    A tensor of biases has two dimensions."""
    if len(tensor.shape) != 3 and not (tensor.name.endswith(".bias") and len(tensor.shape) == 2):
        raise ModelFileError(f"GGUF tensor {tensor.name!r} must have three dimensions, not the shape {tensor.shape}")
    count, size = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    return [replace(tensor, shape=tensor.shape[1:], start=tensor.start + i * size, nbytes=size) for i in range(count)]


def name_ffn(module: str, suffix: str = "") -> dict[str, str]:
    """Return the checkpoint names of a feed-forward network's three matrices, by their GGUF names.

    `module`: prefix of the checkpoint names. `suffix`: of the GGUF names."""
    return {f"ffn_{name}{suffix}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def name_experts(module: str, router: str = "gate") -> ExpertNames:
    gate, up, down = (f"{module}.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
    return ExpertNames(f"{module}.{router}", gate, up, down)


MLP_EXPERTS = name_experts("mlp")
SHARED_EXPERTS = name_ffn("mlp.shared_experts", "_shexp")
LLAMA = GGUFArchitecture("LlamaForCausalLM", "llama", has_rotary_pairs=True)
MISTRAL = replace(
    LLAMA, class_name="MistralForCausalLM", model_type="mistral", build_fields=gguf_fields.build_sliding_window
)
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
    build_fields=gguf_fields.build_mixtral,
)
QWEN3_MOE = GGUFArchitecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    experts=MLP_EXPERTS,
    build_fields=gguf_fields.build_qwen3_moe,
)
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3 = GGUFArchitecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    other_tensors=GEMMA_NORMS,
    norm_offset=1.0,
    build_fields=gguf_fields.build_gemma3,
)
GEMMA2 = replace(GEMMA3, class_name="Gemma2ForCausalLM", model_type="gemma2", build_fields=gguf_fields.build_gemma2)
PHI3 = GGUFArchitecture(
    "Phi3ForCausalLM",
    "phi3",
    other_tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    config_tensors=frozenset({LONG_FACTORS, SHORT_FACTORS}),
    has_partial_rope=True,
    build_fields=gguf_fields.build_phi3,
)
OLMO2 = GGUFArchitecture(
    "Olmo2ForCausalLM",
    "olmo2",
    other_tensors={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    build_fields=gguf_fields.build_olmo2,
)
GRANITE = replace(LLAMA, class_name="GraniteForCausalLM", model_type="granite", build_fields=gguf_fields.build_granite)
GRANITE_MOE = replace(
    GRANITE,
    class_name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    experts=name_experts("block_sparse_moe", router="router.layer"),
    build_fields=gguf_fields.build_granite_moe,
)
COMMAND_R = GGUFArchitecture(
    "CohereForCausalLM",
    "cohere",
    has_layer_norms=True,
    qk_norm_field="use_qk_norm",
    build_fields=gguf_fields.build_command_r,
)
COHERE2 = GGUFArchitecture(
    "Cohere2ForCausalLM", "cohere2", has_layer_norms=True, build_fields=gguf_fields.build_cohere2
)
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GLM4_MOE = GGUFArchitecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    experts=MLP_EXPERTS,
    other_tensors=SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
    whole_names=CORRECTION,
    has_partial_rope=True,
    qk_norm_field="use_qk_norm",
    build_fields=gguf_fields.build_glm4_moe,
)
DEEPSEEK = GGUFArchitecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    experts=MLP_EXPERTS,
    other_tensors=SHARED_EXPERTS
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",  # gguf_latents.py joins these two
        "attn_v_b": "self_attn.v_b_proj",
    },
    whole_names=CORRECTION,
    has_partial_rope=True,
    build_fields=gguf_fields.build_deepseek,
    build_yarn_fields=gguf_fields.build_deepseek_yarn,
)
LLAMA4 = GGUFArchitecture(
    "Llama4ForCausalLM",
    "llama4_text",
    experts=name_experts("feed_forward", router="router"),
    other_tensors=name_ffn("feed_forward") | name_ffn("feed_forward.shared_expert", "_shexp"),
    build_fields=gguf_fields.build_llama4,
)
GPT_OSS = GGUFArchitecture(
    "GptOssForCausalLM",
    "gpt_oss",
    experts=name_experts("mlp", router="router"),
    other_tensors={"post_attention_norm": "post_attention_layernorm"},
    whole_names={"attn_sinks.weight": "self_attn.sinks"},
    build_fields=gguf_fields.build_gpt_oss,
    build_yarn_fields=gguf_fields.build_gpt_oss_yarn,
)
QWEN2_MOE = GGUFArchitecture(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    experts=MLP_EXPERTS,
    other_tensors=name_ffn("mlp.shared_expert", "_shexp") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    row_tensors=frozenset({"ffn_gate_inp_shexp"}),
    bias_field="qkv_bias",
    build_fields=gguf_fields.build_qwen2_moe,
)
OLMOE = GGUFArchitecture("OlmoeForCausalLM", "olmoe", experts=MLP_EXPERTS, build_fields=gguf_fields.build_olmoe)
DOTS1 = GGUFArchitecture(
    "Dots1ForCausalLM",
    "dots1",
    experts=MLP_EXPERTS,
    other_tensors=SHARED_EXPERTS,
    whole_names=CORRECTION,
    build_fields=gguf_fields.build_dots1,
)
ARCHITECTURES = {  # by the name that llama.cpp gives them, general.architecture
    "llama": LLAMA,
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", build_fields=gguf_fields.build_sliding_window),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", build_fields=gguf_fields.build_sliding_window),
    "qwen3moe": QWEN3_MOE,
    "gemma3": GEMMA3,
    "gemma2": GEMMA2,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "smollm3": replace(
        LLAMA, class_name="SmolLM3ForCausalLM", model_type="smollm3", build_fields=gguf_fields.build_smollm3
    ),
    "command-r": COMMAND_R,
    "cohere2": COHERE2,
    "glm4moe": GLM4_MOE,
    "deepseek2": DEEPSEEK,
    "llama4": LLAMA4,
    "gpt-oss": GPT_OSS,
    "olmoe": OLMOE,
    "qwen2moe": QWEN2_MOE,
    "dots1": DOTS1,
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
