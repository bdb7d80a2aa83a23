"""Tiny random checkpoints of the families that differ from Llama in more than sizes and biases.

`tiny.py` has the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny import Config
from torch import Tensor

CLASSES = {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3", "olmo2": "Olmo2", "olmo3": "Olmo3"}
CLASSES |= {"granite": "Granite", "granitemoehybrid": "GraniteMoeHybrid", "smollm3": "SmolLM3"}
CLASSES |= {"cohere": "Cohere", "cohere2": "Cohere2", "llama4_text": "Llama4"}
SLIDING, FULL = "sliding_attention", "full_attention"


def config(model_type: str, /, **changes: Any) -> Config:
    """Return a config.json; a change to None removes a field."""
    base = {**tiny.BASE, "model_type": model_type, "architectures": [f"{CLASSES[model_type]}ForCausalLM"]}
    base |= {"pad_token_id": 0, "num_hidden_layers": 4}
    if model_type == "olmo3":  # transformers ignores another value for layers with a window
        base["rope_theta"] = 500000.0
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


def gemma2(**changes: Any) -> Config:
    numbers = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 30}
    other = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": None, "sliding_window": 7}
    return config("gemma2", hidden_act=None, **{**numbers, **other, **changes})


def gemma3(**changes: Any) -> Config:
    numbers = {"query_pre_attn_scalar": 20, "rope_theta": 5000.0, "rope_local_base_freq": 100.0, "sliding_window": 7}
    other = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": None, "sliding_window_pattern": 3}
    return config("gemma3_text", hidden_act=None, **{**numbers, **other, **changes})


def phi3(**changes: Any) -> Config:
    return config("phi3", **{"original_max_position_embeddings": 64, **changes})


def longrope(kind: str, pairs: int) -> Config:
    return {
        "type": kind,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }


def granite(model_type: str, **changes: Any) -> Config:
    numbers = {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    }
    return config(model_type, **{**numbers, **changes})


def granite4(**changes: Any) -> Config:
    other: Config = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80}
    other |= {"position_embedding_type": "rope", "layer_types": ["attention"] * 4, "intermediate_size": 80}
    other |= {"mamba_n_heads": 12, "mamba_d_head": 8}
    return granite("granitemoehybrid", **{**other, **changes})


def cohere(model_type: str, **changes: Any) -> Config:
    numbers = {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "head_dim": None, "rms_norm_eps": None}
    return config(model_type, **{**numbers, "tie_word_embeddings": None, **changes})


def llama4(**changes: Any) -> Config:
    """Return a config without experts, in whose last layers the queries have several temperatures."""
    numbers = {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.4, "intermediate_size_mlp": 80}
    other = {"moe_layers": [], "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 24}
    return config("llama4_text", **{**numbers, **other, **changes})


OLMO3_LAYERS = [SLIDING, FULL, SLIDING, FULL]
OLMO3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 300.0},
    FULL: {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 32},
}
CONFIGS: dict[str, Config] = {
    "gemma2": gemma2(),
    "gemma2-untied-biased": gemma2(
        tie_word_embeddings=False, attention_bias=True, layer_types=[FULL, SLIDING, SLIDING, FULL]
    ),
    "gemma2-uncapped": {
        **gemma2(head_dim=256, num_key_value_heads=1, query_pre_attn_scalar=256),
        "attn_logit_softcapping": None,
    },
    "gemma3": gemma3(),
    "gemma3-scaled": gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0}, layer_types=[SLIDING, FULL] * 2),
    "gemma3-ropes": gemma3(
        rope_theta=None,
        rope_local_base_freq=None,
        final_logit_softcapping=4.0,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        },
    ),
    "phi3": phi3(sliding_window=9),
    "phi3-partial": phi3(head_dim=16, partial_rotary_factor=0.75),
    "phi3-longrope": phi3(
        head_dim=None,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=16,
        tie_word_embeddings=True,
        rope_scaling=longrope("longrope", 3),
    ),
    "phi3-su": phi3(
        original_max_position_embeddings=16, rope_scaling={**longrope("su", 4), "original_max_position_embeddings": 16}
    ),
    "olmo2": config("olmo2"),
    "olmo2-grouped-tied-biased": config("olmo2", num_key_value_heads=6, tie_word_embeddings=True, attention_bias=True),
    "olmo3": config(
        "olmo3",
        sliding_window=7,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
    ),
    "olmo3-ropes": config(
        "olmo3", sliding_window=5, rope_theta=None, layer_types=OLMO3_LAYERS, rope_parameters=OLMO3_ROPES
    ),
    "granite": granite("granite", tie_word_embeddings=True),
    "granite-biased": granite("granite", attention_bias=True, mlp_bias=True),
    "granite4": granite4(),
    "granite4-nope": granite4(position_embedding_type="nope", tie_word_embeddings=True),
    "smollm3": config("smollm3", no_rope_layers=[1, 0, 1, 0], head_dim=None),
    "smollm3-interval": config("smollm3", no_rope_layer_interval=3, tie_word_embeddings=None),
    "smollm3-window": config("smollm3", use_sliding_window=True, sliding_window=6, no_rope_layers=[1, 0, 0, 1]),
    "cohere": cohere("cohere"),
    "cohere-normed": cohere("cohere", use_qk_norm=True, tie_word_embeddings=False, attention_bias=True),
    "cohere2": cohere("cohere2", sliding_window=7, sliding_window_pattern=2, use_parallel_block=True),
    "cohere2-layers": cohere("cohere2", sliding_window=5, layer_types=[SLIDING, FULL, FULL, SLIDING]),
    "llama4": llama4(no_rope_layer_interval=2, use_qk_norm=True),
    "llama4-plain": llama4(
        no_rope_layers=[1, 0, 1, 1],
        layer_types=["chunked_attention", FULL, FULL, "chunked_attention"],
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama4-yarn": llama4(
        no_rope_layers=[1, 1, 0, 1],
        use_qk_norm=True,
        rms_norm_eps=0.5,  # so large that norms before and after the factor of yarn differ
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
    ),
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kind, hidden = config["model_type"], config["hidden_size"]
    ffn = config.get("intermediate_size_mlp", config["intermediate_size"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    q, kv = heads * dim, kv_heads * dim
    biases = "attention_bias" if config.get("attention_bias") else ""
    mlp_biases = "mlp_bias" if config.get("mlp_bias") else ""
    layer: dict[str, tuple[int, ...]] = {}

    def add_linear(name: str, rows: int, columns: int, bias: str = "") -> None:
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)

    qkv = {"qkv": q + 2 * kv} if kind == "phi3" else {"q": q, "k": kv, "v": kv}
    for name, rows in qkv.items():
        add_linear(f"self_attn.{name}_proj", rows, hidden, biases)
    add_linear("self_attn.o_proj", hidden, q, biases)
    if kind == "granitemoehybrid":
        add_linear("shared_mlp.input_linear", 2 * ffn, hidden)
        add_linear("shared_mlp.output_linear", hidden, ffn)
    else:
        gate_up = {"gate_up": 2 * ffn} if kind == "phi3" else {"gate": ffn, "up": ffn}
        module = "feed_forward" if kind == "llama4_text" else "mlp"
        for name, rows in gate_up.items():
            add_linear(f"{module}.{name}_proj", rows, hidden, mlp_biases)
        add_linear(f"{module}.down_proj", hidden, ffn, mlp_biases)
    norms = {"cohere": ["input"], "cohere2": ["input"], "olmo2": ["post_attention", "post_feedforward"]}
    norms["olmo3"], norms["gemma2"] = norms["olmo2"], ["input", "pre_feedforward", *norms["olmo2"]]
    norms["gemma3_text"] = norms["gemma2"]
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in norms.get(kind, ["input", "post_attention"])}
    if kind in ("gemma3_text", "olmo2", "olmo3") or (kind == "cohere" and config.get("use_qk_norm")):
        per_head = {"gemma3_text": [(dim,), (dim,)], "cohere": [(heads, dim), (kv_heads, dim)]}
        sizes = per_head.get(kind, [(q,), (kv,)])
        layer |= {"self_attn.q_norm.weight": sizes[0], "self_attn.k_norm.weight": sizes[1]}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        out |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    out["model.norm.weight"] = (hidden,)
    is_tied = kind.startswith(("gemma", "cohere", "smollm"))  # by default
    return (
        out if config.get("tie_word_embeddings", is_tied) else out | {"lm_head.weight": (config["vocab_size"], hidden)}
    )


def tensors(config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random weights. Gemma stores norms without their 1."""
    offset = -1.0 if config["model_type"].startswith("gemma") else 0.0
    random = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=random)
        if "norm" in name:
            return 1 + offset + 0.2 * noise
        return noise * (2.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3)

    return {name: one(name, shape).to(dtype) for name, shape in shapes(config).items()}


def write(directory: Path, name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write the checkpoint of a name in CONFIGS, with changes of the config."""
    config = {**CONFIGS[name], **changes}
    tiny.write_tensors(directory, config, tensors(config, dtype=dtype))
    (directory / "config.json").write_text(json.dumps(config))  # with null, which may mean another value
    return directory
