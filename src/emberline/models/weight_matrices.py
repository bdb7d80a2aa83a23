"""list_weight_matrices: the matrices and vectors of a model, by what they are for.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from emberline.models.outline import ExpertSizes, ModelOutline

WeightKind = Literal[
    "embedding", "head", "attention", "dense ffn", "routed experts", "shared experts", "router", "norms"
]

MIN_HEAD_SHARE = 0.02  # smallest share of all weights at which a second, packed copy of the head pays
MIN_PACKED_ATTENTION_WEIGHTS = 12 << 20  # smallest matrix that is packed in a model with experts, measured on an H200


@dataclass(frozen=True, slots=True)
class WeightMatrices:
    """Matrices of the same kind and shape. Norms and biases count as matrices with one column."""

    kind: WeightKind
    rows: int
    columns: int
    num_matrices: int = 1
    is_never_packed: bool = False  # whether a GPU never packs them
    is_faster_unpacked: bool = False  # whether a GPU keeps them in bfloat16 where others are packed
    is_never_quantised: bool = False  # whether a GPU never quantises them, because their rows are reordered

    @property
    def num_weights(self) -> int:
        return self.rows * self.columns * self.num_matrices


def is_head_large(outline: ModelOutline) -> bool:
    """Return whether reading the output head takes a noticeable part of a step, if other weights are quantised."""
    matrices = list_weight_matrices(outline)
    kind = "embedding" if outline.tie_embeddings else "head"
    head = sum(each.num_weights for each in matrices if each.kind == kind)
    return head >= MIN_HEAD_SHARE * sum(each.num_weights for each in matrices)


def list_weight_matrices(outline: ModelOutline) -> list[WeightMatrices]:
    """Return all weights of a model. A tied output head is not listed: it is the embedding."""
    matrices = [WeightMatrices("embedding", outline.vocab, outline.hidden), WeightMatrices("norms", outline.hidden, 1)]
    if not outline.tie_embeddings:
        matrices.append(WeightMatrices("head", outline.vocab, outline.hidden))
    if outline.has_mtp_head:
        matrices += [
            WeightMatrices("norms", 3 * outline.hidden, 1),
            WeightMatrices("head", outline.hidden, 2 * outline.hidden),
        ]
    for layer in outline.layers:
        matrices.append(WeightMatrices("norms", outline.num_norms * outline.hidden, 1))
        matrices += _state_matrices(outline) if layer.attention == "state" else _attention_matrices(outline)
        matrices += _ffn_matrices(outline, outline.experts if layer.has_experts else None)
    return matrices


def is_attention_faster_unpacked(num_weights: int, *, has_experts: bool) -> bool:
    """Return whether a GPU keeps an attention matrix with so many weights in bfloat16, unpacked.

    Kernels multiply small matrices faster in bfloat16. In a model with experts, packing these matrices would save
    little memory.
    """
    return has_experts and num_weights < MIN_PACKED_ATTENTION_WEIGHTS


def can_pack_experts(hidden: int, ffn: int, *, has_biases: bool) -> bool:
    """Return whether a GPU can pack the experts' matrices. Its kernels need multiples of 128 rows, and no biases."""
    return not has_biases and hidden % 128 == 0 and ffn % 64 == 0


def _attention_matrices(outline: ModelOutline) -> Iterator[WeightMatrices]:
    if outline.attention_vectors:
        yield WeightMatrices("norms", outline.attention_vectors, 1)
    latent, hidden = outline.latent, outline.hidden
    if latent is None:
        q, kv = outline.heads * outline.head_dim, outline.kv_heads * outline.head_dim
        rows, has_gate = q * (1 + outline.has_query_gate) + 2 * kv, outline.has_query_gate
        plain_qkv, plain_o = (
            is_attention_faster_unpacked(count * hidden, has_experts=outline.experts is not None and not has_gate)
            for count in (rows, q)
        )
        yield WeightMatrices("attention", rows, hidden, is_never_quantised=has_gate, is_faster_unpacked=plain_qkv)
        yield WeightMatrices("attention", hidden, q, is_faster_unpacked=plain_o)
        return
    yield WeightMatrices("attention", (latent.q_rank + latent.cached_dim) // latent.down_parts, hidden)
    yield WeightMatrices("attention", outline.heads * (latent.plain_dim + latent.rotary_dim), latent.q_rank or hidden)
    both = outline.heads * (latent.plain_dim + latent.value_dim)
    yield WeightMatrices("attention", both, latent.kv_rank, is_never_packed=True)
    yield WeightMatrices("attention", hidden, outline.heads * latent.value_dim)


def _state_matrices(outline: ModelOutline) -> Iterator[WeightMatrices]:
    state, hidden = outline.state, outline.hidden
    assert state is not None
    values = state.value_heads * state.value_dim
    # Queries, keys, values and gates, then decays and step sizes.
    rows = state.conv_channels + values + 2 * state.value_heads
    yield WeightMatrices("attention", rows, hidden, is_never_quantised=True)
    yield WeightMatrices("attention", hidden, values)
    yield WeightMatrices("norms", state.conv_channels * state.conv_kernel + 2 * state.value_heads + state.value_dim, 1)


def _ffn_matrices(outline: ModelOutline, experts: ExpertSizes | None) -> Iterator[WeightMatrices]:
    hidden = outline.hidden
    if experts is None:
        yield WeightMatrices("dense ffn", 2 * outline.ffn, hidden)
        yield WeightMatrices("dense ffn", hidden, outline.ffn)
        if outline.ffn_vectors:
            yield WeightMatrices("norms", outline.ffn_vectors, 1)
        return
    yield WeightMatrices("router", experts.count, hidden, is_never_packed=True)
    plain = not can_pack_experts(hidden, experts.ffn, has_biases=experts.has_biases)
    yield WeightMatrices("routed experts", 2 * experts.ffn, hidden, experts.local_count, is_never_packed=plain)
    yield WeightMatrices("routed experts", hidden, experts.ffn, experts.local_count, is_never_packed=plain)
    if experts.has_router_bias:
        yield WeightMatrices("norms", experts.count, 1)
    if experts.has_biases:
        yield WeightMatrices("norms", 2 * experts.ffn + hidden, 1, experts.local_count)
    if experts.shared_ffn:
        yield WeightMatrices("shared experts", 2 * experts.shared_ffn, hidden)
        yield WeightMatrices("shared experts", hidden, experts.shared_ffn)
    if experts.has_shared_gate:
        yield WeightMatrices("router", 1, hidden)
