"""MTPHead: the layer for multi-token prediction (MTP) of DeepSeek V3 and GLM-4.5 checkpoints, as a draft model.

At position i it gets the embedding of token i + 1 and the target model's hidden state of position i after its final
norm, and predicts token i + 2. In later passes its own output, after its own norm, replaces the target's state: the
layer is trained on normed states. If a checkpoint has several such layers, the first drafts all tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.core.errors import UnsupportedModel
from emberline.kernels import ops
from emberline.models.attention import Attention, PositionTables
from emberline.models.config import ModelConfig
from emberline.models.decoder import EMBEDDING_NAME, HEAD_NAME, DecoderLayer, DecoderModel, ParallelLayer
from emberline.models.forward import ForwardBatch
from emberline.models.latent_attention import LatentAttention
from emberline.models.layers import load_linear
from emberline.models.registry import ARCHITECTURES
from emberline.models.tensor_names import IGNORABLE_TENSORS, load_or_list_missing
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class MTPHead:
    config: ModelConfig  # of the head's one layer
    captured_layers: tuple[int, ...]
    weight_bytes: int  # without what it shares with the target model
    target_norm: Tensor  # the final norm of the target model
    embedding: Tensor | ops.PackedWeight
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: ops.LinearLayer  # from an embedding and a hidden state to the input of the layer
    layer: DecoderLayer | ParallelLayer
    norm: Tensor
    head: ops.LinearLayer

    @staticmethod
    def load(weights: Weights, target: DecoderModel) -> MTPHead:
        """Load the head from the checkpoint of the target model."""
        config, hidden, index = target.config, target.config.hidden, target.config.layers
        at = f"model.layers.{index}"
        assert target.head.norm is not None
        attention = target.layers[-1].attention
        assert isinstance(attention, Attention | LatentAttention), "no other attention has a head"
        tables = PositionTables(attention.layer.cos_sin)
        head_name = HEAD_NAME if weights.has_tensor(HEAD_NAME) else EMBEDDING_NAME
        is_shared = _is_shared(weights, f"{at}.shared_head.head.weight", head_name, config)
        return MTPHead(
            config=_select_layer(config, has_experts=_has_experts(config)),
            captured_layers=(index,),
            weight_bytes=0,
            target_norm=target.head.norm,
            embedding=target.embedding
            if _is_shared(weights, f"{at}.embed_tokens.weight", EMBEDDING_NAME, config)
            else weights.load_embedding_table(f"{at}.embed_tokens.weight", config.vocab, hidden),
            embedding_norm=weights.load_vector(f"{at}.enorm.weight", hidden),
            hidden_norm=weights.load_vector(f"{at}.hnorm.weight", hidden),
            projection=load_linear(weights, [(f"{at}.eh_proj", hidden)], 2 * hidden),
            layer=DecoderLayer.load(_with_layer(config), weights, index, tables),
            norm=weights.load_vector(f"{at}.shared_head.norm.weight", hidden),
            head=ops.LinearLayer(
                target.head.weight
                if is_shared
                else weights.linear([(f"{at}.shared_head.head.weight", config.vocab)], hidden)
            ),
        )

    def combine(self, captured: Tensor) -> Tensor:
        return ops.rms_norm(captured, self.target_norm, self.config.norm_eps, torch.empty_like(captured))

    def forward(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert hidden is not None
        x = self._project_inputs(batch.tokens, hidden)
        x = self.layer(x, batch.keys[0], batch.values[0], batch, batch.logit_rows)
        if not len(x):
            return batch.tokens[:0], x
        normed = ops.rms_norm(x, self.norm, self.config.norm_eps, torch.empty_like(x))
        return ops.linear(normed, self.head, float32_output=True).argmax(dim=-1), normed

    def _project_inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of the layer. What it is computed from is freed here, before the layer runs."""
        width, eps = self.config.hidden, self.config.norm_eps
        inputs = hidden.new_empty(len(hidden), 2 * width)
        ops.rms_norm(ops.embed(tokens, self.embedding), self.embedding_norm, eps, inputs[:, :width])
        ops.rms_norm(hidden, self.hidden_norm, eps, inputs[:, width:])
        return ops.linear(inputs, self.projection)


def load_mtp_head(weights: Weights, target: DecoderModel) -> MTPHead:
    """Load the head for multi-token prediction that the checkpoint of the target model has.

    Raise UnsupportedModel if it has none, ModelFileError if tensors of the head are missing or damaged."""
    layer = target.config.layers
    _check_has_head(weights, target.config)
    ignorable = rf"(?!model\.layers\.{layer}\.).*|{IGNORABLE_TENSORS}"
    head = load_or_list_missing(lambda source: MTPHead.load(source, target), weights, ignorable)
    weights.finish(ignorable)
    return replace(head, weight_bytes=weights.loaded_bytes)


def _check_has_head(weights: Weights, config: ModelConfig) -> None:
    directory, hint = weights.checkpoint.directory, "use another method of --speculate, such as auto"
    field = ARCHITECTURES[config.model_type].mtp_layers_field
    if not field:
        raise UnsupportedModel(
            f"speculate is mtp, but no head for multi-token prediction is known for {config.model_type}", hint=hint
        )
    if not config.mtp_layers:
        message = f"speculate is mtp, but {field} is 0 or missing in config.json of {directory}"
        raise UnsupportedModel(message, hint=hint)
    prefix = f"model.layers.{config.layers}."
    if not any(name.startswith(prefix) for name in weights.checkpoint.tensor_names()):
        raise UnsupportedModel(
            f"speculate is mtp, but {directory} has no tensors '{prefix}*', although {field} is {config.mtp_layers}",
            hint=f"use a checkpoint that contains the MTP head, or {hint}",
        )


def _is_shared(weights: Weights, name: str, original: str, config: ModelConfig) -> bool:
    """Return whether the head uses the target model's matrix, because it has none of its own or an equal copy."""
    return not weights.has_tensor(name) or weights.drop_duplicate(name, original, config.vocab, config.hidden)


def _has_experts(config: ModelConfig) -> bool:
    return config.experts is not None and any(config.experts.layers)


def _with_layer(config: ModelConfig) -> ModelConfig:
    """Return the target model's config with the head's layer added after the last."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=(*experts.layers, _has_experts(config)))
    return replace(config, layers=config.layers + 1, windows=(*config.windows, 0), experts=experts)


def _select_layer(config: ModelConfig, *, has_experts: bool) -> ModelConfig:
    """Return the config of a model that has the head's layer only."""
    experts = None if config.experts is None or not has_experts else replace(config.experts, layers=(True,))
    return replace(config, layers=1, windows=(0,), experts=experts, mtp_layers=0)
