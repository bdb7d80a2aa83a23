"""Tiny random checkpoints of Qwen3-Next and Qwen3.5, written by transformers itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

BASE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "intermediate_size": 80, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "rms_norm_eps": 5e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 20}
LINEAR, FULL = "linear_attention", "full_attention"
# The class, and what differs from BASE, whose epsilon is so large that norms do not amplify rounding errors. Widths are
# such that kernels compute whole vectors, single ones and single numbers.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("Qwen3Next", EXPERTS),
    "next-mixed": (
        "Qwen3Next",
        EXPERTS
        | {
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "layer_types": [FULL, LINEAR, FULL, LINEAR],
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "attention_bias": True,
            "num_key_value_heads": 6,
        },
    ),
    "next-sparse-step": ("Qwen3Next", EXPERTS | {"decoder_sparse_step": 2, "linear_num_key_heads": 1}),
    "dense": ("Qwen3_5", {"linear_value_head_dim": 134, "linear_key_head_dim": 17, "tie_word_embeddings": True}),
    "dense-wide-rotation": (
        "Qwen3_5",
        {
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, FULL, LINEAR],
            "linear_conv_kernel_dim": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
    ),
    "moe": ("Qwen3_5Moe", EXPERTS | {"linear_conv_kernel_dim": 6, "num_key_value_heads": 1}),
}  # fmt: skip


def make_config(name: str) -> dict[str, Any]:
    """Return the config.json of a case."""
    family, fields = CASES[name]
    kinds = {"Qwen3Next": "qwen3_next", "Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text"}
    return BASE | fields | {"model_type": kinds[family], "architectures": [f"{family}ForCausalLM"]}


def write(directory: Path, name: str, **changes: Any) -> Any:
    """Write a checkpoint and return the model of transformers. `changes`: other values of its config."""
    transformers = pytest.importorskip("transformers")
    family, fields = CASES[name]
    config_name = "Qwen3NextConfig" if family == "Qwen3Next" else f"{family}TextConfig"
    config = getattr(transformers, config_name)(**BASE | fields | changes, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def write_random(
    directory: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32, *, has_head: bool = False
) -> Path:
    """Write a checkpoint of a config.json, without transformers. `has_head`: for multi-token prediction."""
    random, shapes = torch.Generator().manual_seed(1), list_shapes(config)
    shapes |= list_head_shapes(config) if has_head else {}
    drawn = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    tensors = {name: scale_values(name, values).to(dtype) for name, values in drawn.items()}
    return tiny.write_tensors(directory, config, tensors)


def list_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a config, whose layers all have experts or none has."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv, key_heads = config["num_key_value_heads"] * dim, config["linear_num_key_heads"]
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values, keys = value_heads * value_dim, key_heads * config["linear_key_head_dim"]
    channels, vocabulary = 2 * keys + values, (config["vocab_size"], hidden)
    grouped = config["model_type"] == "qwen3_next"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = vocabulary
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norms = {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        if (layer + 1) % 4:
            at += ".linear_attn."
            inputs = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads}
            if grouped:
                inputs = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * value_heads}
            mixer = {f"{at}{name}.weight": (rows, hidden) for name, rows in inputs.items()}
            mixer |= {f"{at}conv1d.weight": (channels, 1, config.get("linear_conv_kernel_dim", 4))}
            mixer |= {f"{at}A_log": (value_heads,), f"{at}dt_bias": (value_heads,), f"{at}norm.weight": (value_dim,)}
            mixer |= {f"{at}out_proj.weight": (hidden, values)}
        else:
            rows = {"q_proj": 2 * heads * dim, "k_proj": kv, "v_proj": kv}
            mixer = {f"{at}.self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
            mixer |= {f"{at}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
            mixer |= {f"{at}.self_attn.o_proj.weight": (hidden, heads * dim)}
        shapes |= norms | mixer | _list_ffn_shapes(config, f"model.layers.{layer}.mlp")
    return shapes


def list_head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a head for multi-token prediction, whose layer is like the last of the model."""
    hidden, layer = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    found = list_shapes(config).items()
    return shapes | {name.replace(layer, "mtp.layers.0."): shape for name, shape in found if name.startswith(layer)}


def _list_ffn_shapes(config: Mapping[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]

    def gated(prefix: str, ffn: int) -> dict[str, tuple[int, ...]]:
        shapes = {f"{prefix}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        return shapes | {f"{prefix}.down_proj.weight": (hidden, ffn)}

    if not (count := config.get("num_experts", 0)):
        return gated(at, config["intermediate_size"])
    shapes = gated(f"{at}.shared_expert", config["shared_expert_intermediate_size"])
    shapes |= {f"{at}.gate.weight": (count, hidden), f"{at}.shared_expert_gate.weight": (1, hidden)}
    for expert in range(count):
        shapes |= gated(f"{at}.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def compute_logits(model: Any, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of transformers, computed token by token: its rule for chunks has larger rounding errors."""
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        return [model(torch.tensor([ids])).logits[0] for ids in tokens]


def randomize(model: Any) -> None:
    """Set all weights of a model of transformers."""
    random = torch.Generator().manual_seed(1)
    for part, tensor in model.state_dict().items():
        tensor.copy_(scale_values(part, torch.randn(tensor.shape, generator=random)))


def scale_values(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return random values in the range that a tensor of this name has."""
    if "A_log" in name or "dt_bias" in name:
        return values
    if "norm" in name:
        return values * 0.2 + ("linear_attn.norm" in name)
    return values * 2.0 / values.shape[-1] ** 0.5


def write_with_images(directory: Path, name: str) -> Any:
    """Write a checkpoint as Qwen3.5 is published: with an image encoder and layers for multi-token prediction."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    family, fields = CASES[name]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"patch_size": 4, "num_position_embeddings": 16}
    config = getattr(transformers, f"{family}Config")(
        text_config=BASE | fields, vision_config=vision, tie_word_embeddings=fields.get("tie_word_embeddings", False)
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    assert any(part.startswith("model.visual.") for part in tensors)
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((directory / "config.json").read_text())
    published["text_config"] |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mlp_only_layers": []}
    published["text_config"] |= {"mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False}
    (directory / "config.json").write_text(json.dumps(published))
    return model
