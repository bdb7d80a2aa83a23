"""Argument structs of the ops: parameters of a layer, and inputs of a forward pass that ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from emberline.kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer, y = norm(x) W^T + bias, where the norm and the bias are optional."""

    weight: PackedWeight
    bias: Tensor | None = None
    norm: Tensor | None = None  # weight of the RMS norm applied to the input
    eps: float = 0.0  # epsilon of that norm


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape, the rotary embedding and the optional query and key norms of one attention layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the scores before the softmax
    cos_sin: Tensor  # [positions, rotary dimensions]: cosines, then sines, of each position
    window: int = 0  # number of newest keys that a query attends to; 0: all
    q_norm: Tensor | None = None  # weight of the RMS norm of each query head
    k_norm: Tensor | None = None
    eps: float = 0.0  # epsilon of these norms


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


class SamplingTensors(NamedTuple):
    """Sampling settings as tensors [S] with one element for each row of the logits."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32


class LogProbs(NamedTuple):
    """Per row of the logits: the log-probabilities of one chosen token id and of the n most probable ids."""

    chosen: Tensor  # [S] float32: log-probability of the chosen id
    top_ids: Tensor  # [S, n] int64: most probable ids, in descending order
    top: Tensor  # [S, n] float32: their log-probabilities
    rank: Tensor  # [S] int64: rank of the chosen id; 1 is the most probable
