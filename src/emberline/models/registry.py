"""The architectures we run, by model_type: how each departs from Llama 1. Torch-free.

All of them name their tensors alike. A string is the field of config.json that decides; True and False are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: bool | str = False  # whether sliding_window counts


ARCHITECTURES = {
    "llama": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(window=True),
    "qwen2": Architecture(qkv_bias=True, window="use_sliding_window"),
    "qwen3": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="use_sliding_window"
    ),
}
