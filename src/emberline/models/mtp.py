"""MTPHead: the layer for multi-token prediction (MTP) of DeepSeek V3, GLM-4.5, Qwen3-Next and Qwen3.5 checkpoints.

It is a draft model. At position i it gets the embedding of token i + 1 and the target model's hidden state of position
i after its final norm, and predicts token i + 2. In later passes its own output, after its own norm, replaces the
target's state: the layer is trained on normed states. If a checkpoint has several such layers, the first drafts all
tokens. The layer has attention also where most layers of the target model are recurrent."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.models.attention import PositionTables
from emberline.models.config import EMBEDDING_NAME, HEAD_NAME, ModelConfig
from emberline.models.decoder import DecoderLayer, DecoderModel, ParallelLayer
from emberline.models.delta_net import DeltaNet
from emberline.models.ffn import FeedForward
from emberline.models.forward import ForwardBatch
from emberline.models.gated_attention import GatedAttention
from emberline.models.layers import load_linear
from emberline.models.moe import SparseFeedForward
from emberline.models.mtp_config import (
    add_head_layer,
    check_has_head,
    has_experts,
    name_head_tensors,
    select_head_layer,
)
from emberline.models.registry import ARCHITECTURES
from emberline.models.tensor_names import load_or_list_missing
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
        config, hidden, names = target.config, target.config.hidden, name_head_tensors(target.config)
        assert target.head.norm is not None
        head_name = HEAD_NAME if weights.has_tensor(HEAD_NAME) else EMBEDDING_NAME
        is_shared = _is_shared(weights, names.head, head_name, config)

        def load_norm(name: str) -> Tensor:
            return weights.load_vector(f"{name}.weight", hidden, offset=config.parts.norm_offset)

        return MTPHead(
            config=select_head_layer(config),
            captured_layers=(config.layers,),
            weight_bytes=0,
            target_norm=target.head.norm,
            embedding=target.embedding
            if _is_shared(weights, names.embedding, EMBEDDING_NAME, config)
            else weights.load_embedding_table(names.embedding, config.vocab, hidden),
            embedding_norm=load_norm(names.embedding_norm),
            hidden_norm=load_norm(names.hidden_norm),
            projection=load_linear(weights, [(names.projection, hidden)], 2 * hidden),
            layer=_load_layer(weights, target, names.layer),
            norm=load_norm(names.norm),
            head=ops.LinearLayer(
                target.head.weight
                if is_shared
                else weights.linear([(names.head, config.vocab)], hidden, full_precision=True)
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
        """Return the input of the layer. Temporary tensors are freed on return, before the layer runs."""
        width, eps = self.config.hidden, self.config.norm_eps
        inputs = hidden.new_empty(len(hidden), 2 * width)
        ops.rms_norm(ops.embed(tokens, self.embedding), self.embedding_norm, eps, inputs[:, :width])
        ops.rms_norm(hidden, self.hidden_norm, eps, inputs[:, width:])
        return ops.linear(inputs, self.projection)


def load_mtp_head(weights: Weights, target: DecoderModel) -> MTPHead:
    """Load the head for multi-token prediction that the checkpoint of the target model has.

    Raise UnsupportedModel if it has none, ModelFileError if tensors of the head are missing or damaged."""
    check_has_head(weights.checkpoint, target.config)
    ignorable = rf"(?!{re.escape(target.config.mtp_tensor_prefix)}).*|.*\.rotary_emb\.inv_freq"
    head = load_or_list_missing(lambda source: MTPHead.load(source, target), weights, ignorable)
    weights.finish(ignorable)
    return replace(head, weight_bytes=weights.loaded_bytes)


def _is_shared(weights: Weights, name: str, original: str, config: ModelConfig) -> bool:
    """Return whether the head uses the target model's matrix, because it has none of its own or an equal copy."""
    return not weights.has_tensor(name) or weights.drop_duplicate(name, original, config.vocab, config.hidden)


def _load_layer(weights: Weights, target: DecoderModel, at: str) -> DecoderLayer | ParallelLayer:
    """Load the layer of the head. `at`: how the names of its tensors begin."""
    config, index = add_head_layer(target.config), target.config.layers
    attention = next(each for layer in reversed(target.layers) if not isinstance(each := layer.attention, DeltaNet))
    if not isinstance(attention, GatedAttention):
        return DecoderLayer.load(config, weights, index, PositionTables(attention.layer.cos_sin))
    tables, spec = PositionTables(attention.attention.layer.cos_sin), ARCHITECTURES[config.model_type].experts
    return DecoderLayer(
        GatedAttention.load_from(config, weights, index, tables, at),
        SparseFeedForward.load_from(config, spec, weights, at)
        if spec is not None and has_experts(config)
        else FeedForward.load_from(config, weights, at),
    )
