"""Tiny random checkpoints, one for each architecture and rope scaling: ordinary directories that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Config = dict[str, Any]

BASE: Config = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPU_SIZES: Config = {  # the least that our kernels for a GPU take
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
LARGE_VOCAB_SIZES = GPU_SIZES | {  # a vocabulary as large as a real model's
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
CLASSES |= {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}


def config(model_type: str, /, **changes: Any) -> Config:
    return {**BASE, "model_type": model_type, "architectures": [f"{CLASSES[model_type]}ForCausalLM"], **changes}


def scaled(kind: str, **numbers: Any) -> Config:
    return config("llama", rope_scaling={"rope_type": kind, **numbers})


SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.5, 2.0, 3.0, 4.5]
CONFIGS: dict[str, Config] = {
    "llama": config("llama"),
    "llama-tied-mha": config("llama", tie_word_embeddings=True, num_key_value_heads=6),
    "llama-biased": config("llama", attention_bias=True, mlp_bias=True),
    "llama-odd-head": config("llama", hidden_size=60, num_attention_heads=3, num_key_value_heads=1, head_dim=20),
    "llama-linear": scaled("linear", factor=2.0),
    "llama-dynamic": scaled("dynamic", factor=2.0),
    "llama-llama3": scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "llama-yarn": scaled("yarn", factor=2.0, original_max_position_embeddings=32, beta_fast=4.0),
    "llama-yarn-mscale": scaled(
        "yarn",
        rope_theta=20.0,  # spreads the ramp over several pairs, so that truncate shows
        factor=2.0,
        original_max_position_embeddings=32,
        beta_fast=4.0,
        mscale=0.7,
        mscale_all_dim=0.4,
        truncate=False,
    ),
    "llama-longrope": scaled(
        "longrope", factor=4.0, short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=16
    ),
    "llama-rope-parameters": config(
        "llama", rope_theta=None, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
    ),
    "mistral": config("mistral", sliding_window=7),
    "mistral-whole": config("mistral", sliding_window=None),
    "qwen2": config("qwen2", tie_word_embeddings=True),
    "qwen2-window": config("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": config("qwen3", head_dim=16),
    "qwen3-layers": config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": config("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": config(
        "qwen3_moe", num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "qwen3-moe-mixed": config(
        "qwen3_moe",
        num_local_experts=5,
        num_experts_per_tok=5,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=9,
    ),
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    kind = config["model_type"]
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, config.get("attention_bias", False)),
    }
    dense = {
        "mlp.gate_proj": (ffn, hidden, config.get("mlp_bias", False)),
        "mlp.up_proj": (ffn, hidden, config.get("mlp_bias", False)),
        "mlp.down_proj": (hidden, ffn, config.get("mlp_bias", False)),
    }
    sparse = experts(config) if "num_experts_per_tok" in config else dense
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} if kind.startswith("qwen3") else {}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        ffns = dense if layer in config.get("mlp_only_layers", ()) else sparse
        for name, (rows, columns, bias) in (linears | ffns).items():
            out[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                out[f"{at}.{name}.bias"] = (rows,)
        out |= {f"{at}.{name}.weight": (size,) for name, size in norms.items()}
    out["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], hidden)
    return out


def experts(config: Mapping[str, Any]) -> dict[str, tuple[int, int, bool]]:
    hidden, ffn = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    count = config.get("num_experts", config.get("num_local_experts"))
    at, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if config["model_type"] == "mixtral":
        at, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    made = {f"{at}.gate": (count, hidden, False)}
    for one in (f"{at}.experts.{i}" for i in range(count)):
        made |= {f"{one}.{name}": (ffn, hidden, False) for name in (gate, up)}
        made[f"{one}.{down}"] = (hidden, ffn, False)
    return made


def tensors(config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=random)
        # Large enough that attention is sharp and logits tell positions apart.
        value = 1 + 0.2 * noise if "norm" in name else noise * (2.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3)
        return value.to(dtype)

    return {name: one(name, shape) for name, shape in shapes(config).items()}


def write(
    directory: Path,
    config: Mapping[str, Any] | str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """`config` is a name in CONFIGS or a config.json."""
    config = CONFIGS[config] if isinstance(config, str) else config
    return write_tensors(directory, config, tensors(config, seed=seed, dtype=dtype), shards=shards)


def write_tensors(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory
