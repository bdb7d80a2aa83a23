"""Argument structs of the ops: parameters of a layer, and inputs of a forward pass that ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from emberline.kernels.packed_weight import PackedWeight
from emberline.kernels.weight_unpacker import WeightUnpacker


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer, y = norm(x) W^T + bias, where the norm and the bias are optional."""

    weight: PackedWeight
    bias: Tensor | None = None
    norm: Tensor | None = None  # weight of the RMS norm applied to the input
    eps: float = 0.0  # epsilon of that norm


class LinearOutput(NamedTuple):
    """Where a backend's `linear` puts its result, in which dtype, and how it unpacks a compressed weight."""

    add_to: Tensor | None = None  # tensor to which the result is added in place
    out: Tensor | None = None  # tensor that receives the result
    float32: bool = False  # the result is float32, whatever the dtype of x
    unpacker: WeightUnpacker | None = None  # unpacks compressed weights before they are needed


class LayerProducts(NamedTuple):
    """The matrix products of a layer after its attention, and the qkv projection of the next layer."""

    o: LinearLayer
    gate_up: LinearLayer  # followed by silu(gate) * up
    down: LinearLayer
    qkv: LinearLayer  # of the next layer


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape, the rotary embedding and the optional query and key norms of one attention layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the scores before the softmax
    cos_sin: Tensor  # [positions, rotary dimensions]: cosines, then sines, of each position; 0 dimensions: no rotation
    window: int = 0  # number of newest keys that a query attends to; 0: all
    q_norm: Tensor | None = None  # weight of the RMS norm of each query head
    k_norm: Tensor | None = None
    eps: float = 0.0  # epsilon of these norms
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: unchanged
    interleaved: bool = False  # whether rotated pairs are neighbours, and not half of the rotary dimensions apart
    chunked: bool = False  # whether a query attends to the keys since the last multiple of `window`, up to its own
    sinks: Tensor | None = None  # [q_heads] float32: a score per head that joins the softmax, but has no value
    latent_dim: int = 0  # if not 0, a value is the last `latent_dim` elements of its key, which are cached once

    @property
    def value_dim(self) -> int:
        """The size of a value, and of a query head's result."""
        return self.latent_dim or self.head_dim

    @property
    def qkv_heads(self) -> int:
        """The number of query, key and value heads in `qkv`; with `latent_dim`, it has no value heads."""
        return self.q_heads + (1 if self.latent_dim else 2) * self.kv_heads

    @property
    def is_plain(self) -> bool:
        """Whether the layer has no capped scores, sinks, chunks or latents."""
        return not (self.softcap > 0 or self.chunked or self.sinks is not None or self.latent_dim > 0)


@dataclass(frozen=True, slots=True)
class PerHeadWeights:
    """A matrix [n, k] for each head of a layer."""

    weight: Tensor  # on a GPU: [heads, n, k], possibly a view with other strides; on a CPU: an empty tensor
    packed: tuple[PackedWeight, ...] = ()  # on a CPU: the matrix of each head


@dataclass(frozen=True, slots=True)
class LatentProducts:
    """The matrices of multi-head latent attention that turn cached latents into the keys and values of each head."""

    keys: PerHeadWeights  # [heads, rank, plain]: turns queries into ones that are compared with latents
    values: PerHeadWeights  # [heads, values, rank]: from latents to values
    expansion: LinearLayer | None = None  # on a GPU: from latents to the keys and values of all heads


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """A layer of multi-head latent attention. `attention` describes its attention on latents, with one KV head."""

    attention: AttentionLayer  # its head_dim is rotary_dim + rank, and its latent_dim is rank
    norm: Tensor  # weight of the RMS norm of latents
    eps: float  # epsilon of that norm
    plain_dim: int  # elements of a head's queries and keys that are not rotated
    value_dim: int  # elements of a head's values
    products: LatentProducts

    @property
    def rank(self) -> int:
        return self.attention.latent_dim

    @property
    def rotary_dim(self) -> int:
        return self.attention.head_dim - self.attention.latent_dim


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The positions and KV cache locations of the T new tokens of B sequences.

    The tokens of sequence b are rows [query_start[b], query_start[b + 1]) of the activations.
    """

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64: cache slot of each token, block * block_size + offset; -1: not cached
    query_start: Tensor  # [B + 1] int32
    context: Tensor  # [B] int32: tokens of each sequence that were cached before this step
    block_tables: Tensor  # [B, max blocks] int32, padded with 0


class AttentionInputs(NamedTuple):
    """The new queries, the KV cache and the shape of one layer, from which attention is computed."""

    qkv: Tensor  # [T, layer.qkv_heads * head_dim]: rotated queries, keys and values of the new tokens
    layer: AttentionLayer
    keys: Tensor  # the layer's KV cache, which contains the new tokens too
    values: Tensor  # without elements if values are parts of the keys
    metadata: AttentionMetadata


class LatentInputs(NamedTuple):
    """Projections of the new tokens, and the cache of one layer with latent attention."""

    q: Tensor  # [T, heads, plain + rotary]; a GPU rotates its rotary elements in place
    kv: Tensor  # [T, rank + rotary]: latents before their norm, then rotary elements of keys before their rotation
    layer: LatentLayer
    keys: Tensor  # the layer's cache, to which the latents are written
    metadata: AttentionMetadata


class PositionShift(NamedTuple):
    """Positions and KV cache slots that the device corrects by the number of accepted draft tokens.

    The host does not know this number. For token i and r = token_shifts[i], positions[i] is increased by accepted[r],
    and slots[i] becomes the slot of the new position, which is looked up in row r of `tables`. For sequence b,
    context[b] is increased by accepted[row_shifts[b]]. A shift that equals `padding_row` changes nothing.

    If groups of layers have block tables of their own, a row of `tables` has the block tables of all groups side by
    side, `table_width` entries apart, and `window_slots` has the slots of all groups but the first.
    """

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64
    context: Tensor  # [B] int32
    token_shifts: Tensor  # [T] int64
    row_shifts: Tensor  # [B] int64
    accepted: Tensor  # [rows] int64
    tables: Tensor  # [rows, max blocks] int32
    padding_row: int
    block_size: int
    window_slots: Tensor | None = None  # [further groups, at least T] int64
    table_width: int = 0
