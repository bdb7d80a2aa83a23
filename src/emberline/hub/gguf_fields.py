"""The fields of config.json that not all GGUF architectures have, from the metadata of a file.

If a file lacks a value, the default of llama.cpp is used. For a model that a single publisher has released, it is the
value in the published config.json instead."""

from __future__ import annotations

from typing import Any

from emberline.core.errors import UnsupportedModel
from emberline.hub.gguf_metadata import GGUFMetadata

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
MAVERICK_EXPERTS = 128  # Llama 4 Maverick, which has no norms of queries and keys
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
GLM_TOKENIZERS = ("glm4", "chatglm-bpe")


def no_fields(fields: GGUFMetadata) -> dict[str, Any]:
    return {}


def build_sliding_window(fields: GGUFMetadata) -> dict[str, Any]:
    if not fields.has("attention.sliding_window"):
        return {}
    return {"sliding_window": fields.get_integer("attention.sliding_window")}


def build_mixtral(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_local_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        **build_sliding_window(fields),
    }


def build_qwen3_moe(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "moe_intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp does so for every model of this architecture
        "decoder_sparse_step": 1,
    }


def build_gemma3(fields: GGUFMetadata) -> dict[str, Any]:
    """Return fields of config.json for Gemma 3.

    GGUF files lack some of them. These have the values that llama.cpp uses, which are constants in its code."""
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
        **build_sliding_window(fields),
    }


