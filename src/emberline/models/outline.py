"""ModelOutline: the sizes of a model of any family, from which the memory of its weights and KV cache follows.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from emberline.core.errors import UnsupportedModel

AttentionKind = Literal["full", "window", "chunk", "latent", "state"]
# The vocabulary is divided among GPUs at multiples of this, as packed weights require. The last part may be smaller.
VOCABULARY_ALIGN_ROWS = 64


@dataclass(frozen=True, slots=True)
class LayerOutline:
    attention: AttentionKind
    span: int = 0  # tokens of the window or chunk; 0 for other kinds
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA), in which all heads share one compressed key and value per token."""

    kv_rank: int  # elements of the latent, from which keys and values of all heads are computed
    q_rank: int  # elements of the compressed queries; 0: queries are not compressed
    rotary_dim: int  # elements of a head's queries and keys that are rotated; the keys' are shared by all heads
    plain_dim: int  # elements of a head's queries and keys that are not rotated
    value_dim: int  # of a head
    # Ranks among which the rows of the projections to compressed queries and latents are divided.
    down_parts: int = field(default=1, repr=False)

    @property
    def cached_dim(self) -> int:
        """The elements of a token in the KV cache of a layer: the rotated elements of the keys, then the latent."""
        return self.rotary_dim + self.kv_rank


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of the state of a gated delta rule: a matrix for each value head, and the last inputs of a convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_values(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_values(self) -> int:
        return self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    count: int
    chosen: int  # experts per token
    ffn: int  # inner width of one expert
    shared_ffn: int = 0  # inner width of all shared experts together; 0: there are none
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_biases: bool = False  # whether the two matrices of an expert have biases
    num_local: int = 0  # experts that a rank has; 0: all
    num_spare: int = 0  # further experts for which a rank has memory

    @property
    def local_count(self) -> int:
        """The number of experts for which a rank has memory."""
        return (self.num_local or self.count) + self.num_spare

    @property
    def num_slots(self) -> int:
        """The number of experts for which all ranks together have memory, if experts may move; otherwise 0."""
        return self.local_count * (self.count // self.num_local) if self.num_local and self.num_spare else 0


@dataclass(frozen=True, slots=True)
class ModelOutline:
    model_type: str
    hidden: int
    layers: tuple[LayerOutline, ...]
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner width of the feed-forward network in dense layers
    vocab: int
    tie_embeddings: bool
    max_context: int  # default context in tokens
    longest_context: int  # largest context that may be configured
    rope_values: int  # numbers per position of all tables of rotary angles
    num_norms: int = 2  # norms of the hidden size in a layer
    attention_vectors: int = 0  # biases, norms of heads and sinks of a layer with attention
    ffn_vectors: int = 0  # biases of a dense layer's feed-forward network
    has_query_gate: bool = False  # whether the query projection has a second half that gates the output
    has_gelu: bool = False  # whether the activation of dense layers is gelu instead of silu
    state_copies: int = 2  # copies of the hidden state in a step
    latent: LatentConfig | None = None
    state: StateSizes | None = None
    experts: ExpertSizes | None = None
    has_mtp_head: bool = False  # whether the last layer is that of a head for multi-token prediction

    def with_mtp_head(self) -> ModelOutline:
        """Return the outline with one more layer, of a head for multi-token prediction that shares the embedding."""
        last = next(layer for layer in reversed(self.layers) if layer.attention in ("full", "latent"))
        layer = replace(last, has_experts=any(layer.has_experts for layer in self.layers))
        return replace(self, layers=(*self.layers, layer), has_mtp_head=True)

    def divide(self, num_gpus: int, *, divide_attention: bool = True, row_unit: int = 1) -> ModelOutline:
        """Return the outline of one GPU's part under tensor parallelism. Raises UnsupportedModel.

        A GPU has at least one KV head. Without `divide_attention`, each GPU has all heads, and whole experts if their
        number is a multiple of `num_gpus`. `row_unit`: quantised rows of attention are divided in multiples of this."""
        if num_gpus == 1:
            return self
        has_dense = not all(layer.has_experts for layer in self.layers)
        divided = replace(
            self,
            ffn=divide_evenly(self.ffn, num_gpus, "columns of the feed-forward network") if has_dense else self.ffn,
            vocab=divide_vocabulary(self.vocab, num_gpus),
            experts=None
            if self.experts is None
            else _divide_experts(self.experts, num_gpus, whole=not divide_attention),
        )
        if not divide_attention:
            return divided
        return replace(
            divided,
            heads=divide_evenly(self.heads, num_gpus, "attention heads"),
            kv_heads=divide_kv_heads(self.kv_heads, num_gpus),
            latent=None if self.latent is None else divide_latent(self.latent, num_gpus, row_unit),
            state=None if self.state is None else divide_state(self.state, num_gpus),
        )


def divide_evenly(count: int, parts: int, what: str) -> int:
    """Return `count / parts`. Raises UnsupportedModel, whose message names `what`, if that is not a whole number."""
    if count % parts:
        message = f"{count} {what} cannot be divided evenly among {parts} ranks"
        raise UnsupportedModel(message, hint="choose another number of ranks")
    return count // parts


def divide_vocabulary(vocab: int, parts: int) -> int:
    """Return the rows of the embedding of each part but the last. Raises UnsupportedModel if a part would have none."""
    align = VOCABULARY_ALIGN_ROWS
    while align:
        rows = -(-vocab // (align * parts)) * align
        if rows * (parts - 1) < vocab:
            return rows
        align //= 2
    message = f"a vocabulary of {vocab} tokens cannot be divided among {parts} ranks"
    raise UnsupportedModel(message, hint="choose another number of ranks")


def _divide_experts(experts: ExpertSizes, parts: int, *, whole: bool) -> ExpertSizes:
    shared = divide_evenly(experts.shared_ffn, parts, "columns of the shared experts")
    if whole and experts.count % parts == 0:
        return replace(experts, num_local=experts.count // parts, shared_ffn=shared)
    if experts.ffn % parts == 0:
        return replace(experts, ffn=experts.ffn // parts, shared_ffn=shared)
    return replace(experts, num_local=divide_evenly(experts.count, parts, "experts"), shared_ffn=shared)


def divide_kv_heads(kv_heads: int, parts: int) -> int:
    """Return the KV heads of a part. If there are fewer heads than parts, several parts have the same head."""
    return 1 if parts % kv_heads == 0 else divide_evenly(kv_heads, parts, "KV heads")


def divide_latent(latent: LatentConfig, parts: int, row_unit: int = 1) -> LatentConfig:
    """Return the sizes of a part. Projections to latents are divided if each part has a multiple of `row_unit` rows."""
    has_even_parts = not (latent.q_rank % (parts * row_unit) or latent.cached_dim % (parts * row_unit))
    return replace(latent, down_parts=parts if has_even_parts else 1)


def divide_state(state: StateSizes, parts: int) -> StateSizes:
    keys = divide_evenly(state.key_heads, parts, "key heads of the recurrent layers")
    values = divide_evenly(state.value_heads, parts, "value heads of the recurrent layers")
    return replace(state, key_heads=keys, value_heads=values)
