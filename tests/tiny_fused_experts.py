"""Tiny random checkpoints of families that store all experts of a layer, transposed, in two tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiny
import torch
from tiny import Config
from torch import Tensor

LLAMA4 = {"attention_chunk_size": 64, "floor_scale": 8, "attn_scale": 0.5, "intermediate_size_mlp": 80}
LLAMA4 |= {"num_local_experts": 5, "intermediate_size": 40, "use_qk_norm": True}
GPT_OSS: Config = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "attention_bias": True}
GPT_OSS |= {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def config(model_type: str, family: str, **changes: Any) -> Config:
    names = {"model_type": model_type, "architectures": [f"{family}ForCausalLM"], "pad_token_id": 0}
    return {**tiny.BASE, **names, **changes}


CONFIGS: dict[str, Config] = {
    "llama4": config("llama4_text", "Llama4", **LLAMA4, num_experts_per_tok=1, interleave_moe_layer_step=1),
    "llama4-two": config("llama4_text", "Llama4", **LLAMA4, num_experts_per_tok=2, moe_layers=[1]),
    "gpt-oss": config("gpt_oss", "GptOss", **GPT_OSS),
    "gpt-oss-limit": config("gpt_oss", "GptOss", **GPT_OSS, swiglu_limit=0.5, swiglu_alpha=1.2),
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, is_llama = config["hidden_size"], config["num_attention_heads"], "Llama4" in str(config)
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        layer["post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            layer[f"self_attn.{name}_proj.weight"] = (rows, columns)
            layer |= {} if is_llama else {f"self_attn.{name}_proj.bias": (rows,)}
        if not is_llama:
            layer["self_attn.sinks"] = (heads,)
        if number in config.get("moe_layers", range(number + 1)):
            layer |= expert_shapes(config, is_llama)
        else:
            layer |= gated_shapes("feed_forward", hidden, config["intermediate_size_mlp"])
        out |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def expert_shapes(config: Mapping[str, Any], is_llama: bool) -> dict[str, tuple[int, ...]]:
    hidden, ffn, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    at = "feed_forward" if is_llama else "mlp"
    out: dict[str, tuple[int, ...]] = {
        f"{at}.router.weight": (count, hidden),
        f"{at}.experts.gate_up_proj": (count, hidden, 2 * ffn),
        f"{at}.experts.down_proj": (count, ffn, hidden),
    }
    if is_llama:
        return out | gated_shapes(f"{at}.shared_expert", hidden, ffn)
    out |= {f"{at}.router.bias": (count,), f"{at}.experts.gate_up_proj_bias": (count, 2 * ffn)}
    return out | {f"{at}.experts.down_proj_bias": (count, hidden)}


def gated_shapes(module: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    return {f"{module}.{name}_proj.weight": size for name, size in sizes.items()}


def tensors(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=random)
        value = 1 + 0.2 * noise if "norm" in name else noise * (2.0 / shape[-1] ** 0.5 if len(shape) >= 2 else 0.3)
        return value.to(dtype)

    return {name: one(name, shape) for name, shape in shapes(config).items()}
