"""SIZES: the smallest config.json of each model type: its sizes alone, without a field that transformers has a default
for and that is not a size."""

from __future__ import annotations

from typing import Any

BASE = {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
BASE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 80}
HEAD = {"head_dim": 8}
LATENT = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "q_lora_rank": 16}
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "head_dim": 16}
STATES |= {"linear_value_head_dim": 10}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE4: dict[str, Any] = {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 80}
GRANITE4 |= {"mamba_n_heads": 12, "mamba_d_head": 8}

SIZES: dict[str, dict[str, Any]] = {
    model_type: {"model_type": model_type, **BASE, **sizes}
    for model_type, sizes in {
        "llama": {},
        "mistral": HEAD,
        "qwen2": {},
        "qwen3": HEAD,
        "mixtral": HEAD | LOCAL,
        "qwen3_moe": HEAD | EXPERTS,
        "gemma2": HEAD,
        "gemma3_text": HEAD | {"num_hidden_layers": 7},
        "phi3": {},
        "olmo2": {},
        "olmo3": {},
        "granite": {},
        "granitemoehybrid": GRANITE4,
        "granitemoe": LOCAL,
        "granitemoeshared": LOCAL,
        "qwen2_moe": SHARED,
        "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
        "glm4_moe": ROUTED,
        "solar_open": HEAD | ROUTED,
        "dots1": ROUTED,
        "smollm3": {},
        "llama4_text": HEAD | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 80},
        "deepseek_v2": LATENT | ROUTED | {"num_key_value_heads": 6},
        "deepseek_v3": LATENT | ROUTED | {"num_key_value_heads": 6},
        "gpt_oss": HEAD | LOCAL,
        "qwen3_next": STATES | SHARED,
        "qwen3_5_text": STATES,
        "qwen3_5_moe_text": STATES | SHARED,
        "cohere": {},
        "cohere2": {},
    }.items()
}
