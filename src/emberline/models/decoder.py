"""DecoderModel: a causal language model assembled by its config.

It maps the tensors of a step to logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.ahead import Lane
from emberline.models.attention import Attention
from emberline.models.config import ModelConfig
from emberline.models.ffn import BiasedFeedForward, FeedForward
from emberline.models.forward import Forward
from emberline.models.layers import Linear
from emberline.models.moe import SparseFeedForward
from emberline.models.rope import cos_sin
from emberline.models.sleep import every
from emberline.models.weights import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    ffn: Callable[[Tensor, ops.Ahead | None], Tensor]

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, table: Tensor) -> Layer:
        attention = Attention.load(config, weights, layer, table)
        if config.experts is not None and config.experts.layers[layer]:
            return Layer(attention, SparseFeedForward.load(config, weights, layer))
        ffn = BiasedFeedForward if config.mlp_bias else FeedForward
        return Layer(attention, ffn.load(config, weights, layer))

    def dense(self) -> ops.DenseLayer | None:
        """Return this layer as part of a stack that runs as one op, or None if it has unsupported parts."""
        a, ffn = self.attention, self.ffn
        if not isinstance(ffn, FeedForward) or a.qkv.norm is None:
            return None
        return ops.DenseLayer(
            attention_norm=a.qkv.norm,
            qkv=a.qkv.weight,
            o=a.o.weight,
            ffn_norm=ffn.norm,
            gate_up=ffn.gate_up,
            down=ffn.down.weight,
            qkv_bias=a.qkv.bias,
            o_bias=a.o.bias,
            q_norm=a.q_norm,
            k_norm=a.k_norm,
            window=a.window,
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    context: int  # number of positions that can be computed
    embedding: Tensor | ops.PackedWeight
    layers: tuple[Layer, ...]
    stack: ops.DenseStack | None  # all layers as one op, if possible
    head: Linear
    dtype: torch.dtype  # of the matrices, and by default of the KV cache
    weight_bytes: int
    fingerprint: str

    @staticmethod
    def load(config: ModelConfig, weights: Weights, context: int, fingerprint: str) -> Decoder:
        table = cos_sin(config.rope, context).to(weights.device)
        layers = tuple(Layer.load(config, weights, layer, table) for layer in range(config.layers))
        size = config.vocab, config.hidden
        # A checkpoint may set tie_word_embeddings and still have a head: a copy of the embedding, or a different
        # matrix, in which case the setting is wrong.
        tied = config.tie_embeddings and (not weights.has(HEAD) or weights.drop_copy(HEAD, EMBEDDING, *size))
        embedding = None if tied else weights.table(EMBEDDING, *size)
        head = weights.linear([(EMBEDDING if tied else HEAD, config.vocab)], config.hidden)
        norm = weights.vector("model.norm.weight", config.hidden)
        return Decoder(
            config=config,
            context=context,
            embedding=head if embedding is None else embedding,
            layers=layers,
            stack=_stack(layers),
            head=Linear(head, norm=norm, eps=config.norm_eps),
            dtype=layers[0].attention.qkv.weight.dtype,
            weight_bytes=weights.taken_bytes,
            fingerprint=fingerprint,
        )

    def forward(self, f: Forward, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [S, vocab] of f.logit_rows; cache keys and values of all T tokens."""
        x = ops.embed(f.tokens, self.embedding)
        x = self._one_by_one(x, f) if self.stack is None else self._at_once(self.stack, x, f)
        return self.head(x, out=out, full=True) if len(x) else x.new_empty(0, self.config.vocab)

    def ahead(self, computing: Lane, unpacking: Lane) -> ops.Ahead:
        """Return the state for unpacking weights ahead of their use, on a device that keeps them packed."""
        order = list(every(ops.PackedWeight, self.layers))  # fields are declared in the order of use
        # After this weight, rows without requested logits are dropped, so the later products have fewer rows.
        same_rows = order.index(self.layers[-1].attention.qkv.weight) + 1
        return ops.Ahead(order, same_rows, computing, unpacking)

    def _at_once(self, stack: ops.DenseStack, x: Tensor, f: Forward) -> Tensor:
        batch = f.positions, f.slots, f.block_tables, f.query_start, f.context
        rows = torch.arange(len(x)) if f.logit_rows is None else f.logit_rows
        return ops.dense_layers(x, stack, f.keys, f.values, *batch, rows)

    def _one_by_one(self, x: Tensor, f: Forward) -> Tensor:
        last = self.layers[-1]
        for layer, keys, values in zip(self.layers, f.keys.unbind(), f.values.unbind(), strict=True):
            # Rows without requested logits are dropped once the last layer has cached their keys and values.
            x = layer.attention(x, keys, values, f, f.logit_rows if layer is last else None)
            if not len(x):
                return x
            x = layer.ffn(x, f.ahead)
            ops.mark_progress()
        return x


def _stack(layers: tuple[Layer, ...]) -> ops.DenseStack | None:
    """Return all layers as one op, or None.

    None: a layer has another kind of part, the weights differ in layout, or torch computes the products.
    """
    dense = [dense_layer for layer in layers if (dense_layer := layer.dense()) is not None]
    layouts = {weight.layout for layer in dense for weight in layer.weights}
    if len(dense) < len(layers) or len(layouts) > 1 or min(layouts) < 0:
        return None
    a = layers[0].attention
    return ops.DenseStack(dense, a.cos_sin, (a.heads, a.kv_heads, a.head_dim), a.eps, a.scale)
