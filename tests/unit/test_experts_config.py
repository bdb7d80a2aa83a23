"""Configs of models with experts: as published, with the published numbers of parameters, and with wrong values."""

from __future__ import annotations

from typing import Any

import pytest

from emberline.bench.machine_limits import TokenCost
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.engine.memory import weight_bytes
from emberline.models.config import ModelConfig
from emberline.models.expertsconfig import ExpertOptions, ExpertsConfig
from emberline.models.fields import ConfigFields
from emberline.models.registry import ARCHITECTURES

GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_4_5 = GLM_4_5_AIR | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
}
QWEN_1_5_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
GRANITE_3_1B_A400M = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 4096,
    "model_type": "granitemoe",
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
DOTS1 = {
    "architectures": ["Dots1ForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "topk_group": 1,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "total", "of_a_token"),
    [
        (GLM_4_5_AIR, 106.85e9, 12.2e9),  # published as 106B-A12B, without the layer for multi-token prediction
        (GLM_4_5, 352.8e9, 32e9),
        (QWEN_1_5_MOE, 14.3e9, 2.07e9),  # 2.7e9 with embedding and head
        (OLMOE_1B_7B, 6.92e9, 1.1e9),
        (GRANITE_3_1B_A400M, 1.33e9, 0.38e9),
        (DOTS1, 142.8e9, 12.9e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_configs(config: dict[str, Any], total: float, of_a_token: float) -> None:
    read = ModelConfig.from_hf(config)
    assert weight_bytes(read, 2) == pytest.approx(2 * total, rel=5e-3)
    assert TokenCost.from_config(read).layers == pytest.approx(of_a_token, rel=3e-2)
    with pytest.raises(UnsupportedModel, match="some_factor"):
        ModelConfig.from_hf(config | {"some_factor": 2.0})


def test_glm4() -> None:
    config = ModelConfig.from_hf(GLM_4_5)
    assert config.experts is not None and config.experts.layers == (False,) * 3 + (True,) * 89
    assert config.experts.options == ExpertOptions(scale=2.5, shared_ffn=1536, has_correction=True)
    assert (config.rope.dim, config.qkv_bias, config.o_bias, config.qk_norm) == (64, True, False, True)
    assert config.mtp_layers == 1 and config.windows == (0,) * 92


def test_windows_of_dots1() -> None:
    assert set(ModelConfig.from_hf(DOTS1).windows) == {0}
    windows = ModelConfig.from_hf(DOTS1 | {"sliding_window": 512, "max_window_layers": 60}).windows
    assert windows == (0,) * 60 + (512,) * 2


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (QWEN_1_5_MOE, {"use_sliding_window": True}),
        (QWEN_1_5_MOE, {"n_shared_experts": 1}),
        (QWEN_1_5_MOE, {"routed_scaling_factor": 2.0}),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}),
        (OLMOE_1B_7B, {"shared_expert_intermediate_size": 8}),
        (GRANITE_3_1B_A400M, {"shared_intermediate_size": 8}),
        (GRANITE_3_1B_A400M, {"hidden_act": "gelu"}),
        (GLM_4_5, {"kv_lora_rank": 512}),
        (GLM_4_5, {"moe_layer_freq": 2}),
        (DOTS1, {"scoring_func": "softmax"}),
        (DOTS1, {"num_nextn_predict_layers": 1}),
    ],
    ids=str,
)
def test_refused_fields(config: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        ModelConfig.from_hf(config | change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n_group": 3}, "n_group"),
        ({"n_group": 160}, "n_group"),
        ({"n_group": 40, "topk_group": 1}, "topk_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace"),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
    ids=str,
)
def test_wrong_fields(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelFileError, match=name):
        ModelConfig.from_hf(GLM_4_5 | change)


def read_experts(model_type: str, **fields: Any) -> ExpertsConfig:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2, **fields}
    architecture = ARCHITECTURES[model_type]
    assert architecture.experts is not None
    filled = ConfigFields(architecture.fill_defaults(sizes), "config.json")
    return ExpertsConfig.from_hf(filled, architecture.experts, 6)


def test_layers_of_llama4() -> None:
    scout = read_experts("llama4_text", num_local_experts=16)
    assert scout.layers == (True,) * 6 and scout.options == ExpertOptions(shared_ffn=64)
    maverick = read_experts("llama4_text", num_local_experts=16, interleave_moe_layer_step=2)
    assert maverick.layers == (False, True) * 3
    listed = read_experts("llama4_text", num_local_experts=16, moe_layers=[2, 3])
    assert listed.layers == (False, False, True, True, False, False)


def test_groups_of_deepseek_v2() -> None:
    grouped: dict[str, Any] = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    plain = read_experts("deepseek_v2", topk_method="greedy", **grouped).options
    limited = read_experts("deepseek_v2", topk_method="group_limited_greedy", **grouped).options
    assert (plain.groups, plain.groups_chosen) == (1, 1) and (limited.groups, limited.groups_chosen) == (4, 2)
    with pytest.raises(UnsupportedModel, match="topk_method 'noaux_tc'"):
        read_experts("deepseek_v2", topk_method="noaux_tc", **grouped)


def test_activation_of_gpt_oss() -> None:
    options = read_experts("gpt_oss", num_local_experts=4).options
    assert options == ExpertOptions(swiglu_alpha=1.702, swiglu_limit=7.0, has_router_bias=True, has_biases=True)
    with pytest.raises(ModelFileError, match="swiglu_limit"):
        read_experts("gpt_oss", num_local_experts=4, swiglu_limit=0)
