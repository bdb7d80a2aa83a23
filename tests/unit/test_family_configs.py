"""Configs of the families beyond Llama: as published, with unknown fields, and with values that are not supported."""

from __future__ import annotations

import math
from typing import Any

import pytest

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.models.attention_parts import AttentionParts, QueryTemperature
from emberline.models.config import ModelConfig
from emberline.models.decoder_parts import LLAMA_PARTS
from emberline.models.outline import LatentConfig

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 99}
SIZES |= {"num_key_value_heads": 4}
METADATA: dict[str, Any] = {  # fields of published files that change no logit
    "_name_or_path": "x",
    "attention_dropout": 0.1,
    "auto_map": {"AutoModel": "modeling.Model"},
    "bos_token_id": 1,
    "cache_implementation": "hybrid",
    "dtype": "bfloat16",
    "eos_token_id": [2],
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.0",
    "unsloth_fixed": True,
    "use_cache": True,
}


def read(model_type: str, **changes: Any) -> ModelConfig:
    base = {**SIZES, "model_type": model_type, "max_position_embeddings": 4096, **METADATA}
    return ModelConfig.from_hf({**base, **changes})


def test_gemma2_defaults() -> None:
    c = read("gemma2", hidden_act="gelu_pytorch_tanh", sliding_window_size=4096)
    assert c.windows == (4096, 0) * 4 and c.head_dim == 256 and c.tie_embeddings and not c.qk_norm
    p = c.parts
    assert (p.attention_softcap, p.logit_softcap, p.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (p.norms, p.norm_offset, p.activation, p.embedding_multiplier) == ("both", 1.0, "gelu_tanh", 8.0)
    none = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=None).parts
    assert (none.attention_softcap, none.logit_softcap) == (0.0, 0.0)


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_text_part_of_a_multimodal_config() -> None:
    c = ModelConfig.from_hf(GEMMA3_4B)
    assert (c.model_type, c.heads, c.kv_heads, c.head_dim, c.vocab) == ("gemma3_text", 8, 4, 256, 262208)
    assert (c.max_context, c.longest_context, c.eos) == (131072, 131072, (1, 106))
    assert c.windows == tuple(0 if layer % 6 == 5 else 1024 for layer in range(34))
    near, far = c.layer_rope(0), c.layer_rope(5)
    assert near is not None and far is not None
    assert (near.kind, near.theta, far.kind, far.theta, far.factor) == ("default", 1e4, "linear", 1e6, 8.0)
    with pytest.raises(ModelFileError, match="quantization_config: quant_method is missing"):
        ModelConfig.from_hf({**GEMMA3_4B, "quantization_config": {"bits": 4}})
    with pytest.raises(ModelFileError, match="text_config"):
        ModelConfig.from_hf({**GEMMA3_4B, "text_config": 3})


def test_phi3() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "type": "su"}
    c = read("phi3", sliding_window=2047, rope_scaling=factors, partial_rotary_factor=0.75, resid_pdrop=0.0)
    assert c.windows == (2047,) * 8 and c.rope.dim == 12
    assert (c.rope.kind, c.rope.original_context, c.rope.attention_factor) == ("longrope", 4096, 1.0)
    assert (c.parts.qkv_tensor, c.parts.gate_up_tensor) == ("self_attn.qkv_proj", "mlp.gate_up_proj")
    mini = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}  # of Phi-4-mini
    assert read("phi3", sliding_window=262144, **mini).windows == (262144,) * 8
    with pytest.raises(UnsupportedModel, match="full_attn_mod"):
        read("phi3", **{**mini, "full_attn_mod": 2})


def test_olmo() -> None:
    c = read("olmo2")
    assert (c.qk_norm, c.parts.norms, c.parts.qk_norm_kind, c.norm_eps) == (True, "post", "projection", 1e-5)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    c = read("olmo3", rope_scaling=yarn, rope_theta=500000)
    assert c.windows == (4096, 4096, 4096, 0) * 2 and c.max_context == 4096
    near, far = c.layer_rope(0), c.layer_rope(3)
    assert near is not None and far is not None and (near.kind, far.kind, near.theta) == ("default", "yarn", 500000.0)


