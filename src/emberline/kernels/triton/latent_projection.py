"""The parts of latent attention before its softmax (queries and keys) and after it (values of each head).

`project` computes in one launch what lies between the projections of a layer and its attention: queries of latents
(queries times the matrix that turns latents into keys), the rotation of queries and keys, the norm of latents and the
write to the cache. `merge_parts` merges the partial results of decode rows, always in the same order. `multiply_values`
multiplies the result of attention on latents by the matrices that turn latents into values.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import AttentionMetadata, LatentLayer
from emberline.kernels.attention_plan import PREFILL_TILE_QUERIES
from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait
from emberline.kernels.triton.rope import _round_to_cache_dtype

PRODUCT_TOKENS = 64  # tokens of a program that multiplies by the matrix of a head; 16 if there are no more
PRODUCT_COLUMNS = 64  # columns of a program that computes queries of latents
MERGED_PARTS = 8  # partial results that a program loads at a time


@jit
def _project(
    q: tensor, kv: tensor, positions: tensor, slots: tensor, cos_sin: tensor, norm: tensor, weight: tensor,
    queries: tensor, cache: tensor, latents: tensor, rotary_keys: tensor, out: tensor, query_limit: tensor,
    q_stride: tensor, kv_stride: tensor, cache_stride: tensor, weight_stride: tensor, num_queries: tensor,
    product_programs: tensor, eps: tensor, HEADS: constexpr, HEADS_PADDED: constexpr, PLAIN: constexpr,
    PLAIN_PADDED: constexpr, HALF: constexpr, HALF_PADDED: constexpr, RANK: constexpr, RANK_PADDED: constexpr,
    OUT_WIDTH: constexpr, BLOCK_SIZE: constexpr, TOKENS: constexpr, COLUMNS: constexpr, INTERLEAVED: constexpr,
    LIMITED: constexpr, FRESH: constexpr, CLEAR: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    is_product = program < product_programs
    head, piece = program % HEADS, program // HEADS
    tiles: constexpr = (RANK + COLUMNS - 1) // COLUMNS
    n = piece % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    k = tl.arange(0, PLAIN_PADDED)
    inside = is_product & (k[:, None] < PLAIN) & (n < RANK)
    w = tl.load(weight + head.to(tl.int64) * weight_stride + k[:, None] * RANK + n, inside, 0.0)
    pdl_trigger_and_wait(PDL)  # the matrix is read before the preceding kernel ends
    if is_product:
        limit = num_queries
        if LIMITED:
            limit = tl.minimum(limit, tl.load(query_limit))
        first = piece // tiles * TOKENS
        if first < limit:
            t = (first + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
            at = q + t * q_stride + head * (PLAIN + 2 * HALF) + k[None, :]
            x = tl.load(at, (t < limit) & (k[None, :] < PLAIN), 0.0)
            y = tl.dot(x, w, input_precision="ieee")
            target = queries + (t * HEADS + head) * RANK + n
            tl.store(target, y.to(queries.dtype.element_ty), (t < limit) & (n < RANK))
    else:
        token = program - product_programs
        wide = token.to(tl.int64)
        _cache_latent(
            kv + wide * kv_stride, tl.load(slots + token), tl.load(positions + token).to(tl.int64), cos_sin, norm,
            cache, latents + wide * RANK, rotary_keys + wide * (2 * HALF), cache_stride, eps, HALF, HALF_PADDED, RANK,
            RANK_PADDED, BLOCK_SIZE, INTERLEAVED, FRESH,
        )  # fmt: skip
        _rotate_queries(
            q + wide * q_stride, tl.load(positions + token).to(tl.int64), cos_sin, HEADS, HEADS_PADDED, PLAIN, HALF,
            HALF_PADDED, INTERLEAVED,
        )  # fmt: skip
        if CLEAR:
            for start in range(0, OUT_WIDTH, 1024):
                column = start + tl.arange(0, 1024)
                tl.store(out + wide * OUT_WIDTH + column, tl.zeros([1024], out.dtype.element_ty), column < OUT_WIDTH)


@jit
def _cache_latent(
    kv: tensor, slot: tensor, position: tensor, cos_sin: tensor, norm: tensor, cache: tensor, latents: tensor,
    rotary_keys: tensor, cache_stride: tensor, eps: tensor, HALF: constexpr, HALF_PADDED: constexpr, RANK: constexpr,
    RANK_PADDED: constexpr, BLOCK_SIZE: constexpr, INTERLEAVED: constexpr, FRESH: constexpr,
) -> None:  # fmt: skip
    """Norm the latent of a token and rotate the rotary elements of its key; write both to the cache.

    With FRESH, also write what the cache holds to `latents` and `rotary_keys`, in the dtype of the activations.
    """
    r = tl.arange(0, RANK_PADDED)
    x = tl.load(kv + r, r < RANK, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
    normed = (x * scale).to(kv.dtype.element_ty).to(tl.float32) * tl.load(norm + r, r < RANK, 0.0)
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    if INTERLEAVED:
        first, second = 2 * d, 2 * d + 1
    else:
        first, second = d, HALF + d
    angle = cos_sin + position * (2 * HALF) + d
    cos, sin = tl.load(angle, inside, 0.0), tl.load(angle + HALF, inside, 0.0)
    a = tl.load(kv + RANK + first, inside, 0.0).to(tl.float32)
    b = tl.load(kv + RANK + second, inside, 0.0).to(tl.float32)
    at = cache + slot // BLOCK_SIZE * cache_stride + slot % BLOCK_SIZE * (RANK + 2 * HALF)
    TYPE: constexpr = cache.dtype.element_ty
    latent = _round_to_cache_dtype(normed.to(kv.dtype.element_ty).to(tl.float32), TYPE)
    turned_a, turned_b = _round_to_cache_dtype(a * cos - b * sin, TYPE), _round_to_cache_dtype(b * cos + a * sin, TYPE)
    is_cached = slot >= 0
    tl.store(at + 2 * HALF + r, latent, is_cached & (r < RANK))
    tl.store(at + first, turned_a, is_cached & inside)
    tl.store(at + second, turned_b, is_cached & inside)
    if FRESH:
        OUT: constexpr = latents.dtype.element_ty
        tl.store(latents + r, latent.to(tl.float32).to(OUT), r < RANK)
        tl.store(rotary_keys + first, turned_a.to(tl.float32).to(OUT), inside)
        tl.store(rotary_keys + second, turned_b.to(tl.float32).to(OUT), inside)


@jit
def _rotate_queries(
    q: tensor, position: tensor, cos_sin: tensor, HEADS: constexpr, HEADS_PADDED: constexpr, PLAIN: constexpr,
    HALF: constexpr, HALF_PADDED: constexpr, INTERLEAVED: constexpr,
) -> None:  # fmt: skip
    """Rotate the rotary elements of all query heads of a token in place."""
    d = tl.arange(0, HALF_PADDED)[None, :]
    head = tl.arange(0, HEADS_PADDED)[:, None]
    inside = (d < HALF) & (head < HEADS)
    if INTERLEAVED:
        first, second = 2 * d, 2 * d + 1
    else:
        first, second = d, HALF + d
    angle = cos_sin + position * (2 * HALF) + d
    cos, sin = tl.load(angle, d < HALF, 0.0), tl.load(angle + HALF, d < HALF, 0.0)
    at = q + head * (PLAIN + 2 * HALF) + PLAIN
    a, b = tl.load(at + first, inside, 0.0).to(tl.float32), tl.load(at + second, inside, 0.0).to(tl.float32)
    tl.store(at + first, (a * cos - b * sin).to(q.dtype.element_ty), inside)
    tl.store(at + second, (b * cos + a * sin).to(q.dtype.element_ty), inside)


def project(
    q: Tensor,
    kv: Tensor,
    layer: LatentLayer,
    keys: Tensor,
    metadata: AttentionMetadata,
    queries: Tensor,
    *,
    query_limit: Tensor | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,
    cleared: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write queries of latents to `queries`, and the tokens' latents and rotated keys to the cache.

    `q` [T, heads, plain + rotary] is rotated in place. `kv` [T, rank + rotary] has the latents before their norm, then
    the keys before their rotation. `queries` [N, heads, rank] receives the queries of the first N <= T tokens, or of
    the first `query_limit` tokens (an int32 on the device) if that is less.
    `fresh`: tensors of latents [T, rank] and keys [T, rotary] that receive a copy of what is written to the cache.
    `cleared`: a tensor [T, ..] that is filled with zeros.
    """
    tokens, heads, size = q.shape
    plain, half, rank = layer.plain_dim, layer.rotary_dim // 2, layer.rank
    weight = layer.products.keys.weight  # [heads, rank, plain], of which `rank` is contiguous
    assert q.stride()[1:] == (size, 1) and kv.stride(1) == 1 and weight.stride()[1:] == (1, rank)
    assert queries.is_contiguous() and keys.stride()[2:] == (rank + 2 * half, 1) and layer.norm.is_contiguous()
    assert layer.attention.cos_sin.shape[1] == 2 * half and layer.attention.cos_sin.is_contiguous()
    if not tokens:
        return
    columns = min(PRODUCT_COLUMNS, max(16, next_power_of_two(rank)))
    product_tokens = 16 if len(queries) <= 16 or q.dtype is torch.float32 else PRODUCT_TOKENS
    products = -(-len(queries) // product_tokens) * heads * -(-rank // columns)
    _project[(products + tokens,)](
        q, kv, metadata.positions, metadata.slots, layer.attention.cos_sin, layer.norm, weight, queries, keys,
        *((kv, kv) if fresh is None else fresh), kv if cleared is None else cleared,
        metadata.slots if query_limit is None else query_limit, q.stride(0), kv.stride(0), keys.stride(0),
        weight.stride(0), len(queries), products, layer.eps, heads, next_power_of_two(heads), plain,
        max(16, next_power_of_two(plain)), half, next_power_of_two(half), rank, next_power_of_two(rank),
        0 if cleared is None else cleared[0].numel(), keys.shape[2], product_tokens, columns,
        layer.attention.interleaved, query_limit is not None, fresh is not None, cleared is not None, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@jit
def _merge_parts(
    partials: tensor, max_and_sum: tensor, partial_starts: tensor, query_start: tensor, merged: tensor,
    capacity: tensor, HEADS: constexpr, RANK: constexpr, RANK_PADDED: constexpr, QUERIES: constexpr, PARTS: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    row, query, head = tl.program_id(0) // QUERIES, tl.program_id(0) % QUERIES, tl.program_id(1)
    first = tl.load(partial_starts + row)
    count = tl.load(partial_starts + row + 1) - first
    first = tl.where(count > 0, first, capacity + row)  # a row with one item has a place of its own
    is_query = query < tl.load(query_start + row + 1) - tl.load(query_start + row)
    count = tl.where(is_query, tl.maximum(count, 1), 0)
    r = tl.arange(0, RANK_PADDED)
    top, total = -1e30, 0.0
    mixed = tl.zeros([RANK_PADDED], tl.float32)
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = (((first + part) * QUERIES + query) * HEADS + head).to(tl.int64)
        tops = tl.load(max_and_sum + 2 * at, part < count, -1e30)
        totals = tl.load(max_and_sum + 2 * at + 1, part < count, 0.0)
        values = tl.load(partials + at[:, None] * RANK + r[None, :], (part < count)[:, None] & (r < RANK)[None, :], 0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        rescale, weights = tl.exp2(top - new_top), tl.exp2(tops - new_top)
        mixed = mixed * rescale + tl.sum(values * weights[:, None], 0)
        total = total * rescale + tl.sum(totals * weights, 0)
        top = new_top
    mixed = mixed / tl.where(total > 0, total, 1.0)
    target = merged + (tl.program_id(0) * HEADS + head).to(tl.int64) * RANK + r
    tl.store(target, mixed.to(merged.dtype.element_ty), r < RANK)


def merge_parts(
    partials: Tensor,
    max_and_sum: Tensor,
    partial_starts: Tensor,
    query_start: Tensor,
    merged: Tensor,
    *,
    capacity: int,
    max_queries: int = 1,
    pdl: bool = False,
) -> None:
    """Merge the partial results of decode rows, in the order of their keys, into `merged`.

    `merged` is [rows * max_queries, heads, rank]; rows with fewer queries get zeros for the others. `partials`,
    `max_and_sum` and `partial_starts` are those of `latent_attention.decode_latents`.
    """
    slots, heads, rank = merged.shape
    assert merged.is_contiguous()
    _merge_parts[(slots, heads)](
        partials, max_and_sum, partial_starts, query_start, merged, capacity, heads, rank, next_power_of_two(rank),
        max_queries, MERGED_PARTS, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@jit
def _multiply_values(
    x: tensor, weight: tensor, out: tensor, tiles: tensor, query_start: tensor, context: tensor, slots: tensor,
    weight_stride: tensor, HEADS: constexpr, RANK: constexpr, RANK_PADDED: constexpr, VALUES: constexpr,
    QUERIES: constexpr, TOKENS: constexpr, PARTS: constexpr, COLUMNS: constexpr, TILED: constexpr, TYPE: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    n, r = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK_PADDED)
    inside = (n < VALUES)[:, None] & (r < RANK)[None, :]
    w = tl.load(weight + head.to(tl.int64) * weight_stride + n[:, None] * RANK + r[None, :], inside, 0.0)
    pdl_trigger_and_wait(PDL)  # the matrix is read before the preceding kernel ends
    index = tl.arange(0, TOKENS)
    if TILED:
        tile = tiles + tl.program_id(0) // PARTS * 2
        row = tl.maximum(tl.load(tile), 0)
        query = tl.load(tile + 1) + tl.program_id(0) % PARTS * TOKENS + index
        start = tl.load(query_start + row)
        has_keys = (tl.load(tile) >= 0) & (tl.load(context + row) > 0)
        is_query = has_keys & (query < tl.load(query_start + row + 1) - start)
        source = start + query
    else:
        source = tl.program_id(0) * TOKENS + index
        row, query = source // QUERIES, source % QUERIES
        start = tl.load(query_start + row, source < slots, 0)
        is_query = query < tl.load(query_start + row + 1, source < slots, 0) - start
    if tl.max(is_query.to(tl.int32), 0) > 0:
        at = (source.to(tl.int64) * HEADS + head)[:, None] * RANK + r[None, :]
        rows = tl.load(x + at, is_query[:, None] & (r < RANK)[None, :], 0.0)
        y = tl.dot(rows.to(TYPE), tl.trans(w.to(TYPE)), input_precision="ieee")
        target = out + ((start + query).to(tl.int64) * HEADS + head)[:, None] * VALUES + n[None, :]
        tl.store(target, y.to(out.dtype.element_ty), is_query[:, None] & (n < VALUES)[None, :])


def multiply_values(
    x: Tensor,
    layer: LatentLayer,
    out: Tensor,
    metadata: AttentionMetadata,
    *,
    tiles: Tensor | None = None,
    max_queries: int = 1,
    pdl: bool = False,
) -> None:
    """Multiply x, the result of attention on latents, by the matrices that turn latents into values.

    The result is written to `out` [T, heads * values]. Without `tiles`, x [rows * max_queries, heads, rank] has the
    queries of decode rows. With `tiles` [n, 2], which are (row, first query) of up to PREFILL_TILE_QUERIES tokens, x is
    [T, heads, rank], and rows without cached keys are skipped.
    """
    heads, values, rank = layer.attention.q_heads, layer.value_dim, layer.rank
    weight, count = layer.products.values.weight, len(x) if tiles is None else len(tiles)
    assert weight.stride()[1:] == (rank, 1) and out.is_contiguous() and x.is_contiguous()
    if not count:
        return
    exact = x.dtype is torch.float32
    tokens = 16 if exact or len(x) <= 16 else PRODUCT_TOKENS
    columns = min(16 if exact else 32 if tokens == 16 else 64, max(16, next_power_of_two(values)))
    parts = PREFILL_TILE_QUERIES // tokens
    programs = -(-count // tokens) if tiles is None else count * parts
    _multiply_values[(programs, heads, -(-values // columns))](
        x, weight, out, x if tiles is None else tiles, metadata.query_start, metadata.context, count, weight.stride(0),
        heads, rank, max(16, next_power_of_two(rank)), values, max_queries, tokens, parts, columns, tiles is not None,
        tl.float32 if exact else tl.bfloat16, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
