"""StepSizes, StepLimits: what decides how much memory a step needs.

StepSizes has the widths of a model, or of one GPU's part of it, and StepLimits the settings of an engine. This module
needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.kernels import work_limits
from emberline.kernels.step_memory import ExpertNetwork, GatedNetwork, StepKernels
from emberline.models.outline import LayerOutline, ModelOutline
from emberline.models.weight_matrices import WeightMatrices, list_weight_matrices

LAYER_KINDS = ("attention", "dense ffn", "routed experts", "shared experts", "router")
UNPACKED_KINDS = ("attention", "dense ffn", "shared experts")  # whose packed matrices are unpacked for large products

MAX_KEY_PARTS = 16  # parts into which attention splits a request's keys, on average over a full batch
MAX_SMS = 192  # multiprocessors of a GPU, at most: an H200 has 132, the largest GPU of capability 12.0 has 188
EXPANDED_HEAD_BYTES = 640  # key and value of a head, and a share of the latent
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepSizes:
    hidden: int
    state_copies: int  # copies of the hidden state
    attention_values: int  # numbers per token that the widest attention computes besides the hidden state
    networks: frozenset[GatedNetwork | ExpertNetwork]  # feed-forward networks of all layers
    heads: int
    output_dim: int  # numbers of one head's output of attention, before any projection
    cached_values: int  # numbers per token that a layer keeps in the KV cache
    rope_values: int  # numbers per position of all tables of rotary angles
    vocab: int  # of the whole model: each GPU has the logits of all tokens
    widest_matrix: int  # weights of the largest matrix that may be unpacked
    layer_weights: int  # weights of the matrices of all layers that a token uses
    has_latents: bool  # whether attention is on latents
    has_experts: bool = False
    has_movable_experts: bool = False  # whether experts may move between ranks

    @staticmethod
    def from_outline(outline: ModelOutline, vocab: int) -> StepSizes:
        """Return the sizes of a model or of one GPU's part; `vocab`: that of the whole model."""
        parts, latent = list_weight_matrices(outline), outline.latent
        layers = set(outline.layers)
        cached = 2 * outline.kv_heads * outline.head_dim if latent is None else latent.cached_dim
        return StepSizes(
            hidden=outline.hidden,
            state_copies=outline.state_copies,
            attention_values=max(_attention_values(outline, layer) for layer in layers),
            networks=frozenset(_describe_network(outline, layer) for layer in layers),
            heads=outline.heads,
            output_dim=outline.head_dim if latent is None else latent.kv_rank,
            cached_values=cached,
            rope_values=outline.rope_values,
            vocab=vocab,
            widest_matrix=max(part.rows * part.columns for part in parts if part.kind in UNPACKED_KINDS),
            layer_weights=sum(_count_used_weights(outline, part) for part in parts if part.kind in LAYER_KINDS),
            has_latents=latent is not None,
            has_experts=outline.experts is not None,
            has_movable_experts=outline.experts is not None and outline.experts.num_slots > 0,
        )

    def list_row_queries(self, max_new_tokens: int) -> tuple[int, ...]:
        """Return the numbers of new tokens per request for which steps with drafts are captured."""
        if self.has_latents:
            return (max_new_tokens,)
        kv_heads = self.cached_values // (2 * self.output_dim)
        return work_limits.list_row_queries(max_new_tokens, self.heads // max(1, kv_heads), self.output_dim)

    def partial_result_bytes(self, running: int, max_new_tokens: int, max_rows: int) -> int:
        """Return the bytes of partial attention results: for each part of the keys a sum, maximum and denominator.

        `max_rows`: rows of a forward pass, with padding."""
        if not self.has_latents:
            return running * MAX_KEY_PARTS * self.heads * (self.output_dim + 2) * F32_BYTES
        queries = min(max_new_tokens, work_limits.max_latent_queries(self.heads))
        places = work_limits.max_latent_places(max_rows, self.heads, MAX_SMS)
        return places * queries * self.heads * (self.cached_values + 2) * F32_BYTES

    @property
    def expanded_bytes(self) -> int:
        """The bytes of the keys and values that latent attention computes from cached latents, and of these latents."""
        return work_limits.MAX_EXPANDED_HEADS * EXPANDED_HEAD_BYTES if self.has_latents else 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits and formats of an engine's steps."""

    kernels: StepKernels
    kv_dtype_bytes: int
    block_size: int
    max_running: int
    max_batch_tokens: int
    max_context: int
    max_new_tokens: int = 1  # of a request in a step, with its draft
    tiers: bool = False
    transfer: bool = False
    block_tables: int = 1  # of a request
    exchanging_ranks: int = 1  # ranks that attend to requests of their own, and exchange the rows of each step
    has_ranks: bool = False  # whether several ranks compute the model


def _count_used_weights(outline: ModelOutline, part: WeightMatrices) -> int:
    """Return how many of the part's weights one token uses."""
    if part.kind != "routed experts" or outline.experts is None:
        return part.num_weights
    return part.num_weights * outline.experts.chosen // outline.experts.count


def _attention_values(outline: ModelOutline, layer: LayerOutline) -> int:
    """Return how many numbers per token the attention of a layer has: queries, keys, values and outputs.

    Latent attention has compressed queries and keys, and for each head a query, the same query in the space of the
    latents, an output in that space, and the head's output. For prompt chunks it also has what is cached, and a key and
    a value for each head. Recurrent layers have projections before and after the convolution, gates, outputs, and for
    prompt chunks a key and a value for each value head.
    """
    if layer.attention == "state":
        assert outline.state is not None
        state = outline.state
        return 2 * state.conv_channels + state.value_heads * (state.key_dim + 3 * state.value_dim + 2)
    if outline.latent is not None:
        latent = outline.latent
        head = latent.plain_dim + latent.rotary_dim + latent.cached_dim + latent.kv_rank + latent.value_dim
        head += latent.plain_dim + latent.value_dim
        return latent.q_rank + 2 * latent.cached_dim + outline.heads * head
    q, kv = outline.heads * outline.head_dim, outline.kv_heads * outline.head_dim
    return q * (1 + outline.has_query_gate) + 2 * kv + q


def _describe_network(outline: ModelOutline, layer: LayerOutline) -> GatedNetwork | ExpertNetwork:
    hidden, has_silu = outline.hidden, not outline.has_gelu
    if not layer.has_experts:
        return GatedNetwork(hidden, outline.ffn, has_silu, has_biases=outline.ffn_vectors > 0)
    assert outline.experts is not None
    experts = outline.experts
    shared = GatedNetwork(hidden, experts.shared_ffn) if experts.shared_ffn else None
    return ExpertNetwork(hidden, experts.ffn, experts.count, experts.chosen, shared, experts.num_slots)