def _build_windows(fields: GGUFMetadata, period: int) -> dict[str, Any]:
    """Return the fields of layers with a window. If the file lists none, every `period`-th layer has no window."""
    window, layers = fields.get_integer("attention.sliding_window", 0), fields.get_integer("block_count")
    if not window:
        return {"sliding_window": None}
    is_local = fields.get_flags("attention.sliding_window_pattern")
    if not is_local:
        period = fields.get_integer("attention.sliding_window_pattern", period)
        is_local = [(layer + 1) % max(1, period) != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
    return {"sliding_window": window, "layer_types": kinds}


def _build_partial_rope(fields: GGUFMetadata) -> dict[str, Any]:
    usual = fields.get_integer("embedding_length") // fields.get_integer("attention.head_count")
    head_dim = fields.get_integer("attention.key_length", usual)
    return {"partial_rotary_factor": fields.get_integer("rope.dimension_count", head_dim) / head_dim}


def build_gemma2(fields: GGUFMetadata) -> dict[str, Any]:
    usual = fields.get_integer("embedding_length") // fields.get_integer("attention.head_count")
    is_27b = fields.get_integer("block_count") == GEMMA2_27B_LAYERS
    caps = {
        name: fields.get_number(name, 0.0) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": usual if is_27b else fields.get_integer("attention.key_length", usual),
        **caps,
        **_build_windows(fields, 2),
    }


def build_phi3(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "sliding_window": fields.get_integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": fields.get_integer("rope.scaling.original_context_length"),
        **_build_partial_rope(fields),
    }


def build_olmo2(fields: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of OLMo 2 or 3, which are one architecture in llama.cpp; a file with a window is OLMo 3."""
    windows = _build_windows(fields, 4)
    if windows["sliding_window"] is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **windows}


def build_granite(fields: GGUFMetadata) -> dict[str, Any]:
    if not fields.get_flag("rope.scaling.finetuned", True):
        raise UnsupportedModel(f"GGUF architecture {fields.arch!r} without rotary embedding is not supported")
    head_dim = fields.get_integer("embedding_length") // fields.get_integer("attention.head_count")
    return {
        "attention_multiplier": fields.get_decimal("attention.scale", head_dim**-0.5),
        "embedding_multiplier": fields.get_decimal("embedding_scale", 1.0),
        "residual_multiplier": fields.get_decimal("residual_scale", 1.0),
        "logits_scaling": fields.get_decimal("logit_scale"),
    }


def build_granite_moe(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_local_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        **build_granite(fields),
    }


def build_smollm3(fields: GGUFMetadata) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def build_command_r(fields: GGUFMetadata) -> dict[str, Any]:
    return {"logit_scale": fields.get_decimal("logit_scale")}


def build_cohere2(fields: GGUFMetadata) -> dict[str, Any]:
    return {"logit_scale": fields.get_decimal("logit_scale"), **_build_windows(fields, 4)}


def _build_experts(fields: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of experts that DeepSeek V3 and its relatives share."""
    return {
        "n_routed_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "n_shared_experts": fields.get_integer("expert_shared_count", 0),
        "moe_intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "first_k_dense_replace": fields.get_integer("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get_decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get_flag("expert_weights_norm", False),
        "n_group": fields.get_integer("expert_group_count", 1),
        "topk_group": fields.get_integer("expert_group_used_count", 1),
    }


def build_glm4_moe(fields: GGUFMetadata) -> dict[str, Any]:
    _check_gating(fields, SIGMOID, SIGMOID)
    layers = fields.get_integer("block_count") - fields.get_integer("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        **_build_partial_rope(fields),
        **_build_experts(fields),
    }


def build_dots1(fields: GGUFMetadata) -> dict[str, Any]:
    _check_gating(fields, SIGMOID, SIGMOID)
    return {"sliding_window": None, **_build_experts(fields)}


def _check_gating(fields: GGUFMetadata, default: int, *supported: int) -> int:
    found = fields.get_integer("expert_gating_func", default)
    if found not in supported:
        raise UnsupportedModel(f"{fields.arch}.expert_gating_func is {found}, which is not supported")
    return found


def build_deepseek(fields: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of DeepSeek V3 and Kimi K2 if the scores of experts are sigmoids, otherwise of DeepSeek V2."""
    if fields.metadata.get("tokenizer.ggml.pre") in GLM_TOKENIZERS:
        raise UnsupportedModel(f"GGUF architecture {fields.arch!r} of a GLM model is not supported")
    gating = _check_gating(fields, SOFTMAX, SOFTMAX, SIGMOID)
    rotated = fields.get_integer("rope.dimension_count")
    key_size = fields.get_integer("attention.key_length_mla", fields.get_integer("attention.key_length"))
    value_size = fields.get_integer("attention.value_length_mla", fields.get_integer("attention.value_length"))
    has_q_rank = fields.has("attention.q_lora_rank")
    built = {
        "head_dim": None,
        "num_key_value_heads": fields.get_integer("attention.head_count"),
        "q_lora_rank": fields.get_integer("attention.q_lora_rank") if has_q_rank else None,
        "kv_lora_rank": fields.get_integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": value_size,
        **_build_experts(fields),
    }
    if gating == SIGMOID:
        return built
    method = "group_limited_greedy" if built["n_group"] > 1 else "greedy"
    return {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method, **built}


def build_deepseek_yarn(fields: GGUFMetadata) -> dict[str, Any]:
    """Return mscale and mscale_all_dim, which are equal in published models; the file has 0.1 times their value."""
    if not fields.has("rope.scaling.yarn_log_multiplier"):
        return {}
    scale = float(f"{fields.get_number('rope.scaling.yarn_log_multiplier') / 0.1:.6g}")
    return {"mscale": scale, "mscale_all_dim": scale}


def build_llama4(fields: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of Llama 4. Chunks, layers without rope and temperatures are constants of llama.cpp."""
    if fields.get_integer("attention.sliding_window", 8192) == 0:
        raise UnsupportedModel(f"GGUF architecture {fields.arch!r} without chunks is not supported")
    experts = fields.get_integer("expert_count")
    return {
        "intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "intermediate_size_mlp": fields.get_integer("feed_forward_length"),
        "interleave_moe_layer_step": fields.get_integer("interleave_moe_layer_step"),
        "num_local_experts": experts,
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "use_qk_norm": experts != MAVERICK_EXPERTS,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def build_gpt_oss(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "num_local_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        **_build_windows(fields, 2),
        # A config.json of gpt-oss without rope_scaling means yarn.
        **({} if fields.has("rope.scaling.factor") else {"rope_scaling": {"rope_type": "default"}}),
    }


def build_gpt_oss_yarn(fields: GGUFMetadata) -> dict[str, Any]:
    return {"truncate": False}


def build_qwen2_moe(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "moe_intermediate_size": fields.get_integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.get_integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp does so for every model of this architecture
        "decoder_sparse_step": 1,
    }


def build_olmoe(fields: GGUFMetadata) -> dict[str, Any]:
    return {
        "num_experts": fields.get_integer("expert_count"),
        "num_experts_per_tok": fields.get_integer("expert_used_count"),
        "norm_topk_prob": False,  # llama.cpp does so for every model of this architecture
    }
