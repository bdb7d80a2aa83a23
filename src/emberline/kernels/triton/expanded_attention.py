"""attend_expanded: attention of prompt chunks over the keys and values of each head, computed from latents.

The keys are the tokens of the chunk, or a range of the tokens before it, which `gather_latents` copies from the cache.
A launch can continue the softmax sums of earlier launches with other keys. A query and a key have plain elements, of
which each head has its own, then rotary elements, of which the keys of all heads share one copy.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import AttentionMetadata, LatentLayer
from emberline.kernels.attention_plan import PREFILL_TILE_QUERIES
from emberline.kernels.triton.jit import LaunchShape, jit, next_power_of_two, pdl_trigger_and_wait

GATHERED_KEYS = 8  # keys that a program of `gather_latents` copies; every block size is a multiple


@jit
def _attend_expanded(
    q: tensor, kv: tensor, rotary_rows: tensor, query_start: tensor, context: tensor, tiles: tensor, log_sums: tensor,
    ranges: tensor, out: tensor, scale: tensor, q_stride: tensor, HEADS: constexpr, PLAIN: constexpr,
    PLAIN_PADDED: constexpr, ROTARY: constexpr, ROTARY_PADDED: constexpr, VALUES: constexpr, VALUES_PADDED: constexpr,
    PARTS: constexpr, QUERIES: constexpr, SPAN: constexpr, HAS_STATE: constexpr, HAS_RANGES: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    head, part = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    tile = tiles + part // PARTS * 2
    request = tl.load(tile)
    if request < 0:
        return
    start = tl.load(query_start + request)
    first, count = tl.load(tile + 1) + part % PARTS * QUERIES, tl.load(query_start + request + 1) - start
    if first >= count:
        return
    first_key, num_keys = start, count
    if HAS_RANGES:
        first_key, num_keys = tl.load(ranges + 3 * request), tl.load(ranges + 3 * request + 1)
        if num_keys == 0:
            return
    query = first + tl.arange(0, QUERIES)
    is_query = (query < count)[:, None]
    token = (start + query).to(tl.int64)[:, None]
    d, e = tl.arange(0, PLAIN_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    v = tl.arange(0, VALUES_PADDED)[None, :]
    at = q + token * q_stride + head * (PLAIN + ROTARY)
    plain_query = tl.load(at + d, is_query & (d < PLAIN), 0.0)
    rotary_query = tl.load(at + PLAIN + e, is_query & (e < ROTARY), 0.0)
    target = out + (token * HEADS + head) * VALUES + v
    inside = is_query & (v < VALUES)
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, VALUES_PADDED], tl.float32)
    sum_at = log_sums + (start + query).to(tl.int64) * HEADS + head
    if HAS_STATE:
        has_state = tl.load(context + request) > 0
        if HAS_RANGES:
            has_state = tl.load(ranges + 3 * request + 2) > 0
        before = tl.load(sum_at, has_state & (query < count), -1e30)
        total = tl.where(before > -1e29, 1.0, 0.0)
        top = before
        mixed = tl.load(target, inside & has_state, 0.0).to(tl.float32)
    keys = kv + first_key.to(tl.int64) * (HEADS * (PLAIN + VALUES)) + head * (PLAIN + VALUES)
    rotary_keys = rotary_rows + first_key.to(tl.int64) * ROTARY
    begin_masked, end, last_key = first // SPAN * SPAN, tl.minimum(first + QUERIES, count), query
    if HAS_RANGES:
        begin_masked, end, last_key = num_keys // SPAN * SPAN, num_keys, query * 0 + num_keys - 1
    mixed, total, top = _add_keys(
        mixed, total, top, plain_query, rotary_query, last_key, keys, rotary_keys, 0, begin_masked, end,
        scale, HEADS, PLAIN, PLAIN_PADDED, ROTARY, ROTARY_PADDED, VALUES, VALUES_PADDED, SPAN, False,
    )  # fmt: skip
    mixed, total, top = _add_keys(
        mixed, total, top, plain_query, rotary_query, last_key, keys, rotary_keys, begin_masked, end, end,
        scale, HEADS, PLAIN, PLAIN_PADDED, ROTARY, ROTARY_PADDED, VALUES, VALUES_PADDED, SPAN, True,
    )  # fmt: skip
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), inside)
    if HAS_RANGES:
        tl.store(sum_at, top + tl.log2(total), query < count)


@jit
def _add_keys(
    mixed: tensor, total: tensor, top: tensor, plain_query: tensor, rotary_query: tensor, last_key: tensor,
    keys: tensor, rotary_keys: tensor, low: tensor, high: tensor, end: tensor, scale: tensor, HEADS: constexpr,
    PLAIN: constexpr, PLAIN_PADDED: constexpr, ROTARY: constexpr, ROTARY_PADDED: constexpr, VALUES: constexpr,
    VALUES_PADDED: constexpr, SPAN: constexpr, MASKED: constexpr,
) -> tensor:  # fmt: skip
    """Add the contributions of the keys [low, high) to the running sums, and return the sums.

    MASKED may be False only if every query attends to all of these keys, and their number is a multiple of SPAN.
    """
    TYPE: constexpr = plain_query.dtype
    d, e = tl.arange(0, PLAIN_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    v = tl.arange(0, VALUES_PADDED)[None, :]
    for at in range(low, high, SPAN):
        key = (at + tl.arange(0, SPAN))[:, None]
        row = keys + key.to(tl.int64) * (HEADS * (PLAIN + VALUES))
        is_plain, is_rotary, is_value = d < PLAIN, e < ROTARY, v < VALUES
        if MASKED:
            is_plain, is_rotary, is_value = (key < end) & is_plain, (key < end) & is_rotary, (key < end) & is_value
        plain = tl.load(row + d, is_plain, 0.0)
        rotary = tl.load(rotary_keys + key.to(tl.int64) * ROTARY + e, is_rotary, 0.0)
        value = tl.load(row + PLAIN + v, is_value, 0.0)
        scores = tl.dot(plain_query, tl.trans(plain), input_precision="ieee")
        scores = tl.dot(rotary_query, tl.trans(rotary), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where((at + tl.arange(0, SPAN))[None, :] <= last_key[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(TYPE), value, mixed * rescale[:, None], input_precision="ieee")
        top = new_top
    return mixed, total, top


def attend_expanded(
    q: Tensor,
    kv: Tensor,
    rotary_keys: Tensor,
    layer: LatentLayer,
    metadata: AttentionMetadata,
    tiles: Tensor,
    out: Tensor,
    *,
    log_sums: Tensor | None = None,
    ranges: Tensor | None = None,
    shape: LaunchShape | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of the tokens of `tiles` to `out` [T, heads * values].

    `q` [T, heads, plain + rotary] has rotated queries, `kv` [T, heads, plain + values] the keys and values of each
    token, and `rotary_keys` [T, rotary] the rotary elements of the keys. `tiles` [n, 2] are (row, first query) of up to
    PREFILL_TILE_QUERIES tokens; a negative row is padding.

    Without `ranges`, a row attends to its own tokens. If `log_sums` [T, heads] is given, rows with earlier keys
    continue a result: `out` has their attention to these keys, and `log_sums` the base-2 logarithms of the softmax
    sums.

    With `ranges` [rows, 3] int32, row b attends to other keys. ranges[b] is the index of the first of them in `kv` and
    `rotary_keys`, their number, and whether `out` and `log_sums` already have a result for the row. Both are updated,
    and rows without keys are skipped.
    """
    heads, plain, rotary, values = layer.attention.q_heads, layer.plain_dim, layer.rotary_dim, layer.value_dim
    assert q.stride()[1:] == (plain + rotary, 1) and kv.is_contiguous() and out.is_contiguous()
    assert rotary_keys.is_contiguous() and kv.dtype is q.dtype is rotary_keys.dtype
    if not len(tiles):
        return
    exact = q.dtype is torch.float32
    queries, span, warps, stages = shape or (LaunchShape(16, 16, 4, 1) if exact else LaunchShape(128, 64, 8, 3))
    parts = PREFILL_TILE_QUERIES // queries
    _attend_expanded[(len(tiles) * parts * heads,)](
        q, kv, rotary_keys, metadata.query_start, metadata.context, tiles, q if log_sums is None else log_sums,
        tiles if ranges is None else ranges, out,
        layer.attention.scale * math.log2(math.e), q.stride(0), heads, plain,
        max(16, next_power_of_two(plain)), rotary, max(16, next_power_of_two(rotary)), values,
        max(16, next_power_of_two(values)), parts, queries, span, log_sums is not None, ranges is not None, pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


@jit
def _gather_latents(
    cache: tensor, tables: tensor, sources: tensor, latents: tensor, rotary_keys: tensor, table_stride: tensor,
    cache_stride: tensor, ROTARY: constexpr, ROTARY_PADDED: constexpr, RANK: constexpr, RANK_PADDED: constexpr,
    BLOCK_SIZE: constexpr, KEYS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    parts: constexpr = BLOCK_SIZE // KEYS
    source = sources + tl.program_id(0) // parts * 2
    block = tl.load(tables + tl.load(source).to(tl.int64) * table_stride + tl.load(source + 1))
    key = tl.program_id(0) % parts * KEYS + tl.arange(0, KEYS)[:, None]
    row = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_SIZE + key
    r, d = tl.arange(0, RANK_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    at = cache + block.to(tl.int64) * cache_stride + key * (RANK + ROTARY)
    TYPE: constexpr = latents.dtype.element_ty
    tl.store(latents + row * RANK + r, tl.load(at + ROTARY + r, r < RANK, 0.0).to(TYPE), r < RANK)
    tl.store(rotary_keys + row * ROTARY + d, tl.load(at + d, d < ROTARY, 0.0).to(TYPE), d < ROTARY)


def gather_latents(
    keys: Tensor, tables: Tensor, sources: Tensor, latents: Tensor, rotary_keys: Tensor, *, pdl: bool = False
) -> None:
    """Copy blocks of the cache `keys` to consecutive rows of `latents` [.., rank] and `rotary_keys` [.., rotary].

    Block i is copied from block tables[sources[i, 0], sources[i, 1]].
    """
    size, rank, rotary = keys.shape[2], latents.shape[1], rotary_keys.shape[1]
    assert latents.is_contiguous() and rotary_keys.is_contiguous() and keys.stride()[2:] == (rank + rotary, 1)
    _gather_latents[(len(sources) * (size // GATHERED_KEYS),)](
        keys, tables, sources, latents, rotary_keys, tables.stride(0), keys.stride(0), rotary,
        next_power_of_two(rotary), rank, next_power_of_two(rank), size, GATHERED_KEYS, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
