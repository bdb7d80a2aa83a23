"""latent_attention: multi-head latent attention on a GPU, as a few kernels for each layer.

The cache has one latent vector for each token, from which the keys and values of each head can be computed.

A step without chunks of prompts runs four kernels: `project`, the attention of parts of the keys, the merge of the
parts, and `multiply_values`, which turns the sums of latents into values of each head. Chunks attend to their own
tokens with the keys and values of each head, which takes a third of the operations of attention on latents. They attend
to tokens before the chunk on the latents or, if that is faster, with the keys and values of each head too, for a
bounded number of tokens at a time. Attention to these earlier tokens is computed first: its result is the initial state
of the softmax sums over the chunk's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from emberline.kernels.arguments import LatentInputs, LinearLayer
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.latent_plan import ContextPass
from emberline.kernels.triton.expanded_attention import attend_expanded, gather_latents
from emberline.kernels.triton.latent_attention import attend_context, decode_latents
from emberline.kernels.triton.latent_projection import merge_parts, multiply_values, project


def latent_attention(
    inputs: LatentInputs,
    plan: AttentionPlan,
    rows: Tensor | None,
    linear: Callable[[Tensor, LinearLayer], Tensor],
    *,
    pdl: bool = True,
) -> Tensor:
    """Return the result that `OpBackend.latent_attention` describes. `linear` computes a linear layer."""
    q, _, layer, keys, metadata = inputs
    latent = plan.latent
    assert latent is not None, "latent attention on a GPU needs the plan of a LatentPlanner"
    tokens, heads, tiles = len(q), layer.attention.q_heads, plan.prefill_tiles
    has_chunks = tiles is not None and len(tiles) > 0
    num_queries = tokens if has_chunks and latent.has_context else min(tokens, latent.decode_tokens)
    queries = q.new_empty(num_queries, heads, layer.rank)
    fresh = (q.new_empty(tokens, layer.rank), q.new_empty(tokens, layer.rotary_dim)) if has_chunks else None
    out = q.new_empty(tokens, heads * layer.value_dim)
    # The results of padding tokens must be finite: other kernels multiply them by zero.
    has_padding = has_chunks or plan.max_queries > 1
    project(
        *inputs[:5], queries, query_limit=latent.query_limit if has_chunks else None, fresh=fresh,
        cleared=out if has_padding else None, pdl=pdl,
    )  # fmt: skip
    if rows is not None and not len(rows):
        return out[:0]
    if tiles is not None and fresh is not None:
        assert layer.products.expansion is not None
        has_state = latent.has_context or latent.context_passes
        log_sums = q.new_empty(tokens, heads, dtype=torch.float32) if has_state else None
        for context_pass in latent.context_passes:
            assert log_sums is not None
            _attend_expanded_context(inputs, context_pass, tiles, out, log_sums, linear, pdl=pdl)
        if latent.has_context:
            assert log_sums is not None
            mixed = torch.empty_like(queries)
            attend_context(q, queries, layer, keys, metadata, tiles, mixed, log_sums, pdl=pdl)
            multiply_values(mixed, layer, out, metadata, tiles=tiles, pdl=pdl)
        expanded = linear(fresh[0], layer.products.expansion)
        attend_expanded(q, expanded, fresh[1], layer, metadata, tiles, out, log_sums=log_sums, pdl=pdl)
    if plan.decode_work is not None:
        _attend_decode_rows(inputs, queries, plan, out, pdl=pdl)
    return out if rows is None else out[rows]


def _attend_expanded_context(
    inputs: LatentInputs,
    context_pass: ContextPass,
    tiles: Tensor,
    out: Tensor,
    log_sums: Tensor,
    linear: Callable[[Tensor, LinearLayer], Tensor],
    *,
    pdl: bool,
) -> None:
    """Add the cached keys of one pass to the attention of prompt chunks.

    `out` and `log_sums` have the attention to the keys of earlier passes, if any, and are updated."""
    q, _, layer, keys, metadata = inputs
    assert layer.products.expansion is not None
    count = len(context_pass.sources) * keys.shape[2]
    latents, rotary_keys = q.new_empty(count, layer.rank), q.new_empty(count, layer.rotary_dim)
    gather_latents(keys, metadata.block_tables, context_pass.sources, latents, rotary_keys, pdl=pdl)
    expanded = linear(latents, layer.products.expansion)
    attend_expanded(
        q, expanded, rotary_keys, layer, metadata, tiles, out, log_sums=log_sums, ranges=context_pass.ranges, pdl=pdl
    )


def _attend_decode_rows(inputs: LatentInputs, queries: Tensor, plan: AttentionPlan, out: Tensor, *, pdl: bool) -> None:
    q, _, layer, keys, metadata = inputs
    work, scratch = plan.decode_work, plan.latent_scratch
    assert work is not None and scratch is not None
    decode_latents(
        q, queries, layer, keys, metadata, (work.count, work.items, work.capacity), scratch.partials,
        scratch.max_and_sum, max_queries=plan.max_queries, pdl=pdl,
    )  # fmt: skip
    merged = q.new_empty(plan.decode_rows * plan.max_queries, layer.attention.q_heads, layer.rank)
    merge_parts(
        scratch.partials, scratch.max_and_sum, work.partial_starts, metadata.query_start, merged,
        capacity=work.capacity, max_queries=plan.max_queries, pdl=pdl,
    )  # fmt: skip
    multiply_values(merged, layer, out, metadata, max_queries=plan.max_queries, pdl=pdl)
