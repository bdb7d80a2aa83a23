"""KVGroup: the groups of layers of published and odd configs, and what a sequence keeps in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.gpu.model import LLAMA_8B
from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.models.kv_groups import read_kv_groups

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "vocab_size": 151936,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_hidden_layers": 48, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "vocab_size": 262144,
}  # fmt: skip


def load(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    inner = config.get("text_config", config)
    inner |= changes
    return config


def test_scout_has_chunks_and_global_layers() -> None:
    chunks, full = read_kv_groups(load("llama-4-scout-17b-16e"))
    assert (chunks.kind, chunks.span, len(chunks.layers)) == ("chunk", 8192, 36)
    assert (full.kind, full.layers) == ("full", tuple(range(3, 48, 4)))
    assert (chunks.bytes_per_token + full.bytes_per_token, full.bytes_per_token) == (196_608, 49_152)
    assert chunks.max_tokens == 8192 + 64 and full.max_tokens is None
    assert chunks.sequence_bytes(10**6) == chunks.sequence_bytes(8256) == 8256 * 147_456
    assert chunks.sequence_bytes(65) == 128 * 147_456
    assert full.sequence_bytes(10**6) == 10**6 * 49_152  # a whole number of blocks


def test_latents_are_shared_by_all_heads() -> None:
    (kimi,) = read_kv_groups(load("kimi-k2.5"))
    assert (kimi.kind, kimi.kv_heads, kimi.bytes_per_token) == ("latent", 1, 70_272)
    assert read_kv_groups(load("kimi-k2.5"), "float8")[0].bytes_per_token == 35_136
    (lite,) = read_kv_groups(load("deepseek-v2-lite"))
    assert lite.bytes_per_token == 27 * 576 * 2


def test_windows_keep_blocks_and_the_one_in_progress() -> None:
    window, full = read_kv_groups(load("gpt-oss-20b"), block_size=32)
    assert (window.kind, window.span, window.max_tokens, len(window.layers)) == ("window", 128, 160, 12)
    assert full.bytes_per_token == window.bytes_per_token == 12 * 2 * 8 * 64 * 2
    (odd, _) = read_kv_groups(load("gpt-oss-20b", sliding_window=100), block_size=64)
    assert odd.max_tokens == 192
    gemma = read_kv_groups(GEMMA3)
    assert [(g.kind, len(g.layers), g.max_tokens) for g in gemma] == [("window", 22, 576), ("full", 4, None)]


def test_recurrent_layers_have_a_size_per_sequence() -> None:
    state, full = read_kv_groups(NEXT)
    matrices, inputs = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 4  # all in float32
    assert (state.kind, state.bytes_per_token, state.max_tokens) == ("state", 0, 0)
    assert state.bytes_per_sequence == state.sequence_bytes(10**6) == 36 * (matrices + inputs)
    assert full.layers == tuple(range(3, 48, 4)) and full.bytes_per_token == 12 * 2 * 2 * 256 * 2


def test_dense_models_have_one_group() -> None:
    (full,) = read_kv_groups(LLAMA_8B)
    assert (full.kind, full.bytes_per_token, full.layers) == ("full", 131_072, tuple(range(32)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (load("gpt-oss-20b", sliding_window=0), "sliding_window is '0'"),
        (GEMMA3 | {"sliding_window": 0}, "sliding_window is '0'"),
        (load("llama-4-scout-17b-16e", attention_chunk_size=0), "attention_chunk_size is '0'"),
        (load("llama-4-scout-17b-16e", attention_chunk_size=8200), "attention_chunk_size is 8200, which blocks of 64"),
        (load("kimi-k2.5", kv_lora_rank=511), "kv_lora_rank is '511'; it must be even"),
        (load("kimi-k2.5", qk_rope_head_dim=63), "qk_rope_head_dim is '63'; it must be even"),
        (load("gpt-oss-20b", layer_types=["full_attention"]), "a list of 24 layer types"),
        (load("kimi-k2.5", num_hidden_layers="61"), "num_hidden_layers is '61'"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError) as refused:
        read_kv_groups(config)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' cannot be planned"),
        (load("kimi-k2.5", index_topk=2048), "sets index_topk to '2048'"),
        (load("gpt-oss-20b", layer_types=["mamba"] * 24), "layer_types has 'mamba'"),
        ({**load("gpt-oss-20b"), "vision_config": {"hidden_size": 8}}, "sets vision_config"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_kv_groups(config)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "kimi-k2.5",
            {
                "auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001, "ep_size": 1, "n_group": 1, "topk_group": 1,
                "id2label": {"0": "LABEL_0"}, "is_decoder": False, "norm_topk_prob": True, "topk_method": "noaux_tc",
                "rope_scaling": {"type": "yarn"}, "routed_scaling_factor": 2.8, "scoring_func": "sigmoid",
                "seq_aux": True, "return_dict": True, "max_length": 20, "top_k": 50, "bos_token_id": 163584,
            },
        ),
        ("gpt-oss-20b", {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0}),
        ("llama-4-scout-17b-16e", {"rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "attention_dropout": 0.1}),
        ("deepseek-v2-lite", {"pretraining_tp": 1, "initializer_range": 0.02, "use_cache": True, "rms_norm_eps": 1e-6}),
    ],
)  # fmt: skip
def test_published_fields_without_sizes_are_accepted(name: str, fields: dict[str, Any]) -> None:
    assert read_kv_groups(load(name, **fields)) == read_kv_groups(load(name))


def test_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="kv_dtype is 'int3'"):
        read_kv_groups(LLAMA_8B, "int3")
