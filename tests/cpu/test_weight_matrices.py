"""Weights of language models are counted as transformers creates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from emberline.models.config_outline import read_outline
from emberline.models.textmodel import OTHER_TENSORS
from emberline.models.weight_matrices import list_weight_matrices

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = SIZES | {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 14,
    "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA = SIZES | {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
LLAMA4 = SIZES | {
    "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
LLAMA4_VISION = VISION | {
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "num_channels": 3, "projector_input_dim": 24,
    "projector_output_dim": 24, "vision_output_dim": 24, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip
QWEN_VISION = VISION | {
    "depth": 2, "num_heads": 2, "in_channels": 3, "num_position_embeddings": 16, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
KIMI_VISION = VISION | {
    "num_hidden_layers": 2, "num_attention_heads": 2, "pos_emb_height": 8, "pos_emb_width": 8,
    "merge_kernel_size": [2, 2],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama4_text": LLAMA4,
    "llama4": {"model_type": "llama4", "text_config": LLAMA4, "vision_config": LLAMA4_VISION},
    "deepseek_v2": LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": LATENT | {"model_type": "deepseek_v3"},
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": LATENT | {"model_type": "deepseek_v3"},
        "vision_config": KIMI_VISION,
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    "gpt_oss": SIZES | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": DELTA | {"model_type": "qwen3_next"},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": DELTA | {"model_type": "qwen3_5_moe_text"},
        "vision_config": QWEN_VISION,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {k: v for k, v in DELTA.items() if "expert" not in k and "moe" not in k}
    | {"model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "glm4_moe": SIZES
    | {
        "model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 2, "attention_bias": True, "use_qk_norm": True,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_transformers_creates_them(name: str) -> None:
    config = dict(CONFIGS[name])
    counted = sum(part.num_weights for part in list_weight_matrices(read_outline(config)))
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    language = [weight for name, weight in model.named_parameters() if not OTHER_TENSORS.fullmatch(name)]
    created = sum(weight.numel() for weight in language)
    created += sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert counted == created
