"""GGUF files of all families that llama.cpp converts give the logits of the checkpoints they were made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import pytest
import random_checkpoints
import tiny_experts
import tiny_families
import torch
from paged_model import Cache, prompts
from safetensors.torch import load_file
from tiny import write_tensors

from emberline.core.errors import UnsupportedModel
from emberline.hub.convert import convert_gguf
from emberline.models.loader import load_decoder

YARN = random_checkpoints.YARN
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0}
SCALED |= {"beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7, "rope_theta": 10000.0}
OLMO3_YARN = {name: value for name, value in YARN.items() if name not in ("rope_theta", "truncate")}
OLMO3 = {"sliding_window": 7, "rope_theta": 5e5, "rope_scaling": OLMO3_YARN}
FULL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
SCOUT_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192}
SCOUT_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
# What llama.cpp's files do not say is as in the published models.
LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "intermediate_size": 40, **FULL_ROPE}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", tiny_families.gemma2(query_pre_attn_scalar=8, rope_theta=10000.0)),
    "phi3": ("phi3", tiny_families.phi3(sliding_window=9, head_dim=None)),
    "phi3-longrope": ("phi3", tiny_families.CONFIGS["phi3-longrope"]),
    "olmo2": ("olmo2", tiny_families.CONFIGS["olmo2"]),
    "olmo3": ("olmo2", tiny_families.config("olmo3", **OLMO3)),
    "granite": ("granite", tiny_families.granite("granite", tie_word_embeddings=True, head_dim=None)),
    "smollm3": ("smollm3", tiny_families.config("smollm3", no_rope_layer_interval=4)),
    "cohere": ("command-r", tiny_families.cohere("cohere")),
    "cohere-normed": ("command-r", tiny_families.cohere("cohere", use_qk_norm=True)),
    "cohere2": ("cohere2", tiny_families.cohere("cohere2", sliding_window=7, sliding_window_pattern=4)),
    "granitemoe": ("granitemoe", tiny_experts.granite("granitemoe")),
    "glm4": ("glm4moe", tiny_experts.CONFIGS["glm4"]),
    "glm4-groups": ("glm4moe", tiny_experts.CONFIGS["glm4-groups"]),
    "qwen2-moe": ("qwen2moe", tiny_experts.CONFIGS["qwen2-moe"]),
    "olmoe": ("olmoe", tiny_experts.CONFIGS["olmoe"]),
    "dots1": ("dots1", tiny_experts.CONFIGS["dots1"] | {"sliding_window": None}),
}
RANDOM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek-v2": ("deepseek2", "deepseek-v2", {}),
    "deepseek-v2-lite": ("deepseek2", "deepseek-v2-lite", {"rope_parameters": SCALED}),
    "deepseek-v3": ("deepseek2", "deepseek-v3", {"rope_parameters": SCALED}),
    "llama4": ("llama4", "llama4", LLAMA4),
    "llama4-scout": ("llama4", "llama4-all-layers", LLAMA4 | {"use_qk_norm": True, "rope_parameters": SCOUT_ROPE}),
    "gpt-oss": ("gpt-oss", "gpt-oss", {}),
}


def write_checkpoint(directory: Path, name: str) -> tuple[str, Path]:
    """Write a checkpoint and return the name of its architecture in GGUF files."""
    if name in RANDOM:
        arch, case, changes = RANDOM[name]
        random_checkpoints.write(directory, case, **changes)
        return arch, directory
    arch, config = FAMILIES[name]
    module = tiny_experts if config["model_type"] in tiny_experts.CLASSES else tiny_families
    return arch, write_tensors(directory, config, module.tensors(config))


@pytest.mark.parametrize("name", [*FAMILIES, *RANDOM])
def test_converted_family_is_the_same(name: str, tmp_path: Path) -> None:
    arch, original = write_checkpoint(tmp_path / "original", name)
    config, tensors = json.loads((original / "config.json").read_text()), load_file(original / "model.safetensors")
    if arch == "deepseek2":  # llama.cpp drops the layers that predict further tokens
        config["num_nextn_predict_layers"] = 0
    if config.get("num_nextn_predict_layers"):
        tensors |= tiny_experts.mtp_layer(config, config["num_hidden_layers"])
    file = gguf_families.write(tmp_path / "m.gguf", arch, config, tensors)
    expected, found = load_decoder(original), load_decoder(convert_gguf(file, tmp_path / "out"))
    assert found.config == replace(expected.config, mtp_layers=0)
    tokens = prompts(30)
    assert torch.equal(Cache(found, tokens).step([30]), Cache(expected, tokens).step([30]))


@pytest.mark.parametrize(
    ("name", "key", "value", "word"),
    [
        ("glm4", "expert_gating_func", 1, "glm4moe.expert_gating_func is 1"),
        ("deepseek-v3", "expert_gating_func", 9, "deepseek2.expert_gating_func is 9"),
        ("granite", "rope.scaling.finetuned", False, "'granite' without rotary embedding"),
        ("llama4", "attention.sliding_window", 0, "'llama4' without chunks"),
        ("deepseek-v3", "tokenizer.ggml.pre", "glm4", "'deepseek2' of a GLM model"),
        ("deepseek-v3", "tokenizer.ggml.pre", "deepseek-llm", "pre-tokenizer 'deepseek-llm'"),
    ],
)
def test_uncertain_files_are_refused(name: str, key: str, value: Any, word: str, tmp_path: Path) -> None:
    arch, original = write_checkpoint(tmp_path / "original", name)
    config, tensors = json.loads((original / "config.json").read_text()), load_file(original / "model.safetensors")
    file = gguf_families.write(tmp_path / "m.gguf", arch, config, tensors, {key: value})
    with pytest.raises(UnsupportedModel, match=word):
        convert_gguf(file, tmp_path / "out")


def test_quantised_latents_are_joined(tmp_path: Path) -> None:
    """llama.cpp stores the keys transposed, so that a block of a quantised tensor is of one key's numbers."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 8}
    random_checkpoints.write(tmp_path / "original", "deepseek-v3", **sizes)
    config = json.loads((tmp_path / "original" / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    file = gguf_families.write(tmp_path / "m.gguf", "deepseek2", config, tensors, quantised=("attn_k_b", "attn_v_b"))
    found = load_file(convert_gguf(file, tmp_path / "out") / "model.safetensors")
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    keys, values = tensors[name].view(6, 40, 32).split([32, 8], dim=1)
    kind = gguf.GGMLQuantizationType.Q8_0
    exact = [
        torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(part.contiguous().numpy(), kind), kind))
        for part in (keys.transpose(1, 2), values)
    ]
    expected = torch.cat([exact[0].transpose(1, 2), exact[1]], dim=1).reshape(240, 32)
    assert torch.equal(found[name], expected.to(torch.bfloat16))
