"""split_decode_attention: attention of rows with one or a few new tokens each, for any kind of layer.

It supports every head size, cache dtype, window, chunk, softcap and sink that `paged_attention` of triton/attention.py
supports, and splits the keys of a row among several programs. A program computes one part of a row's keys for the query
heads of one KV head. Without a window, `worklist` cuts the rows. With a window, each row's visible keys are cut into
`worklist.count_window_parts` parts of equal size, so that a windowed layer does not pay for the whole context. Of a row
with several parts, each program writes a partial result, and the program that ends last merges them in the order of
their indices. So a result depends only on the row's keys and on where they are cut.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor
from triton.language.target_info import cuda_capability_geq

from emberline.kernels import work_limits, worklist
from emberline.kernels.arguments import AttentionInputs
from emberline.kernels.triton.attention import add_keys, choose_product_type, first_key
from emberline.kernels.triton.jit import (
    jit,
    jit_for_activations,
    next_power_of_two,
    pdl_trigger,
    pdl_wait,
    prefetch,
)
from emberline.kernels.worklist import TILE_KEYS

if TYPE_CHECKING:
    from emberline.kernels.cuda.decode import DecodeScratch, DeviceWorkList

PROGRAMS_PER_SM = 4  # which compute one part after the other, so that a small batch needs few launches of programs
MERGED_ELEMENTS = 1 << 11  # elements of partial results that a warp merges at a time


@jit_for_activations("max_parts", "rows")
def _split_decode(
    qkv: tensor, k_cache: tensor, v_cache: tensor, tables: tensor, query_start: tensor, context: tensor, sinks: tensor,
    count: tensor, items: tensor, partial_starts: tensor, partials: tensor, max_and_sum: tensor, arrivals: tensor,
    out: tensor, scale: tensor, window: tensor, softcap: tensor, capped_scale: tensor, qkv_stride: tensor,
    table_stride: tensor, cache_stride: tensor, out_stride: tensor, max_parts: tensor, rows: tensor,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_PADDED: constexpr, BLOCK_SIZE: constexpr,
    SLOT_ROWS: constexpr, ROWS: constexpr, SPAN: constexpr, TILE: constexpr, MERGED_ROWS: constexpr, MERGED: constexpr,
    WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr, HAS_SINKS: constexpr, TYPE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger(PDL)
    units = rows * max_parts if WINDOWED else tl.load(count)
    if PDL and cuda_capability_geq(9, 0) and tl.program_id(0) < units * KV_HEADS:
        head, item = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
        if WINDOWED:
            request, part, low, high, _, parts = _cut_window(
                item, query_start, context, window, max_parts, CHUNKED, TILE
            )  # fmt: skip
        else:
            request, part, low, high, _, parts = _load_item(item, items, partial_starts)
        high = tl.minimum(high, tl.load(context + request) + 1)
        if low < high and part < parts:
            _prefetch_keys(
                k_cache, v_cache, tables + request.to(tl.int64) * table_stride, cache_stride, head, low, high,
                HEAD_DIM, BLOCK_SIZE, SPAN,
            )  # fmt: skip
    pdl_wait(PDL)
    for unit in range(tl.program_id(0), units * KV_HEADS, tl.num_programs(0)):
        head, item = unit % KV_HEADS, unit // KV_HEADS
        if WINDOWED:
            request, part, low, high, first, parts = _cut_window(
                item, query_start, context, window, max_parts, CHUNKED, TILE
            )
        else:
            request, part, low, high, first, parts = _load_item(item, items, partial_starts)
        if part < parts:
            _compute_part(
                qkv, k_cache, v_cache, tables, query_start, context, sinks, partials, max_and_sum, arrivals, out, scale,
                window, softcap, capped_scale, qkv_stride, table_stride, cache_stride, out_stride,
                head, request, part, low, high, first, parts, KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE,
                SLOT_ROWS, ROWS, SPAN, MERGED_ROWS, MERGED, WINDOWED, CHUNKED, CAPPED, HAS_SINKS, TYPE,
            )  # fmt: skip


@jit
def _prefetch_keys(
    k_cache: tensor, v_cache: tensor, table: tensor, cache_stride: tensor, head: tensor, low: tensor, high: tensor,
    HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, SPAN: constexpr,
) -> None:  # fmt: skip
    """Fetch the first span of the keys [low, high) and their values to the L2."""
    key = tl.minimum(low + tl.arange(0, SPAN), high - 1)
    rows = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * cache_stride
    rows += (head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    size: constexpr = HEAD_DIM * k_cache.dtype.element_ty.primitive_bitwidth // 8
    if size % 16 == 0:
        prefetch(k_cache + rows, size)
        prefetch(v_cache + rows, size)


@jit
def _compute_part(
    qkv: tensor, k_cache: tensor, v_cache: tensor, tables: tensor, query_start: tensor, context: tensor, sinks: tensor,
    partials: tensor, max_and_sum: tensor, arrivals: tensor, out: tensor, scale: tensor, window: tensor,
    softcap: tensor, capped_scale: tensor, qkv_stride: tensor, table_stride: tensor, cache_stride: tensor,
    out_stride: tensor, head: tensor, request: tensor, part: tensor, low: tensor, high: tensor, first: tensor,
    parts: tensor,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_PADDED: constexpr, BLOCK_SIZE: constexpr,
    SLOT_ROWS: constexpr, ROWS: constexpr, SPAN: constexpr, MERGED_ROWS: constexpr, MERGED: constexpr,
    WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr, HAS_SINKS: constexpr, TYPE: constexpr,
) -> None:  # fmt: skip
    """Compute the attention of a part of a row: keys [low, high), query heads of one KV head.

    If the row has several parts, the program that ends last merges their results."""
    start, before = tl.load(query_start + request), tl.load(context + request)
    queries = tl.load(query_start + request + 1) - start
    end = before + queries
    high = tl.minimum(high, end)
    lowest = tl.maximum(first_key(before, window, CHUNKED), 0) if WINDOWED else 0  # the first key that a query sees

    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PADDED)
    query, member = row // GROUP, row % GROUP
    token, column = (start + query).to(tl.int64)[:, None], ((head * GROUP + member) * HEAD_DIM)[:, None] + d[None, :]
    inside = (query < queries)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(qkv + token * qkv_stride + column, inside, 0.0).to(TYPE)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite, since a row may attend to no key of a part
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # scores that the sums of the first part begin with
        top = tl.where(part == 0, tl.load(sinks + head * GROUP + member) * 1.4426950408889634, top)  # log2(e)
        total = tl.where(part == 0, 1.0, total)
    mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table, offset = tables + request.to(tl.int64) * table_stride, head * (BLOCK_SIZE * HEAD_DIM)
    k_head, v_head = k_cache + offset, v_cache + offset
    masked = low // SPAN * SPAN
    if not WINDOWED:  # all queries attend to the keys before the first of them
        masked = tl.maximum(low, tl.minimum(high, before + 1) // SPAN * SPAN)
        mixed, total, top = add_keys(
            mixed, total, top, q, before + query, k_head, v_head, table, cache_stride, low, masked, lowest, end, scale,
            window, softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, False, False, CHUNKED, CAPPED,
        )  # fmt: skip
    mixed, total, top = add_keys(
        mixed, total, top, q, before + query, k_head, v_head, table, cache_stride, masked, high, lowest, end, scale,
        window, softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, True, WINDOWED, CHUNKED, CAPPED,
    )  # fmt: skip

    if parts == 1:
        tl.store(out + token * out_stride + column, (mixed / total[:, None]).to(out.dtype.element_ty), inside)
    else:
        slot = ((first + part).to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + row
        tl.store(max_and_sum + 2 * slot, top, query < queries)
        tl.store(max_and_sum + 2 * slot + 1, total, query < queries)
        tl.store(partials + slot[:, None] * HEAD_DIM + d[None, :], mixed, inside)
        tl.debug_barrier()  # all threads have stored before one of them announces it
        arrival = arrivals + request * KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == parts - 1:
            tl.store(arrival, 0)
            _merge_parts(
                partials, max_and_sum, out + start.to(tl.int64) * out_stride, out_stride, queries, first, parts, head,
                KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, SLOT_ROWS, MERGED_ROWS, MERGED,
            )  # fmt: skip


@jit
def _load_item(item: tensor, items: tensor, partial_starts: tensor) -> tensor:
    """Return (row, part, first key, end key, first partial result of the row, parts of the row) of a work item."""
    request = tl.load(items + 4 * item)
    first = tl.load(partial_starts + request)
    parts = tl.maximum(tl.load(partial_starts + request + 1) - first, 1)
    part = tl.maximum(tl.load(items + 4 * item + 3) - first, 0)
    return request, part, tl.load(items + 4 * item + 1), tl.load(items + 4 * item + 2), first, parts


@jit
def _cut_window(
    item: tensor, query_start: tensor, context: tensor, window: tensor, max_parts: tensor, CHUNKED: constexpr,
    TILE: constexpr,
) -> tensor:  # fmt: skip
    """Return the same values as `_load_item`, computed from a row's visible keys; a padding row has 0 parts.

    `item` is row * max_parts + part."""
    request, part = item // max_parts, item % max_parts
    before = tl.load(context + request)
    queries = tl.load(query_start + request + 1) - tl.load(query_start + request)
    base = tl.maximum(first_key(before, window, CHUNKED), 0) // TILE
    tiles = (before + queries + TILE - 1) // TILE - base
    parts = tl.where(queries > 0, tl.minimum(tiles, max_parts), 0)
    cut = tl.maximum(parts, 1)
    low, high = (base + part * tiles // cut) * TILE, (base + (part + 1) * tiles // cut) * TILE
    return request, part, low, high, request * max_parts, parts


@jit
def _merge_parts(
    partials: tensor, max_and_sum: tensor, out: tensor, out_stride: tensor, queries: tensor, first: tensor,
    parts: tensor, head: tensor, KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_PADDED: constexpr,
    SLOT_ROWS: constexpr, MERGED_ROWS: constexpr, MERGED: constexpr,
) -> None:  # fmt: skip
    """Merge the partial results [first, first + parts), MERGED at a time, into the rows of a request at `out`."""
    row, d = tl.arange(0, MERGED_ROWS), tl.arange(0, DIM_PADDED)
    is_query = row // GROUP < queries
    top = tl.full([MERGED_ROWS], -1e30, tl.float32)
    total = tl.zeros([MERGED_ROWS], tl.float32)
    mixed = tl.zeros([MERGED_ROWS, DIM_PADDED], tl.float32)
    for at in range(0, parts, MERGED):
        part = at + tl.arange(0, MERGED)
        slot = (((first + part).to(tl.int64) * KV_HEADS + head) * SLOT_ROWS)[:, None] + row[None, :]
        written = (part < parts)[:, None] & is_query[None, :]
        tops = tl.load(max_and_sum + 2 * slot, written, -1e30, cache_modifier=".cg")  # other SMs wrote them
        totals = tl.load(max_and_sum + 2 * slot + 1, written, 0.0, cache_modifier=".cg")
        values = tl.load(
            partials + slot[:, :, None] * HEAD_DIM + d[None, None, :], written[:, :, None] & (d < HEAD_DIM)[None, None],
            0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight, rescale = tl.exp2(tops - new_top[None, :]), tl.exp2(top - new_top)
        total = total * rescale + tl.sum(totals * weight, 0)
        mixed = mixed * rescale[:, None] + tl.sum(values * weight[:, :, None], 0)
        top = new_top
    column = ((head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + d[None, :]
    target = out + (row // GROUP).to(tl.int64)[:, None] * out_stride + column
    inside = is_query[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), inside)


def split_decode_attention(
    inputs: AttentionInputs,
    work: DeviceWorkList,
    scratch: DecodeScratch,
    num_sms: int,
    *,
    out: Tensor,
    max_queries: int = 1,
    pdl: bool = False,
    window_parts: int = 0,
    launch_shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """Write the attention of the first `work.rows` rows into `out` and return it.

    A row has at most `max_queries` queries, and none if it is padding, whose output stays unchanged. `work` must have
    been planned for rows that are at least as long; it is not read if the layer has a window. `window_parts` and
    `launch_shape`, (keys per span, warps, pipeline stages), replace the default for benchmarks.
    """
    qkv, layer, keys, values, metadata = inputs
    q_heads, kv_heads, head_dim, window = layer.q_heads, layer.kv_heads, layer.head_dim, layer.window
    group, dim = q_heads // kv_heads, max(16, next_power_of_two(head_dim))
    assert keys.stride() == values.stride() and layer.scale > 0 and max_queries <= scratch.max_queries
    assert work.rows <= scratch.rows and work.capacity <= scratch.capacity and q_heads == scratch.heads
    rows = max(16, next_power_of_two(max_queries * group))
    exact = torch.float32 in (qkv.dtype, keys.dtype)
    span, warps, stages = launch_shape or _choose_launch_shape(rows, dim, exact)
    parts, merged_rows = 0, next_power_of_two(max_queries * group)
    if window:
        parts = window_parts or worklist.count_window_parts(
            work.rows, kv_heads, work_limits.CTAS_PER_SM * num_sms, window
        )
        assert work.rows * parts <= scratch.capacity or parts == 1
    tables = metadata.block_tables
    units = (work.rows * parts if parts else work.capacity) * kv_heads
    _split_decode[(min(units, PROGRAMS_PER_SM * num_sms),)](
        qkv, keys, values, tables, metadata.query_start, metadata.context,
        tables if layer.sinks is None else layer.sinks,
        work.count, work.items, work.partial_starts, scratch.partials, scratch.max_and_sum, scratch.counters[2:], out,
        (1.0 if layer.softcap else layer.scale) * math.log2(math.e), window,
        layer.softcap, layer.scale / layer.softcap if layer.softcap else 0.0,
        qkv.stride(0), tables.stride(0), keys.stride(0), out.stride(0), parts, work.rows,
        kv_heads, group, head_dim, dim, keys.shape[2], max_queries * group, rows, span, TILE_KEYS,
        merged_rows, max(2, min(16, MERGED_ELEMENTS * warps // (merged_rows * dim))), window > 0, layer.chunked,
        layer.softcap > 0, layer.sinks is not None, choose_product_type(qkv.dtype, keys.dtype), pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _choose_launch_shape(rows: int, dim: int, uses_float32: bool) -> tuple[int, int, int]:
    """Return (keys per span, warps, pipeline stages) for a launch.

    A span divides TILE_KEYS, at whose multiples the keys of a row are cut into parts."""
    if uses_float32:  # no tensor cores
        return 16, (8 if rows * dim > 2048 else 4), 1
    return TILE_KEYS, (2 if rows * dim <= 2048 else 4), 3 if dim <= 128 else 2
