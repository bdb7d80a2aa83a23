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
from emberline.models.attention import Attention, PositionTables
from emberline.models.chained_layer import ChainedLayer
from emberline.models.config import EMBEDDING_NAME, HEAD_NAME, ModelConfig
from emberline.models.delta_net import DeltaNet
from emberline.models.ffn import BiasedFeedForward, FeedForward
from emberline.models.forward import ForwardBatch
from emberline.models.fused_layer import FusedLayer
from emberline.models.gated_attention import GatedAttention
from emberline.models.latent_attention import LatentAttention
from emberline.models.layers import add_output
from emberline.models.moe import SparseFeedForward
from emberline.models.rope import make_cos_sin_table, make_query_scales
from emberline.models.ropeconfig import RopeConfig
from emberline.models.row_exchange import RowExchange
from emberline.models.sleep import iter_instances
from emberline.models.stage import Stage
from emberline.models.vocabulary import VocabularyShard
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: Attention | GatedAttention | LatentAttention | DeltaNet
    ffn: Callable[[Tensor, ops.WeightUnpacker | None, RowExchange | None], Tensor]

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> DecoderLayer | ParallelLayer:
        if config.parts.norms == "shared":
            return ParallelLayer.load(config, weights, layer, tables)
        attention = _choose_attention(config, layer).load(config, weights, layer, tables)
        if config.experts is not None and config.experts.layers[layer]:
            return DecoderLayer(attention, SparseFeedForward.load(config, weights, layer))
        ffn = BiasedFeedForward if config.mlp_bias else FeedForward
        return DecoderLayer(attention, ffn.load(config, weights, layer))

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output for x, which is overwritten, or for `rows` of x only."""
        exchange = batch.exchange_of(rows)
        if exchange is None:
            x = self.attention(x, keys, values, batch, rows)
            return self.ffn(x, batch.unpacker, None) if len(x) else x
        x = self.attention(x, keys, values, batch, rows) if len(x) else x
        return self.ffn(x, batch.unpacker, exchange) if exchange.total else x

    def as_dense_layer(self) -> ops.DenseLayer | None:
        """Return this layer as an element of a `DenseStack`, or None if it has parts that DenseStack lacks."""
        a, ffn = self.attention, self.ffn
        if not isinstance(a, Attention) or not isinstance(ffn, FeedForward):
            return None
        if a.qkv.norm is None or ffn.activation != "silu":
            return None
        if a.norms or a.scaling or a.query_scales is not None or ffn.scaling:
            return None
        if not a.layer.is_plain or a.layer.interleaved:
            return None
        return ops.DenseLayer(a.layer, a.qkv, a.o, ffn.gate_up, ffn.down)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """A layer whose attention and feed-forward network both read the layer norm of its input."""

    norm: Tensor
    eps: float
    attention: Attention
    ffn: FeedForward

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> ParallelLayer:
        return ParallelLayer(
            weights.load_vector(f"model.layers.{layer}.input_layernorm.weight", config.hidden),
            config.norm_eps,
            Attention.load(config, weights, layer, tables),
            FeedForward.load(config, weights, layer),
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        exchange, normed = batch.exchange_of(rows), x
        if len(x):
            normed = ops.layer_norm(x, self.norm, self.eps, torch.empty_like(x))
            mixed = self.attention.compute_attention(normed, keys, values, batch, rows)
            if rows is not None:
                x, normed = x[rows], normed[rows]
            if len(x):
                x = add_output(mixed, self.attention.o, x, self.attention.scaling, batch.unpacker)
            del mixed  # so that its memory is free for the feed-forward network
        has_rows = len(x) if exchange is None else exchange.total
        return self.ffn(x, batch.unpacker, exchange, normed) if has_rows else x

    def as_dense_layer(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class DecoderModel:
    config: ModelConfig
    context: int  # number of positions that can be computed
    embedding: Tensor | ops.PackedWeight
    layers: tuple[DecoderLayer | ParallelLayer, ...]
    stack: ops.DenseStack | None  # all layers as one op, if possible
    head: ops.LinearLayer
    dtype: torch.dtype  # of the matrices, and by default of the KV cache
    weight_bytes: int
    fingerprint: str
    embedding_multiplier: float = 1.0
    final_norm: Tensor | None = None  # weight of a layer norm before the head; None: the head has an RMS norm
    vocabulary: VocabularyShard | None = None  # the rows of embedding and head that this rank has; None: all

    @staticmethod
    def load(
        config: ModelConfig, weights: Weights, context: int, fingerprint: str, stage: Stage | None = None
    ) -> DecoderModel:
        """Load a model or a pipeline stage. The embedding has rows only in the first stage, the head in the last."""
        tables = _make_position_tables(config, context, weights.device)
        stage = stage or Stage.from_config(config)
        layers = tuple(
            DecoderLayer.load(config, weights, layer, tables[config.layer_rope(layer)]) for layer in stage.layers
        )
        embedding, head = load_vocabulary_matrices(config, weights, stage)
        dtype = layers[0].attention.qkv.weight.dtype
        norm = None
        if stage.is_last:
            norm = weights.load_vector("model.norm.weight", config.hidden, offset=config.parts.norm_offset)
        is_rms = config.parts.norm_kind == "rms"
        return DecoderModel(
            config=config,
            context=context,
            embedding=embedding,
            layers=layers,
            stack=_make_dense_stack(layers),
            head=ops.LinearLayer(head, norm=norm if is_rms else None, eps=config.norm_eps),
            dtype=dtype,
            weight_bytes=weights.loaded_bytes,
            fingerprint=fingerprint,
            embedding_multiplier=_round_multiplier(config, dtype),
            final_norm=None if is_rms else norm,
            vocabulary=VocabularyShard.from_weights(weights, config.vocab),
        )

    @property
    def dispatching_layers(self) -> dict[int, SparseFeedForward]:
        """The networks, by layer, that send each row to the ranks that have its experts."""
        return {layer: network for layer, network in self._sparse_layers if network.dispatch is not None}

    @property
    def movable_layers(self) -> dict[int, SparseFeedForward]:
        """The networks, by layer, whose experts may move between ranks, and that get the rows of every rank."""
        return {layer: network for layer, network in self._sparse_layers if network.movable is not None}

    @property
    def _sparse_layers(self) -> list[tuple[int, SparseFeedForward]]:
        return [(i, each.ffn) for i, each in enumerate(self.layers) if isinstance(each.ffn, SparseFeedForward)]

    @property
    def device(self) -> torch.device:
        return self.layers[0].attention.qkv.weight.data.device

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Write keys and values of all tokens to the cache, and return float32 logits [S, vocab].

        The logits are those of `batch.logit_rows`. With data-parallel attention, the `logit_rows` of all ranks are
        gathered, and logits are computed for all of them or, if given, only for the indexes `batch.chosen_rows` among
        them.
        """
        x = self.run_layers(self.embed(batch), batch)
        if batch.logit_exchange is not None:
            x = batch.logit_exchange.gather(x)
        return self.compute_logits(x if batch.chosen_rows is None else x.index_select(0, batch.chosen_rows), out)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the input of the first layer."""
        if self.vocabulary is None:
            x = ops.embed(batch.tokens, self.embedding)
        else:
            tokens = batch.tokens if batch.all_tokens is None else batch.all_tokens
            x = self.vocabulary.embed(tokens, self.embedding, batch.exchange)
        return x if self.embedding_multiplier == 1.0 else x.mul_(self.embedding_multiplier)

    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return `batch.logit_rows` of the last layer's output; x is overwritten."""
        stack = None if batch.layer_positions else self.stack  # the layers of a stack share one block table
        return self._run_layers(x, batch) if stack is None else self._run_stack(stack, x, batch)

    def compute_logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [S, vocab] of rows of the last layer's output."""
        if not len(x):
            return x.new_empty(0, self.config.vocab)
        if self.final_norm is not None:
            x = ops.layer_norm(x, self.final_norm, self.head.eps, torch.empty_like(x))
        if self.vocabulary is None:
            logits = ops.linear(x, self.head, out=out, float32_output=True)
        else:
            logits = self.vocabulary.compute_logits(x, self.head, out)
        parts = self.config.parts
        if parts.logit_multiplier != 1.0:
            logits.mul_(parts.logit_multiplier)
        return ops.soft_cap(logits, parts.logit_softcap) if parts.logit_softcap else logits

    def make_unpacker(
        self, compute_stream: UnpackStream, unpack_stream: UnpackStream, *, exchanges_rows: bool = False
    ) -> ops.WeightUnpacker:
        """Return a WeightUnpacker for this model's packed weights, with these two CUDA streams.

        `exchanges_rows`: whether attention and feed-forward networks compute different numbers of rows."""
        order = list(iter_instances(ops.PackedWeight, self.layers))  # fields are declared in the order of use
        # After this weight, rows without requested logits are dropped, so the later products have fewer rows.
        same_rows = 0 if exchanges_rows else order.index(self.layers[-1].attention.qkv.weight) + 1
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
        if begin == len(self.layers):
            return x[rows]
        rest = stack.select_layers(begin, len(self.layers))
        return ops.run_dense_layers(x, rest, batch.keys[begin:], batch.values[begin:], batch.attention, rows)

    def _run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        capture, last = batch.capture, self.layers[-1]
        captures_output = capture is not None and len(self.layers) in capture.layers
        keeps_rows = captures_output or batch.computes_all_rows
        views = zip(self.layers, batch.layer_views(len(self.layers)), strict=True)
        joined, inputs = [*map(_as_joined_layer, self.layers), None] if batch.exchange is None else [], None
        for index, (layer, (layer_batch, keys, values)) in enumerate(views):
            if capture is not None:
                capture.copy_input(index, x)
            # Rows without requested logits are dropped once the last layer has cached their keys and values.
            rows = batch.logit_rows if layer is last and not keeps_rows else None
            if joined and (form := joined[index]) is not None:
                x, inputs = form.run(x, inputs, keys, values, layer_batch, rows, joined[index + 1])
            else:
                x = layer(x, keys, values, layer_batch, rows)
            ops.mark_progress()
        if not keeps_rows:
            return x
        if capture is not None:
            capture.copy_input(len(self.layers), x)
        return x if batch.logit_rows is None else x[batch.logit_rows]


