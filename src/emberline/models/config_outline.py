"""outline_of, read_outline: the outline (all sizes) of a model, from its checked config or from config.json.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emberline.core.errors import UnsupportedModel
from emberline.models.config import MAX_LAYERS, ModelConfig
from emberline.models.decoder_parts import LLAMA_PARTS
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.fields import ConfigFields
from emberline.models.outline import AttentionKind, ExpertSizes, LayerOutline, ModelOutline
from emberline.models.registry import ARCHITECTURES
from emberline.models.textmodel import TEXT_MODEL_TYPES, select_text_config

NORMS_PER_LAYER = {"pre": 2, "post": 2, "both": 4, "shared": 1}  # of the hidden size, by placement


def read_outline(config: Mapping[str, Any]) -> ModelOutline:
    """Return the sizes of the model that a config.json describes, also if quantised. Raises UnsupportedModel."""
    text = select_planned_text(config)
    model_type = ConfigFields(text, "config.json").text("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config.json: a model of model_type {model_type[:80]!r} cannot be planned",
            hint=f"known model types: {' '.join(sorted({*ARCHITECTURES, *TEXT_MODEL_TYPES}))}",
        )
    plain = {name: value for name, value in text.items() if name != "quantization_config"}
    return outline_of(ModelConfig.from_hf(plain))


def add_mtp_head(outline: ModelOutline, config: Mapping[str, Any]) -> ModelOutline:
    """Return the outline with a head for multi-token prediction. Raises UnsupportedModel if config.json has none."""
    filled = ARCHITECTURES[outline.model_type].fill_defaults(select_planned_text(config))
    fields = ConfigFields(filled, "config.json")
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if not any(fields.size(name, 0, minimum=0, maximum=MAX_LAYERS) for name in names):
        message = f"a model of model_type {outline.model_type!r} has no head for multi-token prediction"
        raise UnsupportedModel(f"config.json: {message}", hint=f"config.json must have a field {names[0]} above 0")
    return outline.with_mtp_head()


def select_planned_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: the text_config of a multimodal config, otherwise `config` itself."""
    fields = ConfigFields(config, "config.json")
    model_type = fields.text("model_type")
    if model_type not in TEXT_MODEL_TYPES or not fields.has_field("text_config"):
        return {**config, "model_type": TEXT_MODEL_TYPES.get(model_type, model_type)}
    return select_text_config(config)


def outline_of(config: ModelConfig) -> ModelOutline:
    """Return the sizes of a model, from its config."""
    experts, q, kv = config.experts, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norm_heads = 2 if config.parts.qk_norm_kind == "head" else config.heads + config.kv_heads
    ropes = {config.layer_rope(layer) for layer in range(config.layers)}
    attention = config.parts.attention
    latent = attention.latent
    compressed = 0 if latent is None else latent.q_rank + latent.kv_rank
    return ModelOutline(
        model_type=config.model_type,
        hidden=config.hidden,
        layers=tuple(
            LayerOutline(
                _attention_kind(config, layer),
                window,
                experts is not None and experts.layers[layer],
            )
            for layer, window in enumerate(config.windows)
        ),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab_rows or config.vocab,
        tie_embeddings=config.tie_embeddings,
        max_context=config.max_context,
        longest_context=config.longest_context,
        rope_values=sum(rope.dim for rope in ropes if rope is not None),
        num_norms=NORMS_PER_LAYER[config.parts.norms],
        attention_vectors=norm_heads * config.head_dim * config.qk_norm
        + (q + 2 * kv + q * attention.has_output_gate) * config.qkv_bias
        + config.hidden * config.o_bias
        + config.heads * attention.has_sinks
        + compressed,
        has_query_gate=attention.has_output_gate,
        latent=latent,
        state=attention.state,
        ffn_vectors=(2 * config.ffn + config.hidden) * config.mlp_bias,
        has_gelu=config.parts.activation != "silu",
        state_copies=2 if config.parts == LLAMA_PARTS else 3,
        experts=None if experts is None else _expert_sizes(experts),
    )


def _attention_kind(config: ModelConfig, layer: int) -> AttentionKind:
    attention = config.parts.attention
    if layer in attention.state_layers:
        return "state"
    if attention.latent is not None:
        return "latent"
    if not config.windows[layer]:
        return "full"
    return "chunk" if attention.chunked_windows else "window"


def _expert_sizes(experts: ExpertsConfig) -> ExpertSizes:
    options = experts.options
    return ExpertSizes(
        experts.count,
        experts.chosen,
        experts.ffn,
        shared_ffn=options.shared_ffn,
        has_shared_gate=options.has_shared_gate,
        has_router_bias=options.has_router_bias or options.has_correction,
        has_biases=options.has_biases,
        num_local=0 if experts.local_experts is None else len(experts.local_experts),
        num_spare=experts.spare,
    )
