"""The tensors and the shape of a head for multi-token prediction. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.errors import UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.registry import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class HeadTensorNames:
    """The names of a head's tensors. Those of norms and of the projection lack the suffix `.weight`."""

    layer: str  # how the names of its layer's tensors begin
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding: str
    head: str


def name_head_tensors(config: ModelConfig) -> HeadTensorNames:
    at = config.mtp_tensor_prefix
    if ARCHITECTURES[config.model_type].mtp_module:
        return HeadTensorNames(
            layer=f"{at}layers.0",
            embedding_norm=f"{at}pre_fc_norm_embedding",
            hidden_norm=f"{at}pre_fc_norm_hidden",
            projection=f"{at}fc",
            norm=f"{at}norm",
            embedding=f"{at}embed_tokens.weight",
            head=f"{at}lm_head.weight",
        )
    return HeadTensorNames(
        layer=at[:-1],
        embedding_norm=f"{at}enorm",
        hidden_norm=f"{at}hnorm",
        projection=f"{at}eh_proj",
        norm=f"{at}shared_head.norm",
        embedding=f"{at}embed_tokens.weight",
        head=f"{at}shared_head.head.weight",
    )


def has_experts(config: ModelConfig) -> bool:
    return config.experts is not None and any(config.experts.layers)


def add_head_layer(config: ModelConfig) -> ModelConfig:
    """Return the target model's config with the head's layer added after the last."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=(*experts.layers, has_experts(config)))
    return replace(config, layers=config.layers + 1, windows=(*config.windows, 0), experts=experts)


def select_head_layer(config: ModelConfig) -> ModelConfig:
    """Return the config of a model whose only layer is that of the head."""
    experts = None if config.experts is None or not has_experts(config) else replace(config.experts, layers=(True,))
    attention = replace(config.parts.attention, state=None, state_layers=())
    parts = replace(config.parts, attention=attention)
    return replace(config, layers=1, windows=(0,), experts=experts, mtp_layers=0, parts=parts)


def check_has_head(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise UnsupportedModel if a checkpoint has no head for multi-token prediction. `config`: of the target model."""
    directory, hint = checkpoint.directory, "use another method of --speculate, such as auto"
    field = ARCHITECTURES[config.model_type].mtp_layers_field
    if not field:
        raise UnsupportedModel(
            f"speculate is mtp, but no head for multi-token prediction is known for {config.model_type}", hint=hint
        )
    if not config.mtp_layers:
        message = f"speculate is mtp, but {field} is 0 or missing in config.json of {directory}"
        raise UnsupportedModel(message, hint=hint)
    prefix = config.mtp_tensor_prefix
    if not any(name.startswith(prefix) for name in checkpoint.tensor_names()):
        raise UnsupportedModel(
            f"speculate is mtp, but {directory} has no tensors '{prefix}*', although {field} is {config.mtp_layers}",
            hint=f"use a checkpoint that contains the MTP head, or {hint}",
        )