def _as_joined_layer(layer: DecoderLayer | ParallelLayer) -> FusedLayer | ChainedLayer | None:
    """Return the layer as one that also computes a part of the next layer; None: it has no such form."""
    if not isinstance(layer, DecoderLayer):
        return None
    return FusedLayer.make_if_supported(layer.attention, layer.ffn) or ChainedLayer.make_if_supported(
        layer.attention, layer.ffn
    )


def load_vocabulary_matrices(
    config: ModelConfig, weights: Weights, stage: Stage
) -> tuple[Tensor | ops.PackedWeight, ops.PackedWeight]:
    """Return the embedding and the head. A matrix that another pipeline stage has is returned without rows."""
    size, nothing = (config.vocab_rows or config.vocab, config.hidden), torch.empty(0, config.hidden)
    nothing = nothing.to(weights.device)
    if not stage.is_last:
        embedding = weights.load_embedding_table(EMBEDDING_NAME, *size) if stage.is_first else nothing
        return embedding, ops.empty_weight(0, config.hidden, nothing.dtype, weights.device)
    # A checkpoint may set tie_word_embeddings and still have a head: a copy of the embedding, or a different
    # matrix, in which case the setting is wrong.
    tied = config.tie_embeddings and (
        not weights.has_tensor(HEAD_NAME) or weights.drop_duplicate(HEAD_NAME, EMBEDDING_NAME, *size)
    )
    separate = weights.load_embedding_table(EMBEDDING_NAME, *size) if stage.is_first and not tied else None
    head_name = EMBEDDING_NAME if tied else HEAD_NAME
    head = weights.linear([(head_name, size[0])], config.hidden, full_precision=True)
    if not stage.is_first:
        return nothing, head
    return head if separate is None else separate, head


