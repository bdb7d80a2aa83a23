"""read_outline: the ModelOutline of a config.json, by rules for each model_type.

Families are read by ModelConfig, as in the engine, unless the table FAMILIES has rules of its own for them. A family of
FAMILIES need not be one that the engine runs.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from emberline.core.errors import UnsupportedModel
from emberline.models.config import (
    MAX_FFN,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_VOCAB,
    ModelConfig,
)
from emberline.models.config_outline import outline_of
from emberline.models.expertsconfig import MAX_EXPERT_FFN, MAX_EXPERTS
from emberline.models.fields import ConfigFields
from emberline.models.knownfields import HARMLESS_FIELDS, HARMLESS_NAMES
from emberline.models.outline import ExpertSizes, LatentSizes, LayerOutline, ModelOutline
from emberline.models.registry import ARCHITECTURES

MAX_CONTEXT_TOKENS = 1 << 26
# The model_type of the language model, by that of a multimodal config.json with a text_config.
TEXT_MODEL_TYPES = {
    "llama4": "llama4_text",
    "kimi_k25": "kimi_k2",
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
SHARED_FIELDS = ("quantization_config", "tie_word_embeddings")  # of the outer config
# Fields that the outline of every family reads.
COMMON_FIELDS = {
    "model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "intermediate_size",
    "quantization_config",
}  # fmt: skip
# Fields that change what a model computes, but no size.
SIZELESS_FIELDS = {
    "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout",
    "partial_rotary_factor", "scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "seq_aux", "aux_loss_alpha", "ep_size", "swiglu_limit", "initial_context_length",
    "experts_per_token", "attn_scale", "floor_scale", "attn_temperature_tuning", "for_llm_compressor",
    "rope_interleave", "use_unified_vision_chunk", "video_placeholder", "ignore_index", "mamba_ssm_dtype",
    "is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "output_scores", "pruned_heads",
    "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
# Layers of multi-token prediction, which are loaded only to draft tokens, and planned only if asked for.
DRAFT_FIELDS = {"num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}


@dataclass(frozen=True, slots=True)
class FamilyRules:
    read: Callable[[ConfigFields], ModelOutline]
    fields: frozenset[str]  # fields that `read` reads, besides the common ones
    defaults: Mapping[str, Any]  # what transformers assumes where config.json has no such field


def read_outline(config: Mapping[str, Any]) -> ModelOutline:
    """Return the outline of a config.json. Raises UnsupportedModel for a model that cannot be planned by name."""
    text = select_planned_text(config)
    model_type = ConfigFields(text, "config.json").text("model_type")
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        _check_fields(text, family)
        outline = family.read(ConfigFields({**family.defaults, **_without_nulls(text)}, "config.json"))
    elif model_type in ARCHITECTURES:
        plain = {name: value for name, value in text.items() if name != "quantization_config"}
        outline = outline_of(ModelConfig.from_hf(plain))
    else:
        known = " ".join(sorted({*FAMILIES, *ARCHITECTURES, *TEXT_MODEL_TYPES}))
        raise UnsupportedModel(
            f"config.json: a model of model_type {model_type[:80]!r} cannot be planned",
            hint=f"known model types: {known}",
        )
    return outline


def add_mtp_head(outline: ModelOutline, config: Mapping[str, Any]) -> ModelOutline:
    """Return the outline with a head for multi-token prediction. Raises UnsupportedModel if config.json has none."""
    text = select_planned_text(config)
    arch = ARCHITECTURES.get(outline.model_type)
    fields = ConfigFields({**(arch.defaults if arch is not None else {}), **_without_nulls(text)}, "config.json")
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if not any(fields.size(name, 0, minimum=0, maximum=MAX_LAYERS) for name in names):
        message = f"a model of model_type {outline.model_type!r} has no head for multi-token prediction"
        raise UnsupportedModel(f"config.json: {message}", hint=f"config.json must have a field {names[0]} above 0")
    return outline.with_mtp_head()


def select_planned_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which is `config` itself unless that has a text_config."""
    fields = ConfigFields(config, "config.json")
    model_type = fields.text("model_type")
    if model_type not in TEXT_MODEL_TYPES or not fields.has_field("text_config"):
        return {**config, "model_type": TEXT_MODEL_TYPES.get(model_type, model_type)}
    text = fields.section("text_config").values
    shared = {name: config[name] for name in SHARED_FIELDS if name in config}
    return {**shared, **text, "model_type": TEXT_MODEL_TYPES[model_type], "architectures": None}


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _check_fields(config: Mapping[str, Any], family: FamilyRules) -> None:
    known = COMMON_FIELDS | SIZELESS_FIELDS | DRAFT_FIELDS | HARMLESS_FIELDS | family.fields
    for name, value in sorted(config.items()):
        if value and name not in known and not HARMLESS_NAMES.fullmatch(name):
            raise UnsupportedModel(
                f"config.json sets {name[:80]} to {str(value)[:80]!r} for {str(config['model_type'])[:80]}, and it is"
                " not known whether the field changes the memory that the model needs",
                hint="if it does not, remove it from config.json",
            )


