"""Tiny random checkpoints of families with experts, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

BASE = {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "pad_token_id": 0}
BASE |= {"max_position_embeddings": 64, "intermediate_size": 80, "bos_token_id": 1, "eos_token_id": 2}
MLA = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "num_key_value_heads": 6}
MLA |= {"n_routed_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
MLA |= {"n_shared_experts": 2, "routed_scaling_factor": 1.7}
GROUPS = {"n_group": 4, "topk_group": 2}
LLAMA4 = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 80, "num_local_experts": 5}
LLAMA4 |= {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5, "num_experts_per_tok": 1}
GPT_OSS = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", MLA | GROUPS | {"q_lora_rank": 16, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": ("DeepseekV2", MLA | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", MLA | GROUPS | {"q_lora_rank": 16, "norm_topk_prob": True}),
    "llama4": ("Llama4", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4-all-layers": ("Llama4", LLAMA4 | {"interleave_moe_layer_step": 1, "use_qk_norm": False}),
    "gpt-oss": ("GptOss", GPT_OSS | {"sliding_window": 7, "rope_parameters": YARN}),
}


def write(directory: Path, name: str, **changes: Any) -> Any:
    """Write a checkpoint and return the model of transformers. `changes`: other values of its config."""
    transformers = pytest.importorskip("transformers")
    family, fields = CASES[name]
    config_name = "Llama4TextConfig" if family == "Llama4" else f"{family}Config"
    config = getattr(transformers, config_name)(**BASE | fields | changes, attn_implementation="eager")
    model = randomise(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    model.save_pretrained(directory)
    return model


def randomise(model: Any) -> Any:
    """Replace all weights by random ones, and return the model."""
    random = torch.Generator().manual_seed(1)
    for part, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=random)
        tensor.copy_(values * 0.2 + 1 if "norm" in part else values * 2.0 / tensor.shape[-1] ** 0.5)
    return model


def write_multimodal_llama4(directory: Path) -> Any:
    """Write a checkpoint as Llama 4 Scout's is published, and return the model of transformers."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    text = BASE | LLAMA4 | {"interleave_moe_layer_step": 2, "rope_parameters": rope}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8}
    config = transformers.Llama4Config(text_config=text, vision_config=vision, attn_implementation="eager")
    model = randomise(transformers.Llama4ForConditionalGeneration(config).eval())
    model.save_pretrained(directory)
    return model
