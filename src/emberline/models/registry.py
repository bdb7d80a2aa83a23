"""The supported architectures by model_type. Each is described by its differences from Llama 1.

All of them use the same tensor names, except for experts. A rule of an architecture (for example: does a layer have a
bias?) is True, False, or the name of the config.json field that decides.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The tensor names of a mixture of experts in a layer, and the config.json fields that describe it."""

    module: str
    gate: str
    up: str
    down: str
    ffn_field: str  # field with the inner width of one expert
    renormalised: bool | str


@dataclass(frozen=True, slots=True)
class Architecture:
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: bool | str = False  # whether sliding_window applies
    experts: ExpertsSpec | None = None


ARCHITECTURES = {
    "llama": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(window=True),
    "qwen2": Architecture(qkv_bias=True, window="use_sliding_window"),
    "qwen3": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="use_sliding_window"
    ),
    "mixtral": Architecture(
        window=True, experts=ExpertsSpec("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", renormalised=True)
    ),
    "qwen3_moe": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="use_sliding_window",
        experts=ExpertsSpec("mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size", "norm_topk_prob"),
    ),
}
