"""DecoderModel: a causal language model whose layers depend on its config.

It maps a ForwardBatch to logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.weight_unpacker import UnpackStream
from emberline.models.attention import Attention
from emberline.models.config import ModelConfig
from emberline.models.ffn import BiasedFeedForward, FeedForward
from emberline.models.forward import ForwardBatch
from emberline.models.moe import SparseFeedForward
from emberline.models.rope import make_cos_sin_table
from emberline.models.sleep import iter_instances
from emberline.models.weights import Weights

EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: Attention
    ffn: Callable[[Tensor, ops.WeightUnpacker | None], Tensor]

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, cos_sin: Tensor) -> DecoderLayer:
        attention = Attention.load(config, weights, layer, cos_sin)
        if config.experts is not None and config.experts.layers[layer]:
            return DecoderLayer(attention, SparseFeedForward.load(config, weights, layer))
        ffn = BiasedFeedForward if config.mlp_bias else FeedForward
        return DecoderLayer(attention, ffn.load(config, weights, layer))

    def as_dense_layer(self) -> ops.DenseLayer | None:
        """Return this layer as an element of a `DenseStack`, or None if it has parts that DenseStack lacks."""
        a, ffn = self.attention, self.ffn
        if not isinstance(ffn, FeedForward) or a.qkv.norm is None:
            return None
        return ops.DenseLayer(a.layer, a.qkv, a.o, ffn.gate_up, ffn.down)


@dataclass(frozen=True, slots=True)
class DecoderModel:
    config: ModelConfig
    context: int  # number of positions that can be computed
    embedding: Tensor | ops.PackedWeight
    layers: tuple[DecoderLayer, ...]
    stack: ops.DenseStack | None  # all layers as one op, if possible
    head: ops.LinearLayer
    dtype: torch.dtype  # of the matrices, and by default of the KV cache
    weight_bytes: int
    fingerprint: str

    @staticmethod
    def load(config: ModelConfig, weights: Weights, context: int, fingerprint: str) -> DecoderModel:
        table = make_cos_sin_table(config.rope, context).to(weights.device)
        layers = tuple(DecoderLayer.load(config, weights, layer, table) for layer in range(config.layers))
        size = config.vocab, config.hidden
        # A checkpoint may set tie_word_embeddings and still have a head: a copy of the embedding, or a different
        # matrix, in which case the setting is wrong.
        tied = config.tie_embeddings and (
            not weights.has_tensor(HEAD_NAME) or weights.drop_duplicate(HEAD_NAME, EMBEDDING_NAME, *size)
        )
        embedding = None if tied else weights.load_embedding_table(EMBEDDING_NAME, *size)
        head = weights.linear([(EMBEDDING_NAME if tied else HEAD_NAME, config.vocab)], config.hidden)
        norm = weights.load_vector("model.norm.weight", config.hidden)
        return DecoderModel(
            config=config,
            context=context,
            embedding=head if embedding is None else embedding,
            layers=layers,
            stack=_make_dense_stack(layers),
            head=ops.LinearLayer(head, norm=norm, eps=config.norm_eps),
            dtype=layers[0].attention.qkv.weight.dtype,
            weight_bytes=weights.loaded_bytes,
            fingerprint=fingerprint,
        )

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [S, vocab] of `batch.logit_rows`.

        Write keys and values of all tokens to the cache.
        """
        x = ops.embed(batch.tokens, self.embedding)
        x = self._run_layers(x, batch) if self.stack is None else self._run_stack(self.stack, x, batch)
        if not len(x):
            return x.new_empty(0, self.config.vocab)
        return ops.linear(x, self.head, out=out, float32_output=True)

    def make_unpacker(self, compute_stream: UnpackStream, unpack_stream: UnpackStream) -> ops.WeightUnpacker:
        """Return a WeightUnpacker for this model's packed weights, with these two CUDA streams."""
        order = list(iter_instances(ops.PackedWeight, self.layers))  # fields are declared in the order of use
        # After this weight, rows without requested logits are dropped, so the later products have fewer rows.
        same_rows = order.index(self.layers[-1].attention.qkv.weight) + 1
        return ops.WeightUnpacker(order, same_rows, compute_stream, unpack_stream)

    def _run_stack(self, stack: ops.DenseStack, x: Tensor, batch: ForwardBatch) -> Tensor:
        all_rows = torch.arange(len(x))
        rows = all_rows if batch.logit_rows is None else batch.logit_rows
        capture, begin = batch.capture, 0
        for end in () if capture is None else capture.layers:
            if end > begin:
                keys, values = batch.keys[begin:end], batch.values[begin:end]
                x = ops.run_dense_layers(x, stack.select_layers(begin, end), keys, values, batch.attention, all_rows)
            if capture is not None:
                capture.copy_input(end, x)
            begin = end
        rest = stack.select_layers(begin, len(self.layers))
        return ops.run_dense_layers(x, rest, batch.keys[begin:], batch.values[begin:], batch.attention, rows)

    def _run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        last = self.layers[-1]
        parts = zip(self.layers, batch.keys.unbind(), batch.values.unbind(), strict=True)
        for index, (layer, keys, values) in enumerate(parts):
            if batch.capture is not None:
                batch.capture.copy_input(index, x)
            # Rows without requested logits are dropped once the last layer has cached their keys and values.
            x = layer.attention(x, keys, values, batch, batch.logit_rows if layer is last else None)
            if not len(x):
                return x
            x = layer.ffn(x, batch.unpacker)
            ops.mark_progress()
        return x


def _make_dense_stack(layers: tuple[DecoderLayer, ...]) -> ops.DenseStack | None:
    """Return all layers as one stack, or None if they cannot run as one op.

    The result is None if a layer has an unsupported part, the weights differ in layout, or torch computes the products.
    """
    dense = [dense_layer for layer in layers if (dense_layer := layer.as_dense_layer()) is not None]
    layouts = {weight.layout for layer in dense for weight in layer.weights}
    if len(dense) < len(layers) or len(layouts) > 1 or min(layouts) < 0:
        return None
    return ops.DenseStack(dense)
