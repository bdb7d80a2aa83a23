"""FamilyCase: every model family as a tiny random checkpoint in bfloat16, and the settings of an engine for it.

The cases of `WIDE` have head sizes for which there are CUDA kernels, and prompts longer than windows and chunks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import random_checkpoints
import tiny
import tiny_deepseek
import tiny_delta
import tiny_experts
import tiny_families
import tiny_fused_experts
import torch

BF16 = torch.bfloat16
SMALL_SETTINGS = {"max_running": 4, "max_batch_tokens": 32, "max_context": 64, "kv_tokens": 1024, "block_size": 16}
SMALL_SETTINGS |= {"graphs": False}
WIDE_SETTINGS = {"max_running": 8, "max_batch_tokens": 256, "max_context": 1024, "kv_tokens": 8192}
WIDE_LENGTHS = (700, 257, 130, 64, 20)


@dataclass(frozen=True)
class FamilyCase:
    write: Callable[[Path], object]  # writes the checkpoint to a directory
    lengths: tuple[int, ...] = (50, 37, 21, 20)  # of the prompts
    settings: dict[str, Any] = field(default_factory=lambda: SMALL_SETTINGS)  # of the engine
    is_wide: bool = False


def write_saved(write: Callable[..., Any], *arguments: Any, directory: Path, **changes: Any) -> None:
    """Save the model of transformers that `write` returns again, in bfloat16."""
    write(directory, *arguments, **changes).to(BF16).save_pretrained(directory)


def write_config(directory: Path, family: Any, config: tiny.Config) -> None:
    """Write random tensors for the config. `family`: the module that makes them."""
    tiny.write_tensors(directory, config, family.tensors(config, dtype=BF16))
    (directory / "config.json").write_text(json.dumps(config))  # with null, which may mean another value


def saved(write: Callable[..., Any], *arguments: Any, **changes: Any) -> Callable[[Path], object]:
    return lambda directory: write_saved(write, *arguments, directory=directory, **changes)


def made(family: Any, config: tiny.Config) -> Callable[[Path], object]:
    return partial(write_config, family=family, config=config)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}  # gpt-oss has YaRN otherwise
SMALL: dict[str, FamilyCase] = {
    **{name: FamilyCase(made(tiny, config)) for name, config in tiny.CONFIGS.items()},
    **{name: FamilyCase(made(tiny_families, config)) for name, config in tiny_families.CONFIGS.items()},
    **{name: FamilyCase(made(tiny_experts, config)) for name, config in tiny_experts.CONFIGS.items()},
    **{
        f"{name}-stacked": FamilyCase(made(tiny_fused_experts, config | ROPE))
        for name, config in tiny_fused_experts.CONFIGS.items()
    },
    **{f"{name}-experts": FamilyCase(saved(random_checkpoints.write, name)) for name in random_checkpoints.CASES},
    **{
        f"deepseek-{name}-dense": FamilyCase(partial(tiny_deepseek.write_deepseek, name=name, dtype=BF16))
        for name in tiny_deepseek.DEEPSEEK
    },
    **{f"delta-{name}": FamilyCase(saved(tiny_delta.write, name)) for name in tiny_delta.CASES},
}

HEAD_64 = tiny.GPU_SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 1024}
HEAD_128 = HEAD_64 | {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
HEAD_256 = HEAD_128 | {"head_dim": 256}
WITHOUT_HEAD_DIM = HEAD_64 | {"hidden_size": 512, "head_dim": None}  # 8 heads of 64
# With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
LLAMA4 = {"attention_chunk_size": 128, "intermediate_size_mlp": 512}
MLA = tiny_deepseek.LITE_SIZES | {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
MLA |= {"max_position_embeddings": 1024, "vocab_size": 1000, "head_dim": 64}
DELTA = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 1000}
DELTA |= {"max_position_embeddings": 1024, "linear_key_head_dim": 64, "linear_value_head_dim": 64}

WIDE_CONFIGS: dict[str, tuple[Any, tiny.Config]] = {
    "llama-128": (tiny, tiny.config("llama", **HEAD_128)),
    "mistral-128": (tiny, tiny.config("mistral", **HEAD_128, sliding_window=100)),
    "qwen2-window-64": (
        tiny,
        tiny.config("qwen2", **HEAD_64, use_sliding_window=True, sliding_window=100, max_window_layers=1),
    ),
    "qwen3-128": (tiny, tiny.config("qwen3", **HEAD_128)),
    "mixtral-128": (tiny, tiny.config("mixtral", **HEAD_128, **EXPERTS)),
    "qwen3-moe-64": (
        tiny,
        tiny.config("qwen3_moe", **HEAD_64, num_experts=16, num_experts_per_tok=3, moe_intermediate_size=128),
    ),
    "glm4-128": (tiny_experts, tiny_experts.glm4(**HEAD_128, attention_bias=True, use_qk_norm=True)),
    "gemma2-256": (tiny_families, tiny_families.gemma2(**HEAD_256, **UNTIED, sliding_window=100)),
    "gemma2-128": (tiny_families, tiny_families.gemma2(**HEAD_128, **UNTIED, sliding_window=130)),
    "gemma3-256": (tiny_families, tiny_families.gemma3(**HEAD_256, **UNTIED, sliding_window=100)),
    "phi3-96": (tiny_families, tiny_families.phi3(**HEAD_64 | {"head_dim": 96}, sliding_window=150)),
    "olmo2-128": (tiny_families, tiny_families.config("olmo2", **HEAD_128)),
    # transformers ignores another rope_theta than 500000 for layers with a window.
    "olmo3-128": (tiny_families, tiny_families.config("olmo3", **HEAD_128, sliding_window=130, rope_theta=500000.0)),
    "granite-64": (tiny_families, tiny_families.granite("granite", **HEAD_64)),
    "smollm3-window-64": (
        tiny_families,
        tiny_families.config(
            "smollm3", **HEAD_64, **UNTIED, use_sliding_window=True, sliding_window=70, no_rope_layers=[1, 0, 0, 1]
        ),
    ),
    "cohere-64": (tiny_families, tiny_families.cohere("cohere", **WITHOUT_HEAD_DIM, **UNTIED)),
    "cohere2-64": (
        tiny_families,
        tiny_families.cohere("cohere2", **WITHOUT_HEAD_DIM, **UNTIED, sliding_window=90, sliding_window_pattern=2),
    ),
    "llama4-128": (tiny_families, tiny_families.llama4(**HEAD_128, **LLAMA4, no_rope_layer_interval=2)),
    "llama4-stacked-128": (
        tiny_fused_experts,
        tiny_fused_experts.CONFIGS["llama4"] | HEAD_128 | LLAMA4 | {"intermediate_size": 128},
    ),
    "gpt-oss-stacked-64": (
        tiny_fused_experts,
        tiny_fused_experts.CONFIGS["gpt-oss"] | HEAD_64 | {"sliding_window": 128, "intermediate_size": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, **ROPE},
    ),
}  # fmt: skip
WIDE_WRITERS: dict[str, Callable[[Path], object]] = {
    **{name: made(family, config) for name, (family, config) in WIDE_CONFIGS.items()},
    **{
        f"deepseek-{name}-576": partial(tiny_deepseek.write_deepseek, name=name, dtype=BF16, **MLA)
        for name in ("v2-lite", "v3")
    },
    **{f"delta-{name}-128": saved(tiny_delta.write, name, **DELTA) for name in ("next", "dense")},
}
WIDE = {name: FamilyCase(write, WIDE_LENGTHS, WIDE_SETTINGS, is_wide=True) for name, write in WIDE_WRITERS.items()}
CASES = {**WIDE, **SMALL}
