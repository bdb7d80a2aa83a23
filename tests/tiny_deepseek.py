"""Tiny random checkpoints of DeepSeek models, which have latent attention. By default all layers are dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import tiny_experts
import torch

MLA = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 3}
MLA |= {"num_key_value_heads": 6, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1}
MLA |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
DEEPSEEK: dict[str, tiny.Config] = {
    "v2": {"model_type": "deepseek_v2", "q_lora_rank": 16},
    "v2-lite": {"model_type": "deepseek_v2", "q_lora_rank": None, "tie_word_embeddings": True},
    "v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "num_mtp_layers": 0,
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5},
    },
    "v3-halves": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "num_mtp_layers": 0,
        "rope_interleave": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
LITE_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def write_deepseek(directory: Path, name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random checkpoint of a name in DEEPSEEK. `changes`: to its config."""
    c = {**tiny.BASE, **MLA, **DEEPSEEK[name], **changes}
    c["architectures"] = ["DeepseekV2ForCausalLM" if name.startswith("v2") else "DeepseekV3ForCausalLM"]
    hidden, heads, compressed = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"]
    rank, rotary, plain, values = (c[field] for field in LITE_SIZES)
    layer = {"self_attn.kv_a_proj_with_mqa": (rank + rotary, hidden)}
    layer |= {"self_attn.kv_b_proj": (heads * (plain + values), rank)}
    layer |= {"self_attn.o_proj": (hidden, heads * values), "self_attn.kv_a_layernorm": (rank,)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if compressed:
        layer |= {"self_attn.q_a_proj": (compressed, hidden)}
        layer |= {"self_attn.q_b_proj": (heads * (plain + rotary), compressed)}
        layer["self_attn.q_a_layernorm"] = (compressed,)
    else:
        layer["self_attn.q_proj"] = (heads * (plain + rotary), hidden)
    layers, vocab, first_sparse = range(c["num_hidden_layers"]), c["vocab_size"], c["first_k_dense_replace"]
    shapes = {f"model.layers.{i}.{part}.weight": shape for i in layers for part, shape in layer.items()}
    dense, sparse = tiny_experts.dense_shapes(c), tiny_experts.expert_shapes({**c, "model_type": "glm4_moe"})
    shapes |= {f"model.layers.{i}.{p}": s for i in layers for p, s in (sparse if i >= first_sparse else dense).items()}
    shapes |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    shapes |= {} if c["tie_word_embeddings"] else {"lm_head.weight": (vocab, hidden)}
    random = torch.Generator().manual_seed(3)
    tensors = {part: torch.randn(shape, generator=random) for part, shape in shapes.items()}
    for part, tensor in tensors.items():
        tensor.mul_(0.2).add_(1) if "norm" in part else tensor.mul_(2.0 / tensor.shape[-1] ** 0.5)
    tiny.write_tensors(directory, c, {part: tensor.to(dtype) for part, tensor in tensors.items()})
    (directory / "config.json").write_text(json.dumps(c))  # with null, which means no compressed queries
    return directory