def _read_common(fields: ConfigFields, layers: tuple[LayerOutline, ...], **more: Any) -> ModelOutline:
    """Return an outline with the sizes that all families name in the same way; `more`: its other fields."""
    hidden = fields.size("hidden_size", maximum=MAX_HIDDEN)
    heads = fields.size("num_attention_heads", maximum=MAX_HEADS)
    head_dim = fields.size("head_dim", hidden // heads, maximum=MAX_HEAD_DIM)
    context = fields.size("max_position_embeddings", maximum=MAX_CONTEXT_TOKENS)
    sizes: dict[str, Any] = {
        "model_type": fields.text("model_type"),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": fields.size("num_key_value_heads", heads, maximum=MAX_HEADS),
        "head_dim": head_dim,
        "ffn": fields.size("intermediate_size", maximum=MAX_FFN),
        "vocab": fields.size("vocab_size", maximum=MAX_VOCAB),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_context": context,
        "longest_context": context,
        "rope_values": head_dim,
    }
    return ModelOutline(**sizes | more)


def _num_layers(fields: ConfigFields) -> int:
    return fields.size("num_hidden_layers", maximum=MAX_LAYERS)


def _layer_kinds(fields: ConfigFields, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of each layer in layer_types; empty if there is no such field."""
    kinds = fields.text_list("layer_types")
    if kinds and len(kinds) != _num_layers(fields):
        raise fields.invalid_error("layer_types", f"a list of {_num_layers(fields)} layer types")
    if unknown := set(kinds) - set(allowed):
        raise UnsupportedModel(f"config.json: layer_types has {min(unknown)[:80]!r}, which cannot be planned")
    return kinds


def _biases(outline: ModelOutline, qkv: bool, o: bool) -> int:
    qkv_rows = (outline.heads + 2 * outline.kv_heads) * outline.head_dim
    return qkv_rows * qkv + outline.hidden * o


def _read_llama4(fields: ConfigFields) -> ModelOutline:
    count = _num_layers(fields)
    kinds = _layer_kinds(fields, ("full_attention", "chunked_attention"))
    if not kinds:
        interval = fields.size("no_rope_layer_interval", maximum=MAX_LAYERS)
        rotated = fields.number_list("no_rope_layers", count) if fields.values.get("no_rope_layers") else None
        kinds = tuple(
            "chunked_attention" if (rotated[i] if rotated else (i + 1) % interval) else "full_attention"
            for i in range(count)
        )
    chunk = fields.size("attention_chunk_size", maximum=MAX_CONTEXT_TOKENS)
    step = fields.size("interleave_moe_layer_step", maximum=MAX_LAYERS)
    moe = set(fields.id_list("moe_layers") if fields.has_field("moe_layers") else range(step - 1, count, step))
    expert_ffn = fields.size("intermediate_size", maximum=MAX_EXPERT_FFN)
    experts = fields.size("num_local_experts", maximum=MAX_EXPERTS)
    outline = _read_common(
        fields,
        tuple(
            LayerOutline("chunk", chunk, i in moe) if kind == "chunked_attention" else LayerOutline("full", 0, i in moe)
            for i, kind in enumerate(kinds)
        ),
        ffn=fields.size("intermediate_size_mlp", maximum=MAX_FFN),
        experts=ExpertSizes(
            experts, fields.size("num_experts_per_tok", maximum=experts), expert_ffn, shared_ffn=expert_ffn
        ),
    )
    has_bias = fields.flag("attention_bias", False)
    return replace(outline, attention_vectors=_biases(outline, has_bias, has_bias))


def _read_latent(fields: ConfigFields) -> ModelOutline:
    """Read DeepSeek V2 and V3, and Kimi K2."""
    latent = LatentSizes(
        rank=_even_size(fields, "kv_lora_rank", 1 << 14),
        rope_dim=_even_size(fields, "qk_rope_head_dim", MAX_HEAD_DIM),
        nope_dim=fields.size("qk_nope_head_dim", maximum=MAX_HEAD_DIM),
        value_dim=fields.size("v_head_dim", maximum=MAX_HEAD_DIM),
        query_rank=fields.size("q_lora_rank", 0, minimum=0, maximum=1 << 16),
    )
    shared = fields.size("n_shared_experts", 0, minimum=0, maximum=MAX_EXPERTS)
    experts = _read_experts(fields, "n_routed_experts", shared_count=shared)
    dense = fields.size("first_k_dense_replace", 0, minimum=0, maximum=MAX_LAYERS)
    every = fields.size("moe_layer_freq", 1, maximum=MAX_LAYERS)
    layers = tuple(
        LayerOutline("latent", has_experts=experts is not None and i >= dense and i % every == 0)
        for i in range(_num_layers(fields))
    )
    has_bias, hidden = fields.flag("attention_bias", False), fields.size("hidden_size", maximum=MAX_HIDDEN)
    biased = (latent.down_rows if latent.query_rank else latent.rank + latent.rope_dim) + hidden
    return _read_common(
        fields,
        layers,
        head_dim=latent.nope_dim + latent.rope_dim,
        rope_values=latent.rope_dim,
        attention_vectors=latent.query_rank + latent.rank + biased * has_bias,
        latent=latent,
        experts=experts
        and replace(experts, has_router_bias=fields.text("model_type") != "deepseek_v2"),  # corrects scores
    )


def _even_size(fields: ConfigFields, name: str, maximum: int) -> int:
    value = fields.size(name, maximum=maximum)
    if value % 2:
        raise fields.invalid_error(name, "an even number")
    return value


def _read_experts(fields: ConfigFields, count_field: str, shared_count: int = 0) -> ExpertSizes | None:
    if not fields.has_field(count_field):
        return None
    count = fields.size(count_field, maximum=MAX_EXPERTS)
    width = fields.size("moe_intermediate_size", maximum=MAX_EXPERT_FFN)
    chosen = fields.size("num_experts_per_tok", maximum=count)
    return ExpertSizes(count, chosen, width, shared_ffn=shared_count * width)


def _read_gpt_oss(fields: ConfigFields) -> ModelOutline:
    count = fields.size("num_local_experts", maximum=MAX_EXPERTS)
    kinds = _layer_kinds(fields, ("full_attention", "sliding_attention"))
    kinds = kinds or tuple("full_attention" if i % 2 else "sliding_attention" for i in range(_num_layers(fields)))
    window = fields.size("sliding_window", maximum=MAX_CONTEXT_TOKENS)
    layers = tuple(
        LayerOutline("window", window, True) if kind == "sliding_attention" else LayerOutline("full", 0, True)
        for kind in kinds
    )
    chosen, width = fields.size("num_experts_per_tok", maximum=count), fields.size("intermediate_size", maximum=MAX_FFN)
    outline = _read_common(
        fields, layers, experts=ExpertSizes(count, chosen, width, has_router_bias=True, has_biases=True)
    )
    has_bias = fields.flag("attention_bias", True)
    return replace(outline, attention_vectors=_biases(outline, has_bias, has_bias) + outline.heads)  # and sinks


def _read_glm4_moe(fields: ConfigFields) -> ModelOutline:
    shared = fields.size("n_shared_experts", 1, minimum=0, maximum=MAX_EXPERTS)
    experts = _read_experts(fields, "n_routed_experts", shared_count=shared)
    dense = fields.size("first_k_dense_replace", 1, minimum=0, maximum=MAX_LAYERS)
    layers = tuple(
        LayerOutline("full", has_experts=experts is not None and i >= dense) for i in range(_num_layers(fields))
    )
    outline = _read_common(fields, layers, experts=experts and replace(experts, has_router_bias=True))
    vectors = _biases(outline, fields.flag("attention_bias", False), False)
    return replace(outline, attention_vectors=vectors + 2 * outline.head_dim * fields.flag("use_qk_norm", False))


_MOE_FIELDS = frozenset({"moe_intermediate_size", "num_experts_per_tok"})
_LLAMA4 = FamilyRules(
    _read_llama4,
    frozenset(
        {
            "attention_bias", "attention_chunk_size", "interleave_moe_layer_step", "intermediate_size_mlp",
            "layer_types", "moe_layers", "no_rope_layers", "no_rope_layer_interval", "num_experts_per_tok",
            "num_local_experts",
            "use_qk_norm",  # this norm has no weights
        }
    ),
    {
        "attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "head_dim": 128,
        "num_experts_per_tok": 1,
    },
)  # fmt: skip
_LATENT = FamilyRules(
    _read_latent,
    _MOE_FIELDS
    | {
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "n_shared_experts",
        "n_routed_experts", "first_k_dense_replace", "moe_layer_freq", "attention_bias",
    },
    {},
)  # fmt: skip
FAMILIES: Mapping[str, FamilyRules] = {
    "llama4_text": _LLAMA4,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "gpt_oss": FamilyRules(
        _read_gpt_oss,
        frozenset({"num_local_experts", "num_experts_per_tok", "layer_types", "sliding_window", "attention_bias"}),
        {"sliding_window": 128, "head_dim": 64},
    ),
    "glm4_moe": FamilyRules(
        _read_glm4_moe,
        _MOE_FIELDS
        | {"n_routed_experts", "n_shared_experts", "first_k_dense_replace", "attention_bias", "use_qk_norm"},
        {"head_dim": 128},
    ),
}
