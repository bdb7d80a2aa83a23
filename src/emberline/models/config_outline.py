"""outline_of: the outline of a model that the engine runs, from its checked config.

This module does not import torch.
"""

from __future__ import annotations

from emberline.models.attention_parts import LatentConfig
from emberline.models.config import ModelConfig
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.outline import ExpertSizes, LatentSizes, LayerOutline, ModelOutline
from emberline.models.parts import LLAMA_PARTS

NORMS_PER_LAYER = {"pre": 2, "post": 2, "both": 4, "shared": 1}  # of the hidden size, by placement


def outline_of(config: ModelConfig) -> ModelOutline:
    """Return the outline of a model of a family that the engine runs."""
    experts, q, kv = config.experts, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norm_heads = 2 if config.parts.qk_norm_kind == "head" else config.heads + config.kv_heads
    ropes = {config.layer_rope(layer) for layer in range(config.layers)}
    attention = config.parts.attention
    latent = None if attention.latent is None else _latent_sizes(attention.latent)
    compressed = 0 if latent is None else latent.query_rank + latent.rank
    return ModelOutline(
        model_type=config.model_type,
        hidden=config.hidden,
        layers=tuple(
            LayerOutline(
                "state" if layer in attention.state_layers else "window" if window else "full",
                window,
                experts is not None and experts.layers[layer],
            )
            for layer, window in enumerate(config.windows)
        ),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
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
        state_copies=2 if config.parts == LLAMA_PARTS else 3,
        experts=None if experts is None else _expert_sizes(experts),
    )


def _latent_sizes(latent: LatentConfig) -> LatentSizes:
    return LatentSizes(latent.kv_rank, latent.rotary_dim, latent.plain_dim, latent.value_dim, latent.q_rank)


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
    )
