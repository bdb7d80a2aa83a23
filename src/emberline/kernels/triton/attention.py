"""paged_attention: `OpBackend.paged_attention` for any chunks, head size, cache dtype and block size.

A Triton program computes one tile: some queries of one request, for all query heads that share one KV head. The rows
of the tile are pairs (query, head), so that keys and values are read once for the whole group of heads. The program
loops over spans of keys with an online softmax: sums are relative to the largest score so far, with powers of 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import AttentionInputs
from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

BLOCK_M = 16  # default number of queries in a tile
MAX_PROGRAM_ROWS = 128  # (query, head) pairs of a program


@jit
def _paged_attention(
    qkv: tensor, k_cache: tensor, v_cache: tensor, tables: tensor, query_start: tensor, context: tensor,
    sinks: tensor, tiles: tensor, out: tensor, scale: tensor, window: tensor, softcap: tensor, capped_scale: tensor,
    qkv_stride: tensor, table_stride: tensor, cache_stride: tensor, out_stride: tensor,
    KV_HEADS: constexpr, GROUP: constexpr, GROUP_PADDED: constexpr, HEAD_DIM: constexpr, DIM_PADDED: constexpr,
    BLOCK_SIZE: constexpr, QUERIES: constexpr, PARTS: constexpr, ROWS: constexpr, SPAN: constexpr,
    WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr, HAS_SINKS: constexpr, TYPE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    part = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS  # late queries have most keys, so they start first
    head = tl.program_id(0) % KV_HEADS
    tile = tiles + part // PARTS * 2
    request = tl.load(tile)
    if request < 0:
        return
    first = tl.load(tile + 1) + part % PARTS * QUERIES
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    if first >= count:
        return
    before = tl.load(context + request)

    row = tl.arange(0, ROWS)
    query, member = first + row // GROUP_PADDED, row % GROUP_PADDED
    d = tl.arange(0, DIM_PADDED)
    token, column = (start + query).to(tl.int64)[:, None], ((head * GROUP + member) * HEAD_DIM)[:, None] + d[None, :]
    is_query = (query < tl.minimum(first + QUERIES, count)) & (member < GROUP)
    inside = is_query[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(qkv + token * qkv_stride + column, inside, 0.0).to(TYPE)

    top = tl.full([ROWS], -1e30, tl.float32)  # finite, since a row may attend to no key of its first spans
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # scores that the sums begin with
        top = tl.load(sinks + head * GROUP + member, member < GROUP, 0.0) * 1.4426950408889634  # log2(e)
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    position, end = before + query, before + tl.minimum(first + QUERIES, count)
    begin_masked = (before + first + 1) // SPAN * SPAN
    if WINDOWED:
        begin_masked = tl.maximum(_first_key(before + first, window, CHUNKED), 0) // SPAN * SPAN
    table, offset = tables + request.to(tl.int64) * table_stride, head * (BLOCK_SIZE * HEAD_DIM)
    k_head, v_head = k_cache + offset, v_cache + offset
    if not WINDOWED:
        mixed, total, top = _add_keys(
            mixed, total, top, q, position, k_head, v_head, table, cache_stride, 0, begin_masked, end, scale, window,
            softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, False, False, CHUNKED, CAPPED,
        )  # fmt: skip
    mixed, total, top = _add_keys(
        mixed, total, top, q, position, k_head, v_head, table, cache_stride, begin_masked, end, end, scale, window,
        softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, True, WINDOWED, CHUNKED, CAPPED,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    tl.store(out + token * out_stride + column, mixed.to(out.dtype.element_ty), inside)


@jit
def _add_keys(
    mixed: tensor, total: tensor, top: tensor, q: tensor, position: tensor, k_head: tensor, v_head: tensor,
    table: tensor, cache_stride: tensor, low: tensor, high: tensor, end: tensor, scale: tensor, window: tensor,
    softcap: tensor, capped_scale: tensor,
    HEAD_DIM: constexpr, DIM_PADDED: constexpr, BLOCK_SIZE: constexpr, SPAN: constexpr,
    MASKED: constexpr, WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr,
) -> tensor:  # fmt: skip
    """Add the contributions of the keys [low, high) to the running sums, and return the sums.

    MASKED may be False only if every query attends to all of these keys, and their number is a multiple of SPAN.
    With CAPPED, scores s become softcap * tanh(s * capped_scale) first.
    """
    d = tl.arange(0, DIM_PADDED)[None, :]
    for at in range(low, high, SPAN):
        key = at + tl.arange(0, SPAN)
        if BLOCK_SIZE % SPAN == 0:
            block = tl.load(table + at // BLOCK_SIZE)
        else:
            block = tl.load(table + key // BLOCK_SIZE, key < end, 0)
        rows = block.to(tl.int64) * cache_stride + key % BLOCK_SIZE * HEAD_DIM
        offsets, inside = rows[:, None] + d, d < HEAD_DIM
        if MASKED:
            inside = (key < end)[:, None] & inside
        k = tl.load(k_head + offsets, inside, 0.0).to(q.dtype)
        v = tl.load(v_head + offsets, inside, 0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * capped_scale * scores) + 1.0))  # of tanh
        if MASKED:
            is_visible = key[None, :] <= position[:, None]
            if WINDOWED:
                is_visible = is_visible & (key[None, :] >= _first_key(position, window, CHUNKED)[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(q.dtype), v, mixed * rescale[:, None], input_precision="ieee")
        top = new_top
    return mixed, total, top


@jit
def _first_key(position: tensor, window: tensor, CHUNKED: constexpr) -> tensor:
    """Return the first key that a query attends to; a negative one stands for 0."""
    return position // window * window if CHUNKED else position + 1 - window


def choose_tile_queries(max_queries: int, group: int) -> int:
    """Return a fast `block_m` for chunks of up to `max_queries`, with `group` query heads per KV head."""
    padded = next_power_of_two(group)
    return max(1, min(max(16, next_power_of_two(max_queries * padded)), MAX_PROGRAM_ROWS) // padded)


def make_tiles(query_counts: NDArray[np.integer[Any]], block_m: int = BLOCK_M) -> NDArray[np.int32]:
    """Return tiles [n, 2] as (row, first query) of at most `block_m` queries, which cover all queries."""
    tiles = -(-query_counts // block_m)
    requests = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(requests)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.stack([requests, nth * block_m], axis=1).astype(np.int32)


def paged_attention(
    inputs: AttentionInputs, tiles: Tensor, *, out: Tensor | None = None, block_m: int = BLOCK_M, pdl: bool = False
) -> Tensor:
    """Return the result that `OpBackend.paged_attention` describes, written to `out` if given.

    `tiles` come from make_tiles with the same `block_m`, a power of two. A tile with a negative row is padding.
    """
    qkv, layer, keys, values, metadata = inputs
    q_heads, kv_heads, head_dim, window = layer.q_heads, layer.kv_heads, layer.head_dim, layer.window
    out = torch.empty((len(qkv), q_heads * head_dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    assert keys.stride() == values.stride() and tiles.is_contiguous() and layer.scale > 0
    group, dim = q_heads // kv_heads, max(16, next_power_of_two(head_dim))
    padded = next_power_of_two(group)
    exact = torch.float32 in (qkv.dtype, keys.dtype)
    queries = max(1, min(block_m, _max_tile_rows(dim, exact) // padded))
    rows, parts = max(16, queries * padded), block_m // queries
    span, warps, stages = _choose_launch_shape(rows, dim, exact)
    if len(tiles):
        tables = metadata.block_tables
        _paged_attention[(len(tiles) * parts * kv_heads,)](
            qkv, keys, values, tables, metadata.query_start, metadata.context,
            tables if layer.sinks is None else layer.sinks, tiles, out,
            (1.0 if layer.softcap else layer.scale) * math.log2(math.e), window,
            layer.softcap, layer.scale / layer.softcap if layer.softcap else 0.0,
            qkv.stride(0), tables.stride(0), keys.stride(0), out.stride(0),
            kv_heads, group, padded, head_dim, dim, keys.shape[2], queries, parts, rows, span, window > 0,
            layer.chunked,
            layer.softcap > 0, layer.sinks is not None, tl.float32 if exact else tl.bfloat16, pdl,
            num_warps=warps, num_stages=stages, launch_pdl=pdl,
        )  # fmt: skip
    return out


def _max_tile_rows(dim: int, uses_float32: bool) -> int:
    """Return for how many rows the sums fit into registers; a larger tile is computed in several parts."""
    return min(MAX_PROGRAM_ROWS, max(16, (4096 if uses_float32 else 16384) // dim))


def _choose_launch_shape(rows: int, dim: int, uses_float32: bool) -> tuple[int, int, int]:
    """Return (keys per span, warps, pipeline stages) for a launch."""
    if uses_float32:  # no tensor cores
        return 16, (8 if rows * dim > 2048 else 4), 1
    return (64 if dim <= 128 else 32), (8 if rows >= 128 else 4), 3
