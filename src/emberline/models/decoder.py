"""Decoder: a causal language model made of parts chosen by its config. A step in, logits out."""

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
        """The same as one of a stack that runs as one op, if its parts allow."""
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
    context: int  # positions [0, context) can be computed
    embedding: Tensor | ops.PackedWeight
    layers: tuple[Layer, ...]
    stack: ops.DenseStack | None  # all the layers as one op
    head: Linear
    dtype: torch.dtype  # of the matrices, and of the cache unless asked otherwise
    weight_bytes: int
    fingerprint: str

    @staticmethod
    def load(config: ModelConfig, weights: Weights, context: int, fingerprint: str) -> Decoder:
        table = cos_sin(config.rope, context).to(weights.device)
        layers = tuple(Layer.load(config, weights, layer, table) for layer in range(config.layers))
        size = config.vocab, config.hidden
        # A file may say tied and still bring a head: the same one again, or one that says the flag is wrong.
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
        """Logits [S, vocab] float32 of f.logit_rows. Keys and values of all T tokens are written to the cache."""
        x = ops.embed(f.tokens, self.embedding)
        x = self._one_by_one(x, f) if self.stack is None else self._at_once(self.stack, x, f)
        return self.head(x, out=out, full=True) if len(x) else x.new_empty(0, self.config.vocab)

    def ahead(self, computing: Lane, unpacking: Lane) -> ops.Ahead:
        """For steps on a lane of a device that keeps weights packed."""
        order = list(every(ops.PackedWeight, self.layers))  # their parts lie in the order of use
        alike = order.index(self.layers[-1].attention.qkv.weight) + 1  # after it, rows that nobody wants are dropped
        return ops.Ahead(order, alike, computing, unpacking)

    def _at_once(self, stack: ops.DenseStack, x: Tensor, f: Forward) -> Tensor:
        batch = f.positions, f.slots, f.block_tables, f.query_start, f.context
        rows = torch.arange(len(x)) if f.logit_rows is None else f.logit_rows
        return ops.dense_layers(x, stack, f.keys, f.values, *batch, rows)

    def _one_by_one(self, x: Tensor, f: Forward) -> Tensor:
        last = self.layers[-1]
        for layer, keys, values in zip(self.layers, f.keys.unbind(), f.values.unbind(), strict=True):
            # Rows whose logits nobody wants are dropped as soon as their keys are cached for the last time.
            x = layer.attention(x, keys, values, f, f.logit_rows if layer is last else None)
            if not len(x):
                return x
            x = layer.ffn(x, f.ahead)
            ops.mark_progress()
        return x


def _stack(layers: tuple[Layer, ...]) -> ops.DenseStack | None:
    """None if a layer has a part of another kind, or weights differ in layout, or torch computes it all anyway."""
    dense = [one for layer in layers if (one := layer.dense()) is not None]
    layouts = {weight.layout for layer in dense for weight in layer.weights}
    if len(dense) < len(layers) or len(layouts) > 1 or min(layouts) < 0:
        return None
    a = layers[0].attention
    return ops.DenseStack(dense, a.cos_sin, (a.heads, a.kv_heads, a.head_dim), a.eps, a.scale)
