"""Tiny random checkpoints of Qwen3-Next and Qwen3.5, written by transformers itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
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
        values = torch.randn(tensor.shape, generator=random)
        if "A_log" in part or "dt_bias" in part:
            tensor.copy_(values)
        elif "norm" in part:
            tensor.copy_(values * 0.2 + ("linear_attn.norm" in part))
        else:
            tensor.copy_(values * 2.0 / tensor.shape[-1] ** 0.5)


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
