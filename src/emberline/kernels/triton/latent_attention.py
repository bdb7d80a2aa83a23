"""Latent attention over a paged cache of latents, which all heads share.

Queries of latents are queries multiplied by the matrix that turns latents into keys, so that they are compared with
latents directly. A cached token is the rotary elements of its key, then its latent, which is also its value. The rows
of a program are pairs (query, head), so that latents are read once for all of them. `decode_latents` computes rows with
few queries, for parts of their keys; `latent_projection.merge_parts` merges the parts. `attend_context` computes prompt
chunks, over the keys that were cached before the chunk. Sums are relative to the largest score so far, and use powers
of 2.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import AttentionMetadata, LatentLayer
from emberline.kernels.attention_plan import PREFILL_TILE_QUERIES
from emberline.kernels.triton.jit import (
    LaunchShape,
    has_small_shared_memory,
    jit,
    next_power_of_two,
    pdl_trigger_and_wait,
)
from emberline.kernels.work_limits import MAX_LATENT_PAIRS

FEW_TOKENS = 16
SMALL_SHAPE = LaunchShape(32, 32, 8, 2)  # needs 76 KB of shared memory for latents of 512 elements


@jit
def _decode_latents(
    q: tensor, queries: tensor, cache: tensor, tables: tensor, query_start: tensor, context: tensor, count: tensor,
    items: tensor, partials: tensor, max_and_sum: tensor, scale: tensor, capacity: tensor, q_stride: tensor,
    table_stride: tensor, cache_stride: tensor, HEADS: constexpr, PLAIN: constexpr, ROTARY: constexpr,
    ROTARY_PADDED: constexpr, RANK: constexpr, RANK_PADDED: constexpr, BLOCK_SIZE: constexpr, QUERIES: constexpr,
    PAIRS: constexpr, SPAN: constexpr, TYPE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    if tl.program_id(0) >= tl.load(count):
        return
    item = items + tl.program_id(0) * 4
    request, low, place = tl.load(item), tl.load(item + 1), tl.load(item + 3)
    place = tl.where(place < 0, capacity + request, place)
    start, before = tl.load(query_start + request), tl.load(context + request)
    num_queries = tl.load(query_start + request + 1) - start
    high = tl.minimum(tl.load(item + 2), before + num_queries)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    query, head = pair // HEADS, pair % HEADS
    is_pair = query < num_queries
    token = (start + query).to(tl.int64)[:, None]
    r, d = tl.arange(0, RANK_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    at = (token * HEADS + head[:, None]) * RANK + r
    latent_query = tl.load(queries + at, is_pair[:, None] & (r < RANK), 0.0).to(TYPE)
    at = token * q_stride + head[:, None] * (PLAIN + ROTARY) + PLAIN + d
    rotary_query = tl.load(q + at, is_pair[:, None] & (d < ROTARY), 0.0).to(TYPE)
    top = tl.full([PAIRS], -1e30, tl.float32)  # finite, since a query may attend to no key of the part
    total = tl.zeros([PAIRS], tl.float32)
    mixed = tl.zeros([PAIRS, RANK_PADDED], tl.float32)
    table = tables + request.to(tl.int64) * table_stride
    mixed, total, top = _add_latents(
        mixed, total, top, latent_query, rotary_query, before + query, cache, table, cache_stride, low, high, scale,
        ROTARY, ROTARY_PADDED, RANK, RANK_PADDED, BLOCK_SIZE, SPAN, True,
    )  # fmt: skip
    is_stored = pair < QUERIES * HEADS
    at = (place * (QUERIES * HEADS) + pair).to(tl.int64)
    tl.store(partials + at[:, None] * RANK + r, mixed, is_stored[:, None] & (r < RANK))
    tl.store(max_and_sum + 2 * at, top, is_stored)
    tl.store(max_and_sum + 2 * at + 1, total, is_stored)


@jit
def _add_latents(
    mixed: tensor, total: tensor, top: tensor, latent_query: tensor, rotary_query: tensor, position: tensor,
    cache: tensor, table: tensor, cache_stride: tensor, low: tensor, high: tensor, scale: tensor, ROTARY: constexpr,
    ROTARY_PADDED: constexpr, RANK: constexpr, RANK_PADDED: constexpr, BLOCK_SIZE: constexpr, SPAN: constexpr,
    CAUSAL: constexpr,
) -> tensor:  # fmt: skip
    """Add the contributions of the keys [low, high) to the running sums, and return the sums."""
    TYPE: constexpr = latent_query.dtype
    r, d = tl.arange(0, RANK_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    span = tl.arange(0, SPAN)
    next_block = _load_blocks(table, low, high, BLOCK_SIZE, SPAN)  # ahead of its use, so that loads are pipelined
    for first in range(low, high, SPAN):
        key, block = first + span, next_block
        next_block = _load_blocks(table, first + SPAN, high, BLOCK_SIZE, SPAN)
        is_key = (key < high)[:, None]
        at = (block.to(tl.int64) * cache_stride + key % BLOCK_SIZE * (RANK + ROTARY))[:, None]
        latent = tl.load(cache + at + ROTARY + r, is_key & (r < RANK), 0.0).to(TYPE)
        rotary = tl.load(cache + at + d, is_key & (d < ROTARY), 0.0).to(TYPE)
        scores = tl.dot(rotary_query, tl.trans(rotary), input_precision="ieee")
        scores = tl.dot(latent_query, tl.trans(latent), scores, input_precision="ieee")
        is_visible = key[None, :] < high
        if CAUSAL:
            is_visible = is_visible & (key[None, :] <= position[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(TYPE), latent, mixed * rescale[:, None], input_precision="ieee")
        top = new_top
    return mixed, total, top


@jit
def _load_blocks(table: tensor, first: tensor, high: tensor, BLOCK_SIZE: constexpr, SPAN: constexpr) -> tensor:
    """Return the block of each key from `first` on, or one number if all are in the same block."""
    if BLOCK_SIZE % SPAN == 0:
        return tl.load(table + first // BLOCK_SIZE, first < high, 0)
    else:
        key = first + tl.arange(0, SPAN)
        return tl.load(table + key // BLOCK_SIZE, key < high, 0)


def decode_latents(
    q: Tensor,
    queries: Tensor,
    layer: LatentLayer,
    keys: Tensor,
    metadata: AttentionMetadata,
    work: tuple[Tensor, Tensor, int],
    partials: Tensor,
    max_and_sum: Tensor,
    *,
    max_queries: int = 1,
    shape: LaunchShape | None = None,
    programs: int | None = None,
    pdl: bool = False,
) -> None:
    """Compute the items of a work list, and write their unmerged results to `partials` and `max_and_sum`.

    `q` [T, heads, plain + rotary] has rotated queries, `queries` [T, heads, rank] queries of latents.
    `work`: the number of items and the items of a `worklist.WorkList`, both on the device, and the capacity of the
    list.
    `programs`: an upper bound of the number of items, by default the capacity.

    The result of an item is stored at the index that the item names or, if the item covers its whole row, at capacity +
    row. At each index there is room for the results of `max_queries` * heads pairs, of `rank` numbers each.
    """
    count, items, capacity = work
    heads, rank, rotary, plain = layer.attention.q_heads, layer.rank, layer.rotary_dim, layer.plain_dim
    assert queries.is_contiguous() and partials.dtype is max_and_sum.dtype is torch.float32
    assert keys.stride()[2:] == (rank + rotary, 1) and q.stride()[1:] == (plain + rotary, 1)
    exact = torch.float32 in (q.dtype, keys.dtype)
    pairs, span, warps, stages = shape or choose_decode_shape(
        max_queries * heads, len(queries), exact, is_small=has_small_shared_memory(q.device)
    )
    tables = metadata.block_tables
    _decode_latents[(programs or capacity, -(-max_queries * heads // pairs))](
        q, queries, keys, tables, metadata.query_start, metadata.context, count, items, partials, max_and_sum,
        layer.attention.scale * math.log2(math.e), capacity, q.stride(0), tables.stride(0), keys.stride(0), heads,
        plain, rotary, max(16, next_power_of_two(rotary)), rank, max(16, next_power_of_two(rank)), keys.shape[2],
        max_queries, pairs, span, tl.float32 if exact else tl.bfloat16, pdl, num_warps=warps, num_stages=stages,
        launch_pdl=pdl,
    )  # fmt: skip


def choose_decode_shape(pairs: int, tokens: int, uses_float32: bool, *, is_small: bool = False) -> LaunchShape:
    """Return the launch shape of `decode_latents` for rows of `pairs` pairs (query, head).

    `tokens`: the tokens of the step. With few tokens, some SMs have no work. A program then gets more pipeline stages,
    and may use as much shared memory as two programs do otherwise. `is_small`: whether a program has little shared
    memory.
    """
    if uses_float32:  # no tensor cores
        return LaunchShape(16, 16, 8, 1)
    padded = min(MAX_LATENT_PAIRS, max(16, next_power_of_two(pairs)))
    if padded > 16:
        return SMALL_SHAPE if is_small else LaunchShape(padded, 32, 8, 2)
    return LaunchShape(16, 32, 4, 4 if tokens <= FEW_TOKENS else 3)


@jit
def _attend_context(
    q: tensor, queries: tensor, cache: tensor, tables: tensor, query_start: tensor, context: tensor, tiles: tensor,
    out: tensor, log_sums: tensor, scale: tensor, q_stride: tensor, table_stride: tensor, cache_stride: tensor,
    HEADS: constexpr, PLAIN: constexpr, ROTARY: constexpr, ROTARY_PADDED: constexpr, RANK: constexpr,
    RANK_PADDED: constexpr, BLOCK_SIZE: constexpr, PARTS: constexpr, TILE: constexpr, PAIRS: constexpr, SPAN: constexpr,
    TYPE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    tile = tiles + tl.program_id(0) // PARTS * 2
    request = tl.load(tile)
    if request < 0:
        return
    before = tl.load(context + request)
    if before == 0:
        return
    start = tl.load(query_start + request)
    first, num_queries = tl.load(tile + 1), tl.load(query_start + request + 1) - start
    pair = tl.program_id(0) % PARTS * PAIRS + tl.arange(0, PAIRS)
    query, head = first + pair // HEADS, pair % HEADS
    if first + tl.program_id(0) % PARTS * PAIRS // HEADS >= num_queries:
        return
    is_pair = (query < num_queries) & (pair < TILE * HEADS)
    token = (start + query).to(tl.int64)[:, None]
    r, d = tl.arange(0, RANK_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    at = (token * HEADS + head[:, None]) * RANK + r
    latent_query = tl.load(queries + at, is_pair[:, None] & (r < RANK), 0.0).to(TYPE)
    rotary_at = token * q_stride + head[:, None] * (PLAIN + ROTARY) + PLAIN + d
    rotary_query = tl.load(q + rotary_at, is_pair[:, None] & (d < ROTARY), 0.0).to(TYPE)
    top = tl.full([PAIRS], -1e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    mixed = tl.zeros([PAIRS, RANK_PADDED], tl.float32)
    table = tables + request.to(tl.int64) * table_stride
    mixed, total, top = _add_latents(
        mixed, total, top, latent_query, rotary_query, before + query, cache, table, cache_stride, 0, before, scale,
        ROTARY, ROTARY_PADDED, RANK, RANK_PADDED, BLOCK_SIZE, SPAN, False,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), is_pair[:, None] & (r < RANK))
    tl.store(log_sums + (start + query).to(tl.int64) * HEADS + head, top + tl.log2(total), is_pair)


def attend_context(
    q: Tensor,
    queries: Tensor,
    layer: LatentLayer,
    keys: Tensor,
    metadata: AttentionMetadata,
    tiles: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    shape: LaunchShape | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of prompt chunks to the latents before each chunk into `out` [T, heads, rank].

    `log_sums` [T, heads] float32 gets the base-2 logarithm of each query's softmax sum. `tiles` [n, 2] are
    (row, first query) of up to PREFILL_TILE_QUERIES tokens. Rows without cached keys are skipped.
    """
    heads, rank, rotary, plain = layer.attention.q_heads, layer.rank, layer.rotary_dim, layer.plain_dim
    assert queries.is_contiguous() and out.is_contiguous() and log_sums.is_contiguous()
    if not len(tiles):
        return
    exact = torch.float32 in (q.dtype, keys.dtype)
    pairs, span, warps, stages = shape or choose_context_shape(exact, is_small=has_small_shared_memory(q.device))
    parts, tables = -(-PREFILL_TILE_QUERIES * heads // pairs), metadata.block_tables
    _attend_context[(len(tiles) * parts,)](
        q, queries, keys, tables, metadata.query_start, metadata.context, tiles, out, log_sums,
        layer.attention.scale * math.log2(math.e), q.stride(0), tables.stride(0), keys.stride(0), heads, plain, rotary,
        max(16, next_power_of_two(rotary)), rank, max(16, next_power_of_two(rank)), keys.shape[2], parts,
        PREFILL_TILE_QUERIES, pairs, span, tl.float32 if exact else tl.bfloat16, pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def choose_context_shape(uses_float32: bool, *, is_small: bool = False) -> LaunchShape:
    """Return the launch shape of `attend_context`. `is_small`: whether a program has little shared memory."""
    if uses_float32:  # no tensor cores
        return LaunchShape(16, 16, 8, 1)
    return SMALL_SHAPE if is_small else LaunchShape(64, 64, 8, 2)
