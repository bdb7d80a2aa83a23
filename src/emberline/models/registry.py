"""The supported architectures by model_type. Each is described by its differences from Llama 1.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any

from emberline.models import experts_spec
from emberline.models.architecture import Architecture

LLAMA_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
GEMMA2 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    window=True,
    window_pattern=2,
    norms="both",
    norm_offset=1.0,
    activation_field="hidden_activation",
    ignored_fields=("hidden_act", "sliding_window_size"),
    scaled_embedding=True,
    turn_end_tokens=("<end_of_turn>",),
    attention_scalar_field="query_pre_attn_scalar",
    attention_softcap_field="attn_logit_softcapping",
    logit_softcap_field="final_logit_softcapping",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    window=True,
    window_pattern=6,
    window_pattern_field="sliding_window_pattern",
    norms="both",
    norm_offset=1.0,
    activation_field="hidden_activation",
    ignored_fields=("hidden_act", "_sliding_window_pattern"),
    has_local_rope=True,
    local_theta_field="rope_local_base_freq",
    has_final_max_position=True,
    scaled_embedding=True,
    turn_end_tokens=("<end_of_turn>",),
    attention_scalar_field="query_pre_attn_scalar",
    logit_softcap_field="final_logit_softcapping",
    defaults={  # the text_config of a multimodal config.json has only the fields with other values than these
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
)
OLMO2 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    qk_norm_kind="projection",
    norms="post",
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    qk_norm_kind="projection",
    norms="post",
    window=True,
    window_pattern=4,
    has_local_rope=True,
    local_theta_field="rope_theta",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
)
GRANITE: dict[str, Any] = {
    "embedding_multiplier_field": "embedding_multiplier",
    "attention_multiplier_field": "attention_multiplier",
    "residual_multiplier_field": "residual_multiplier",
    "logit_divisor_field": "logits_scaling",
}
GRANITE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_MOE: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    **GRANITE,
    "defaults": GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
}
COHERE: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "norms": "shared",
    "norm_kind": "layer",
    "norm_eps_field": "layer_norm_eps",
    "interleaved_rope": True,
    "logit_multiplier_field": "logit_scale",
    "turn_end_tokens": ("<|END_OF_TURN_TOKEN|>",),
}
COHERE_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
DEEPSEEK: dict[str, Any] = {
    "latent_attention": True,
    "ignored_fields": ("qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "num_local_experts"),
}
DEEPSEEK_DEFAULTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
DEEPSEEK_DEFAULTS |= {"v_head_dim": 128}
DEEPSEEK_V3 = Architecture(
    **DEEPSEEK,
    interleaved_rope="rope_interleave",
    experts=experts_spec.DEEPSEEK_V3,
    mtp_layers_field="num_nextn_predict_layers",
    fixed_fields={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "num_mtp_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    defaults=DEEPSEEK_DEFAULTS
    | {
        "rope_interleave": True,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
)
ONE_GROUP = {"n_group": 1, "topk_group": 1}
GATED_DELTA: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "qk_norm": True,
    "norm_offset": 1.0,
    "partial_rotary": True,
    "output_gate": True,
    "mtp_module": "mtp",
    # Positions of images (mrope) are not used.
    "ignored_fields": ("mrope_section", "mrope_interleaved", "mamba_ssm_dtype", "mtp_use_dedicated_embeddings"),
}
GATED_DELTA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# The text_config of a multimodal config.json has only the fields with other values than the defaults.
QWEN3_5_SIZES = {"vocab_size": 248320, "num_attention_heads": 16, "max_position_embeddings": 32768}
GATE_FIELD: dict[str, Any] = {"attn_output_gate": True}
GATED_DELTA_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN_WINDOWS: dict[str, Any] = {"window": "use_sliding_window", "first_window_field": "max_window_layers"}
QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

ARCHITECTURES = {
    "llama": Architecture(**LLAMA_BIASES, is_strict=False),
    "mistral": Architecture(
        window=True, is_strict=False, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "qwen2": Architecture(**QWEN_WINDOWS, qkv_bias=True, is_strict=False, defaults=QWEN_DEFAULTS),
    "qwen3": Architecture(
        **QWEN_WINDOWS,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        is_strict=False,
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "mixtral": Architecture(
        window=True,
        has_layer_types=False,
        experts=experts_spec.MIXTRAL,
        is_strict=False,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="use_sliding_window",  # of all layers: transformers ignores max_window_layers here
        has_layer_types=False,
        experts=experts_spec.QWEN3_MOE,
        is_strict=False,
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi3": Architecture(
        window=True,
        has_layer_types=False,
        qkv_tensor="self_attn.qkv_proj",
        gate_up_tensor="mlp.gate_up_proj",
        partial_rotary=True,
        turn_end_tokens=("<|end|>",),
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        fixed_fields={"full_attn_mod": 1, "interpolate_factor": 1},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": Architecture(**LLAMA_BIASES, **GRANITE, defaults=GRANITE_DEFAULTS),
    "granitemoehybrid": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        **GRANITE,
        ffn_field="shared_intermediate_size",
        gate_up_tensor="shared_mlp.input_linear",
        down_tensor="shared_mlp.output_linear",
        unrotated="unless_rope",
        defaults=GRANITE_DEFAULTS | {"shared_intermediate_size": 1024, "num_local_experts": 8},
        fixed_fields={"normalization_function": "rmsnorm"},
        ignored_fields=(
            "num_experts_per_tok", "layers_block_type", "init_method", "mamba_n_heads", "mamba_n_groups",
            "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias",
            "mamba_proj_bias", "time_step_limit",
        ),
    ),
    "granitemoe": Architecture(**GRANITE_MOE, experts=experts_spec.GRANITE_MOE),
    "granitemoeshared": Architecture(**GRANITE_MOE, experts=experts_spec.GRANITE_MOE_SHARED),
    "qwen2_moe": Architecture(
        qkv_bias="qkv_bias",
        window="use_sliding_window",
        experts=experts_spec.QWEN2_MOE,
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        # The layers with a window differ between releases of transformers; published models have none.
        fixed_fields={"use_sliding_window": False},
        ignored_fields=("max_window_layers",),
    ),
    "olmoe": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        qk_norm_kind="projection",
        experts=experts_spec.OLMOE,
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "glm4_moe": Architecture(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary=True,
        experts=experts_spec.DEEPSEEK_V3,
        mtp_layers_field="num_nextn_predict_layers",
        fixed_fields={"moe_layer_freq": 1},
        defaults=ONE_GROUP
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
        },
    ),
    "solar_open": Architecture(
        qkv_bias="attention_bias",
        experts=experts_spec.DEEPSEEK_V3,
        ffn_field="moe_intermediate_size",  # no layer is dense
        defaults=ONE_GROUP
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "head_dim": 128,
            "norm_topk_prob": True,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
        fixed_fields={"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "use_qk_norm": False},
    ),
    "dots1": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window=True,
        first_window_field="max_window_layers",
        experts=experts_spec.DEEPSEEK_V3,
        defaults=ONE_GROUP
        | {
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 0,
        },
        fixed_fields={"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"},
    ),
    "smollm3": Architecture(
        **LLAMA_BIASES,
        window="use_sliding_window",
        unrotated="listed",
        defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
        ignored_fields=("max_window_layers",),
    ),
    "llama4_text": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        window=True,
        chunked_windows=True,
        weightless_qk_norm="use_qk_norm",
        temperature_flag_field="attn_temperature_tuning",
        down_tensor="feed_forward.down_proj",
        ffn_field="intermediate_size_mlp",
        unrotated="listed",
        interleaved_rope=True,
        turn_end_tokens=("<|eot|>",),
        experts=experts_spec.LLAMA4,
        ignored_fields=("for_llm_compressor",),
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "deepseek_v2": Architecture(
        **DEEPSEEK,
        interleaved_rope=True,
        experts=experts_spec.DEEPSEEK_V2,
        fixed_fields={
            "attention_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
        defaults=DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy", "moe_intermediate_size": 1407},
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "gpt_oss": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        window=True,
        window_pattern=2,
        attention_sinks=True,
        experts=experts_spec.GPT_OSS,
        turn_end_tokens=("<|return|>", "<|call|>"),
        ignored_fields=("experts_per_token", "initial_context_length", "router_aux_loss_coef", "output_router_logits"),
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "qwen3_next": Architecture(
        **GATED_DELTA,
        delta_tensors="grouped",
        mtp_layers_field="num_nextn_predict_layers",  # published configs lack it
        fixed_fields=GATE_FIELD,
        experts=experts_spec.QWEN2_MOE,
        defaults=GATED_DELTA_DEFAULTS
        | GATED_DELTA_EXPERTS
        | {
            "intermediate_size": 5632,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3_5_text": Architecture(
        **GATED_DELTA,
        delta_tensors="separate",
        mtp_layers_field="mtp_num_hidden_layers",
        fixed_fields=GATE_FIELD,
        defaults=GATED_DELTA_DEFAULTS
        | QWEN3_5_SIZES
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": Architecture(
        **GATED_DELTA,
        delta_tensors="separate",
        mtp_layers_field="mtp_num_hidden_layers",
        fixed_fields=GATE_FIELD | {"norm_topk_prob": True, "decoder_sparse_step": 1},
        experts=experts_spec.QWEN3_5_MOE,
        ffn_field="moe_intermediate_size",  # no layer is dense
        defaults=GATED_DELTA_DEFAULTS
        | GATED_DELTA_EXPERTS
        | QWEN3_5_SIZES
        | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
        | {"num_experts": 256, "num_experts_per_tok": 8},
    ),
    "cohere": Architecture(
        **COHERE, qk_norm="use_qk_norm", qk_norm_kind="head_layer", defaults=COHERE_DEFAULTS | {"rope_theta": 500000.0}
    ),
    "cohere2": Architecture(
        **COHERE,
        window=True,
        window_pattern=4,
        window_pattern_field="sliding_window_pattern",
        unrotated="windowless",
        defaults=COHERE_DEFAULTS | {"sliding_window": 4096},
        fixed_fields={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
        ignored_fields=("_sliding_window_pattern", "layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
    ),
}  # fmt: skip