def test_granite() -> None:
    scales = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    p = read("granite", **scales, logits_scaling=8.0).parts
    assert (p.embedding_multiplier, p.attention_scale, p.residual_multiplier) == (12.0, 0.015625, 0.22)
    assert p.logit_multiplier == 0.125
    dense = {"num_local_experts": 0, "shared_intermediate_size": 128, "layer_types": ["attention"] * 8, **scales}
    dense |= {"num_experts_per_tok": 0, "mamba_n_heads": 48, "normalization_function": "rmsnorm"}
    c = read("granitemoehybrid", position_embedding_type="rope", logits_scaling=6, **dense)
    assert (c.ffn, c.parts.unrotated_layers, c.parts.down_tensor) == (128, (), "shared_mlp.output_linear")
    assert read("granitemoehybrid", position_embedding_type="nope", **dense).parts.unrotated_layers == tuple(range(8))
    for change, word in (
        ({"layer_types": ["mamba"] * 8}, "mamba"),
        ({"layer_types": None}, "linear_attention"),
        ({"num_local_experts": 32}, "num_local_experts"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"normalization_function": "layernorm"}, "normalization_function"),
    ):
        with pytest.raises(UnsupportedModel, match=word):
            read("granitemoehybrid", position_embedding_type="rope", **{**dense, **change})


def test_smollm3() -> None:
    c = read("smollm3", layer_types=["full_attention"] * 8, use_sliding_window=False, max_window_layers=28)
    assert c.parts.unrotated_layers == (3, 7) and c.windows == (0,) * 8 and c.rope.theta == 2e6
    listed = read("smollm3", no_rope_layers=[1, 1, 0, 1, 1, 1, 0, 1])
    assert listed.parts.unrotated_layers == (2, 6) and listed.layer_rope(2) is None
    for value in ([1, 0], [1, 2] * 4, "none"):
        with pytest.raises(ModelFileError, match="no_rope_layers"):
            read("smollm3", no_rope_layers=value)
    with pytest.raises(UnsupportedModel, match="use_sliding_window"):
        read("smollm3", layer_types=["sliding_attention"] * 8, sliding_window=4)


def test_llama4() -> None:
    dense = {"moe_layers": [], "intermediate_size_mlp": 128, "no_rope_layers": []}
    c = read("llama4_text", **dense, interleave_moe_layer_step=1, num_experts_per_tok=1, attn_temperature_tuning=4)
    assert c.experts is not None and not any(c.experts.layers) and (c.experts.count, c.experts.chosen) == (16, 1)
    assert c.windows == (8192, 8192, 8192, 0) * 2 and c.parts.unrotated_layers == (3, 7) and c.ffn == 128
    assert not c.qk_norm and c.parts.interleaved_rope and c.rope.theta == 5e5
    temperature = QueryTemperature(8192.0, 0.1)
    expected = AttentionParts(chunked_windows=True, has_weightless_qk_norm=True, unrotated_temperature=temperature)
    assert c.parts.attention == expected and not c.parts.needs_portable_attention
    off = {"use_qk_norm": False, "attn_temperature_tuning": False, "layer_types": ["full_attention"] * 8}
    plain = read("llama4_text", **dense, **off, attention_chunk_size=None)
    assert plain.windows == (0,) * 8 and plain.parts.attention == AttentionParts(chunked_windows=True)
    for change in ({"attention_chunk_size": 0}, {"attention_chunk_size": None}, {"floor_scale": 0}):
        with pytest.raises(ModelFileError, match=next(iter(change))):
            read("llama4_text", **dense, **change)
    sparse = read("llama4_text", **dense | {"moe_layers": None}, interleave_moe_layer_step=2)
    assert sparse.experts is not None and sparse.experts.layers == (False, True) * 4
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        read("llama4_text", **dense, layer_types=["sliding_attention"] * 8)


SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


def test_llama4_scout() -> None:
    """Its context is longer than what is served by default."""
    c = ModelConfig.from_hf(SCOUT)
    assert (c.model_type, c.layers, c.eos) == ("llama4_text", 48, (200001, 200007, 200008))
    assert (c.max_context, c.longest_context, c.is_default_context_cut) == (1 << 20, 10485760, True)
    assert c.windows == (8192, 8192, 8192, 0) * 12 and c.parts.attention.unrotated_temperature is not None
    assert c.experts is not None and c.experts.layers == (True,) * 48 and c.experts.options.shared_ffn == 8192
    too_long = {**SCOUT["text_config"], "max_position_embeddings": (1 << 24) + 1}
    with pytest.raises(ModelFileError, match="max_position_embeddings"):
        ModelConfig.from_hf({**SCOUT, "text_config": too_long})


def test_deepseek() -> None:
    dense = {"first_k_dense_replace": 8}
    c = read("deepseek_v3", **dense, norm_topk_prob=True, scoring_func="sigmoid", moe_layer_freq=1)
    assert (c.heads, c.kv_heads, c.head_dim, c.rope.dim) == (4, 1, 576, 64) and c.parts.interleaved_rope
    assert c.parts.attention.latent == LatentConfig(512, 1536, rotary_dim=64, plain_dim=128, value_dim=128)
    assert c.parts.attention_scale == 192**-0.5 and c.parts.needs_portable_attention
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}
    rope = scaling | {"mscale_all_dim": 0.707}
    lite = read("deepseek_v2", **dense, q_lora_rank=None, num_experts_per_tok=6, rope_scaling=rope)
    assert lite.parts.attention.latent == LatentConfig(512, 0, rotary_dim=64, plain_dim=128, value_dim=128)
    factor = (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert lite.parts.attention_scale == pytest.approx(192**-0.5 * factor) and lite.rope.attention_factor == 1.0
    odd: tuple[dict[str, object], ...] = ({"kv_lora_rank": 511}, {"qk_rope_head_dim": 7})
    for change in (*odd, {"kv_lora_rank": 0}, {"num_key_value_heads": 2}, {"v_head_dim": "8"}):
        with pytest.raises(ModelFileError, match=next(iter(change))):
            read("deepseek_v3", **dense, **change)
    assert c.experts is not None and not any(c.experts.layers) and (c.experts.count, c.experts.chosen) == (256, 8)
    refused: tuple[dict[str, object], ...] = ({"attention_bias": True}, {"scoring_func": "softmax"})
    for change in refused:
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read("deepseek_v3", **{**dense, **change})
    with pytest.raises(UnsupportedModel, match="kv_lora_rank"):
        read("llama", kv_lora_rank=512)


DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
KIMI_ROPE = DEEPSEEK_R1["rope_scaling"] | {"factor": 64.0}
KIMI_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
KIMI_CHANGES = {
    "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "routed_scaling_factor": 2.827, "vocab_size": 163840, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": KIMI_ROPE,
    "quantization_config": KIMI_INT4,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_quantised_configs_as_published() -> None:
    r1 = ModelConfig.from_hf(DEEPSEEK_R1)
    assert (r1.model_type, r1.mtp_layers, r1.max_context) == ("deepseek_v3", 1, 163840)
    text = {**DEEPSEEK_R1, **KIMI_CHANGES}
    kimi = ModelConfig.from_hf({"model_type": "kimi_k25", "text_config": text, "vision_config": {"patch_size": 14}})
    assert (kimi.model_type, kimi.heads, kimi.max_context) == ("kimi_k2", 64, 262144)
    assert kimi.experts is not None and (kimi.experts.count, kimi.experts.options.groups) == (384, 1)
    oss = ModelConfig.from_hf(GPT_OSS_20B)
    assert oss.windows == (128, 0) * 12 and oss.parts.attention.has_sinks and oss.max_context == 131072


def test_cohere() -> None:
    c = read("cohere", logit_scale=0.8, use_qk_norm=True, model_max_length=131072)
    assert (c.parts.norms, c.parts.norm_kind, c.parts.qk_norm_kind, c.qk_norm) == (
        "shared",
        "layer",
        "head_layer",
        True,
    )
    assert c.parts.interleaved_rope and c.parts.logit_multiplier == 0.8 and c.tie_embeddings and c.rope.theta == 5e5
    published = {"use_parallel_block": True, "rotary_pct": 1.0, "layer_switch": 4, "use_gated_activation": True}
    published |= {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"}
    c = read("cohere2", sliding_window_pattern=4, rope_theta=50000, **published)
    assert c.windows == (4096, 4096, 4096, 0) * 2 and c.parts.unrotated_layers == (3, 7)
    assert math.isclose(c.parts.logit_multiplier, 0.0625) and not c.qk_norm
    for name, value in (("use_parallel_block", False), ("rotary_pct", 0.5)):
        with pytest.raises(UnsupportedModel, match=name):
            read("cohere2", **{**published, name: value})


@pytest.mark.parametrize(
    "model_type", ["gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "granite", "smollm3", "cohere"]
)
def test_unknown_fields_are_refused_by_name(model_type: str) -> None:
    assert (
        read(model_type, some_factor=None, some_flag=False, some_list=[]).parts != LLAMA_PARTS or model_type == "phi3"
    )
    for change in ({"some_factor": 1.5}, {"some_flag": True}, {"some_kind": "alibi"}, {"some_map": {"a": 1}}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))) as e:
            read(model_type, **change)
        assert "remove it from config.json" in str(e.value.hint)
    with pytest.raises(UnsupportedModel, match="mrope_section"):
        read(model_type, rope_scaling={"rope_type": "default", "mrope_section": [1, 2]})


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {"logit_scale": 0.5}),
        ("mistral", {"attn_logit_softcapping": 50.0}),
        ("qwen2", {"no_rope_layers": [1, 0]}),
        ("qwen3", {"residual_multiplier": 0.3}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),  # transformers ignores it
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("olmo2", {"sliding_window": 7}),
        ("olmo2", {"partial_rotary_factor": 0.5}),
        ("olmo3", {"rope_theta": 1e4}),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}),
        ("llama", {"partial_rotary_factor": 0.5}),  # transformers ignores it
        ("qwen3_moe", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("olmo2", {"mlp_bias": True}),
        ("phi3", {"attention_bias": True}),
        ("cohere2", {"use_qk_norm": True}),
        ("granite", {"head_factor": 2}),
    ],
    ids=str,
)
def test_fields_of_other_families_are_refused(model_type: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read(model_type, **change)


def test_unknown_fields_of_the_first_families_are_accepted() -> None:
    """Their published configs carry many fields of the tools that wrote them."""
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        fields = {"is_llama_config": True, "my_run": 7, "rope_interleaved": False, "moe_intermediate_size": 8}
        assert read(model_type, **fields).parts == LLAMA_PARTS


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gemma2", {"hidden_activation": "relu"}),
        ("cohere", {"hidden_act": "gelu"}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("granite", {"architectures": ["GraniteForTokenClassification"]}),
    ],
    ids=str,
)
def test_unsupported(model_type: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        read(model_type, **change)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"final_logit_softcapping": 0.0}),
        ("gemma3_text", {"sliding_window_pattern": 0}),
        ("granite", {"logits_scaling": 0}),
        ("granite", {"attention_multiplier": "1"}),
        ("cohere", {"logit_scale": -1.0}),
        ("cohere2", {"layer_types": ["full_attention"]}),
        ("smollm3", {"no_rope_layer_interval": 0}),
    ],
    ids=str,
)
def test_invalid(model_type: str, change: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        read(model_type, **change)
