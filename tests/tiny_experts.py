"""Tiny random checkpoints of families with experts: as published, or with all experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny import Config
from torch import Tensor

CLASSES = {"glm4_moe": "Glm4Moe", "qwen2_moe": "Qwen2Moe", "olmoe": "Olmoe", "dots1": "Dots1"}
CLASSES |= {"solar_open": "SolarOpen", "granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared"}

DEEPSEEK_LIKE = ("glm4_moe", "dots1", "solar_open")


def config(model_type: str, /, **changes: Any) -> Config:
    """Return a config.json; a change to None removes a field."""
    base = {**tiny.BASE, "model_type": model_type, "architectures": [f"{CLASSES[model_type]}ForCausalLM"]}
    base |= {"pad_token_id": 0, "num_experts_per_tok": 2}
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


def deepseek_like(model_type: str, **changes: Any) -> Config:
    experts = {"n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
    return config(model_type, **{**experts, "routed_scaling_factor": 2.5, "norm_topk_prob": True, **changes})


def glm4(**changes: Any) -> Config:
    return deepseek_like("glm4_moe", **{"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, **changes})


def qwen2(**changes: Any) -> Config:
    experts = {"num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "head_dim": None}
    return config("qwen2_moe", **{**experts, **changes})


def granite(model_type: str, **changes: Any) -> Config:
    scales = {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    }
    return config(model_type, num_local_experts=5, head_dim=None, **{**scales, **changes})


CONFIGS: dict[str, Config] = {
    "glm4": glm4(attention_bias=True, use_qk_norm=True, n_group=1, topk_group=1),
    "glm4-groups": glm4(n_group=3, topk_group=2, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=3),
    "glm4-defaults": glm4(
        partial_rotary_factor=None, first_k_dense_replace=None, norm_topk_prob=None, n_shared_experts=None
    ),
    "glm4-rope-parameters": glm4(
        partial_rotary_factor=None,
        rope_theta=None,
        first_k_dense_replace=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    "qwen2-moe": qwen2(),
    "qwen2-moe-mixed": qwen2(
        decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3], norm_topk_prob=True, qkv_bias=False
    ),
    "olmoe": config("olmoe", num_experts=6, head_dim=None),
    "olmoe-renormalised": config("olmoe", num_experts=6, norm_topk_prob=True, attention_bias=True, head_dim=None),
    "granitemoe": granite("granitemoe", tie_word_embeddings=True),
    "granitemoe-biased": granite("granitemoe", attention_bias=True, num_experts_per_tok=5),
    "granitemoeshared": granite("granitemoeshared", shared_intermediate_size=56),
    "granitemoeshared-without": granite("granitemoeshared", shared_intermediate_size=0),
    "solar-open": deepseek_like("solar_open", first_k_dense_replace=0, n_group=2, rope_theta=None, norm_topk_prob=None),
    "dots1": deepseek_like("dots1", n_shared_experts=2, scoring_func="noaux_tc", moe_layer_freq=1),
    "dots1-window": deepseek_like("dots1", attention_bias=True, sliding_window=7, max_window_layers=1, n_group=2),
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors = attention_shapes(config) | (
            expert_shapes(config) if is_sparse(config, layer) else dense_shapes(config)
        )
        out |= {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}
    out["model.norm.weight"] = (hidden,)
    return out if config["tie_word_embeddings"] else out | {"lm_head.weight": (config["vocab_size"], hidden)}


def mtp_layer(config: Mapping[str, Any], layer: int) -> dict[str, Tensor]:
    """Return some tensors of a layer for multi-token prediction."""
    made = {"enorm.weight": (48,), "eh_proj.weight": (48, 96), "shared_head.head.weight": (131, 48)}
    made |= attention_shapes(config) | expert_shapes(config)
    return {f"model.layers.{layer}.{name}": torch.ones(shape) for name, shape in made.items()}


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    if config["model_type"] in DEEPSEEK_LIKE:
        return layer >= int(config.get("first_k_dense_replace", 1))
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0 and layer not in config.get("mlp_only_layers", ())


def attention_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads, kind = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "model_type")
    )
    dim = config.get("head_dim", hidden // heads)
    q, kv, biased = (
        heads * dim,
        kv_heads * dim,
        config.get("attention_bias", config.get("qkv_bias", kind == "qwen2_moe")),
    )
    out: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
        out[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if biased and (name != "o" or kind not in ("glm4_moe", "qwen2_moe", "solar_open")):
            out[f"self_attn.{name}_proj.bias"] = (rows,)
    if kind == "olmoe":
        out |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    elif kind == "dots1" or config.get("use_qk_norm"):
        out |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return out


def gated_shapes(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    out = {f"{prefix}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    return {**out, f"{prefix}.down_proj.weight": (hidden, ffn)}


def dense_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return gated_shapes("mlp", config["hidden_size"], config["intermediate_size"])


def expert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    count = next(config[n] for n in ("n_routed_experts", "num_experts", "num_local_experts") if n in config)
    if kind.startswith("granite"):
        at, shared = "block_sparse_moe", config.get("shared_intermediate_size", 0)
        out: dict[str, tuple[int, ...]] = {f"{at}.router.layer.weight": (count, hidden)}
        out |= {f"{at}.input_linear.weight": (count, 2 * ffn, hidden)}
        out |= {f"{at}.output_linear.weight": (count, hidden, ffn)}
        linears = {"input": (2 * shared, hidden), "output": (hidden, shared)} if shared else {}
        return out | {f"shared_mlp.{name}_linear.weight": shape for name, shape in linears.items()}
    out = {"mlp.gate.weight": (count, hidden)}
    for number in range(count):
        out |= gated_shapes(f"mlp.experts.{number}", hidden, ffn)
    if kind in DEEPSEEK_LIKE:
        out |= {"mlp.gate.e_score_correction_bias": (count,)}
        out |= gated_shapes("mlp.shared_experts", hidden, ffn * config.get("n_shared_experts", 1))
    if kind == "qwen2_moe":
        out |= gated_shapes("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        out |= {"mlp.shared_expert_gate.weight": (1, hidden)}
    return out


def tensors(config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=random)
        value = 1 + 0.2 * noise if "norm" in name else noise * (2.0 / shape[-1] ** 0.5 if len(shape) >= 2 else 0.3)
        return value.to(dtype)

    return {name: one(name, shape) for name, shape in shapes(config).items()}


def write(directory: Path, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Path:
    return tiny.write_tensors(directory, config, tensors(config, dtype=dtype))


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all experts of a layer in two, as transformers 5 names them."""
    out, gates, ups, downs = {}, {}, {}, {}
    by_name = {"gate_proj": gates, "w1": gates, "up_proj": ups, "w3": ups, "down_proj": downs, "w2": downs}
    for name, tensor in tensors.items():
        if ".experts." in name:
            module, rest = name.replace("block_sparse_moe", "mlp").split(".experts.")
            by_name[rest.split(".")[1]].setdefault(module, []).append(tensor)
        else:
            out[name.replace("block_sparse_moe", "mlp")] = tensor
    for module in downs:
        pairs = zip(gates[module], ups[module], strict=True)
        out[f"{module}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{module}.experts.down_proj"] = torch.stack(downs[module])
    return out