def _choose_attention(
    config: ModelConfig, layer: int
) -> type[Attention] | type[GatedAttention] | type[LatentAttention] | type[DeltaNet]:
    parts = config.parts.attention
    if layer in parts.state_layers:
        return DeltaNet
    if parts.has_output_gate:
        return GatedAttention
    return Attention if parts.latent is None else LatentAttention


def _make_position_tables(
    config: ModelConfig, context: int, device: torch.device
) -> dict[RopeConfig | None, PositionTables]:
    """Return the tables for each rotary embedding of the layers.

    Layers without rotary embedding (the key None) get a table of angles that has no columns."""

    def make_tables(rope: RopeConfig | None) -> PositionTables:
        if rope is not None:
            return PositionTables(make_cos_sin_table(rope, context).to(device))
        temperature = config.parts.attention.unrotated_temperature
        scales = None if temperature is None else make_query_scales(temperature, context).to(device)
        return PositionTables(torch.empty(context, 0).to(device), scales)

    return {rope: make_tables(rope) for rope in dict.fromkeys(map(config.layer_rope, range(config.layers)))}


def _round_multiplier(config: ModelConfig, dtype: torch.dtype) -> float:
    multiplier = config.parts.embedding_multiplier
    return float(torch.tensor(multiplier).to(dtype)) if config.parts.rounds_embedding_multiplier else multiplier


def _make_dense_stack(layers: tuple[DecoderLayer | ParallelLayer, ...]) -> ops.DenseStack | None:
    """Return all layers as one stack, or None if they cannot run as one op.

    The result is None if a layer has an unsupported part, if layers differ in their rotary embeddings, or if a weight
    has no native kernel.
    """
    dense = [dense_layer for layer in layers if (dense_layer := layer.as_dense_layer()) is not None]
    if len(dense) < len(layers) or not all(layer.can_run_natively for layer in dense):
        return None
    if any(layer.attention.cos_sin is not dense[0].attention.cos_sin for layer in dense):
        return None
    return ops.DenseStack(dense)
