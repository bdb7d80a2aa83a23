"""ModelConfig from config.json: read as transformers does, or a typed error. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.errors import ModelError, ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.textmodel import select_text_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_llama() -> None:
    c = read()
    assert (c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn) == (576, 4, 9, 3, 64, 1536)
    assert (c.vocab, c.max_context, c.norm_eps, c.tie_embeddings) == (49152, 8192, 1e-5, True)
    assert (c.eos, c.windows) == ((2, 7), (0, 0, 0, 0))
    assert not (c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm)
    assert (c.rope.kind, c.rope.theta, c.rope.dim) == ("default", 100000.0, 64)


def test_null_is_absent() -> None:
    c = read(num_key_value_heads=None, head_dim=None, rope_scaling=None, bos_token_id=None, eos_token_id=None)
    assert (c.kv_heads, c.head_dim, c.eos) == (9, 64, ())


def test_biases_and_norms_by_architecture() -> None:
    def parts(model_type: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        c = read(model_type=model_type, architectures=None, **changes)
        return c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm

    assert parts("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert parts("mistral", attention_bias=True) == (False, False, False, False)
    assert parts("qwen2") == (True, False, False, False)
    assert parts("qwen3") == (False, False, False, True)
    assert parts("qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 5}, (0, 0, 0, 0)),
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5, 5, 5)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, (0, 0, 0, 0)),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 5),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 5, 0, 5),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(architectures=None, **changes).windows == windows


def test_old_and_new_rope_fields_mean_the_same() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}
    new = read(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 100000.0, **numbers})
    assert read(rope_scaling={"rope_type": "llama3", **numbers}) == new
    assert read(rope_scaling={"type": "llama3", **numbers}) == new
    assert (new.rope.low_freq, new.rope.high_freq, new.rope.original_context) == (1.0, 4.0, 4096)


@pytest.mark.parametrize(
    ("scaling", "served", "longest"),
    [
        (None, 8192, 8192),
        ({"type": "linear", "factor": 2.0}, 16384, 16384),
        ({"type": "dynamic", "factor": 2.0}, 8192, 16384),
        ({"type": "yarn", "factor": 4.0}, 32768, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192, 8192),
    ],
)
def test_default_and_largest_context(scaling: dict[str, Any] | None, served: int, longest: int) -> None:
    c = read(rope_scaling=scaling)
    assert (c.max_context, c.longest_context) == (served, longest)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}


def test_experts() -> None:
    mixtral = read(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2).experts
    assert mixtral == ExpertsConfig(8, 2, 1536, renormalised=True, layers=(True,) * 4)
    qwen = read(model_type="qwen3_moe", **EXPERTS).experts
    assert qwen == ExpertsConfig(8, 2, 768, renormalised=False, layers=(True,) * 4)
    new = EXPERTS | {"num_experts": None, "num_local_experts": 8}  # as transformers 5 writes it
    assert read(model_type="qwen3_moe", **new).experts == qwen
    some = read(model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True, **EXPERTS)
    assert some.experts is not None and some.experts.layers == (False, True, False, False)
    assert some.experts.renormalised and some.qk_norm and read().experts is None


UNSUPPORTED = [
    {"model_type": "mamba2"},
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "gelu_pytorch_tanh"},
    {"model_type": "qwen3_moe", **EXPERTS, "shared_expert_intermediate_size": 512},
    {"model_type": "mamba2"},
    {"architectures": ["LlamaForSequenceClassification"]},
    {"hidden_act": "gelu"},
    {"quantization_config": {"quant_method": "hqq"}},
    {"num_local_experts": 8},
    {"kv_lora_rank": 512},
    {"rope_scaling": {"rope_type": "mrope"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    {"model_type": "mistral", "sliding_window": 4, "layer_types": ["chunked_attention"] * 4},
]
WRONG = [
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
    {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 0},
    {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": ["1"]},
    {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": 1},
    {"hidden_size": None},
    {"hidden_size": -576},
    {"hidden_size": 1 << 40},
    {"hidden_size": "576"},
    {"hidden_size": 576.0},
    {"hidden_size": True},
    {"hidden_size": 577},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**9},
    {"num_key_value_heads": 2},
    {"head_dim": 63},
    {"model_type": 3},
    {"model_type": None},
    {"architectures": "LlamaForCausalLM"},
    {"rms_norm_eps": "tiny"},
    {"rms_norm_eps": float("nan")},
    {"rms_norm_eps": float("inf")},
    {"rope_theta": -1.0},
    {"rope_theta": 10**400},
    {"vocab_size": 1 << 50},
    {"max_position_embeddings": 1 << 30},
    {"tie_word_embeddings": "yes"},
    {"eos_token_id": "</s>"},
    {"eos_token_id": [-1]},
    {"attention_bias": 1},
    {"partial_rotary_factor": 0.0},
    {"partial_rotary_factor": 2},
    {"rope_scaling": []},
    {"rope_scaling": {"rope_type": "linear"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
    {"rope_scaling": {"rope_type": "linear", "factor": 1e15}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 31 + [0], "long_factor": [1.0] * 32}},
    {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"]},
    {"model_type": "mistral", "sliding_window": 0},
]


@pytest.mark.parametrize("changes", UNSUPPORTED, ids=str)
def test_unsupported_configs(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as e:
        read(**changes)
    assert any(word in str(e.value) for word in (*changes, "rope", "layers", "causal"))


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: str(changes)[:60])
def test_invalid_configs(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        read(**changes)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=4,
)
ROPE_NAMES = st.sampled_from(["factor", "beta_fast", "attention_factor", "short_factor", "rope_theta", "mscale"])
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]) | JUNK}
).flatmap(lambda rope: st.dictionaries(ROPE_NAMES, JUNK).map(lambda more: {**rope, **more}))
OTHERS = ["head_dim", "sliding_window", "layer_types", "rope_parameters", "attention_bias", "partial_rotary_factor"]


@given(st.dictionaries(st.sampled_from([*LLAMA, *OTHERS]), JUNK, max_size=3), st.none() | ROPE)
def test_random_config_parses_or_raises_typed_error(changes: dict[str, Any], rope: Any) -> None:
    try:
        c = read(**{"rope_scaling": rope, **changes})
    except ModelError:
        return
    assert c.heads % c.kv_heads == 0 and len(c.windows) == c.layers and c.max_context <= c.longest_context


def test_model_type_that_is_a_list_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="it must be a string"):
        select_text_model(Checkpoint(tmp_path, {"model_type": ["llama"]}, {}, {}, {}))
