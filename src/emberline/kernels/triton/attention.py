"""paged_attention: `OpBackend.paged_attention` for any chunks, head size, cache dtype and block size.

A Triton program computes one tile: some queries of one request, for all query heads that share one KV head. The rows
of the tile are pairs (query, head), so that keys and values are read once for the whole group of heads. The program
loops over spans of keys with an online softmax: sums are relative to the largest score so far, with powers of 2.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.core.gpu_kernels import HOPPER_CAPABILITY
from emberline.kernels.arguments import AttentionInputs
from emberline.kernels.attention_plan import PREFILL_TILE_QUERIES
from emberline.kernels.triton.jit import (
    has_small_shared_memory,
    jit,
    jit_for_activations,
    next_power_of_two,
    pdl_trigger_and_wait,
)

MAX_PROGRAM_ROWS = 128  # (query, head) pairs of a program


class AttentionLaunch(NamedTuple):
    """How the kernel is launched."""

    rows: int  # (query, head) pairs of a program
    span: int  # keys that a program loads at a time
    warps: int
    stages: int  # of the pipeline of loads
    registers: int | None = None  # of a thread, at most; None: as many as the compiler chooses


# Two programs on a multiprocessor make 480 TFLOP/s on an H200, instead of 400 with 32 keys per span. Without the matrix
# instructions of Hopper, so few registers do not suffice.
HOPPER_LAUNCH = AttentionLaunch(MAX_PROGRAM_ROWS, 64, 8, 3, registers=128)


@jit_for_activations()
def _paged_attention(
    qkv: tensor, k_cache: tensor, v_cache: tensor, tables: tensor, query_start: tensor, context: tensor,
    sinks: tensor, tiles: tensor, out: tensor, scale: tensor, window: tensor, softcap: tensor, capped_scale: tensor,
    qkv_stride: tensor, table_stride: tensor, cache_stride: tensor, out_stride: tensor,
    KV_HEADS: constexpr, GROUP: constexpr, GROUP_PADDED: constexpr, HEAD_DIM: constexpr, DIM_PADDED: constexpr,
    BLOCK_SIZE: constexpr, QUERIES: constexpr, PARTS: constexpr, ROWS: constexpr, SPAN: constexpr,
    WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr, HAS_SINKS: constexpr, TYPE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    head, part = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    tile = tiles + part // PARTS * 2
    request = tl.load(tile)
    if request < 0:
        return
    first = tl.load(tile + 1) + (PARTS - 1 - part % PARTS) * QUERIES  # late queries have most keys, so they start first
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
    lowest = 0  # the first key that any query attends to
    begin_unmasked = 0  # all queries attend to the keys from here on ..
    begin_masked = (before + first + 1) // SPAN * SPAN  # .. to here
    table, offset = tables + request.to(tl.int64) * table_stride, head * (BLOCK_SIZE * HEAD_DIM)
    k_head, v_head = k_cache + offset, v_cache + offset
    if WINDOWED:
        lowest = tl.maximum(first_key(before + first, window, CHUNKED), 0)
        begin_unmasked = (tl.maximum(first_key(end - 1, window, CHUNKED), 0) + SPAN - 1) // SPAN * SPAN
        begin_unmasked = tl.minimum(begin_unmasked, begin_masked)
        mixed, total, top = add_keys(
            mixed, total, top, q, position, k_head, v_head, table, cache_stride, lowest // SPAN * SPAN, begin_unmasked,
            lowest, end, scale, window, softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, True, True,
            CHUNKED, CAPPED,
        )  # fmt: skip
    mixed, total, top = add_keys(
        mixed, total, top, q, position, k_head, v_head, table, cache_stride, begin_unmasked, begin_masked, lowest, end,
        scale, window, softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, False, False, CHUNKED, CAPPED,
    )  # fmt: skip
    mixed, total, top = add_keys(
        mixed, total, top, q, position, k_head, v_head, table, cache_stride, begin_masked, end, lowest, end, scale,
        window, softcap, capped_scale, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, SPAN, True, WINDOWED, CHUNKED, CAPPED,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    tl.store(out + token * out_stride + column, mixed.to(out.dtype.element_ty), inside)


@jit
def add_keys(
    mixed: tensor, total: tensor, top: tensor, q: tensor, position: tensor, k_head: tensor, v_head: tensor,
    table: tensor, cache_stride: tensor, low: tensor, high: tensor, lowest: tensor, end: tensor, scale: tensor,
    window: tensor, softcap: tensor, capped_scale: tensor,
    HEAD_DIM: constexpr, DIM_PADDED: constexpr, BLOCK_SIZE: constexpr, SPAN: constexpr,
    MASKED: constexpr, WINDOWED: constexpr, CHUNKED: constexpr, CAPPED: constexpr,
) -> tensor:  # fmt: skip
    """Add the contributions of the keys [low, high) to the running sums, and return the sums.

    `low` is a multiple of SPAN. Keys outside [lowest, end) are not read: their blocks may belong to other requests.
    MASKED may be False only if every query attends to all of these keys, and their number is a multiple of SPAN.
    With CAPPED, scores s become softcap * tanh(s * capped_scale) first.
    """
    d = tl.arange(0, DIM_PADDED)[None, :]
    for at in range(low, high, SPAN):
        key = at + tl.arange(0, SPAN)
        inside = d < HEAD_DIM
        if MASKED:
            inside = ((key >= lowest) & (key < end))[:, None] & inside
        if BLOCK_SIZE % SPAN == 0:  # one block, so that the offsets are the same for every span
            first = tl.load(table + at // BLOCK_SIZE).to(tl.int64) * cache_stride + at % BLOCK_SIZE * HEAD_DIM
            k_at, v_at = k_head + first, v_head + first
            offsets = tl.arange(0, SPAN)[:, None] * HEAD_DIM + d
        else:
            block = tl.load(table + key // BLOCK_SIZE, (key >= lowest) & (key < end), 0)
            k_at, v_at = k_head, v_head
            offsets = (block.to(tl.int64) * cache_stride + key % BLOCK_SIZE * HEAD_DIM)[:, None] + d
        k = tl.load(k_at + offsets, inside, 0.0).to(q.dtype)
        v = tl.load(v_at + offsets, inside, 0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * capped_scale * scores) + 1.0))  # of tanh
        if MASKED:
            is_visible = key[None, :] <= position[:, None]
            if WINDOWED:
                is_visible = is_visible & (key[None, :] >= first_key(position, window, CHUNKED)[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(q.dtype), v, mixed * rescale[:, None], input_precision="ieee")
        top = new_top
    return mixed, total, top


@jit
def first_key(position: tensor, window: tensor, CHUNKED: constexpr) -> tensor:
    """Return the first key that a query attends to; a negative one stands for 0."""
    return position // window * window if CHUNKED else position + 1 - window


def paged_attention(
    inputs: AttentionInputs,
    tiles: Tensor,
    *,
    out: Tensor | None = None,
    tile_queries: int = PREFILL_TILE_QUERIES,
    pdl: bool = False,
    launch_shape: AttentionLaunch | None = None,
) -> Tensor:
    """Return the result that `OpBackend.paged_attention` describes, written to `out` if given.

    `tiles` [n, 2] are (row, first query in its chunk), of `tile_queries` queries each, a power of two. A tile with a
    negative row is padding. `launch_shape` replaces the default for benchmarks.
    """
    qkv, layer, keys, values, metadata = inputs
    q_heads, kv_heads, head_dim, window = layer.q_heads, layer.kv_heads, layer.head_dim, layer.window
    out = torch.empty((len(qkv), q_heads * head_dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    assert keys.stride() == values.stride() and tiles.is_contiguous() and layer.scale > 0
    group, dim = q_heads // kv_heads, max(16, next_power_of_two(head_dim))
    padded = next_power_of_two(group)
    exact = torch.float32 in (qkv.dtype, keys.dtype)
    max_rows, span, warps, stages, registers = launch_shape or _choose_launch_shape(dim, exact, keys.dtype, qkv.device)
    queries = max(1, min(tile_queries, max_rows // padded))
    rows, parts = max(16, queries * padded), tile_queries // queries
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
            layer.softcap > 0, layer.sinks is not None, choose_product_type(qkv.dtype, keys.dtype), pdl,
            num_warps=warps, num_stages=stages, maxnreg=registers, launch_pdl=pdl,
        )  # fmt: skip
    return out


def choose_product_type(dtype: torch.dtype, cache_dtype: torch.dtype) -> tl.dtype:
    """Return the type of the products' factors. Float8 keys become float16, to which GPUs convert them fastest."""
    if torch.float32 in (dtype, cache_dtype):
        return tl.float32
    return tl.float16 if cache_dtype is torch.float8_e4m3fn else tl.bfloat16


def _choose_launch_shape(
    dim: int, uses_float32: bool, cache_dtype: torch.dtype, device: torch.device
) -> AttentionLaunch:  # fmt: skip
    """Return the launch with which sums fit into registers. `dim`: head size, rounded up to a power of two."""
    if uses_float32:  # no tensor cores
        rows = min(MAX_PROGRAM_ROWS, max(16, 4096 // dim))
        return AttentionLaunch(rows, 16, (8 if rows * dim > 2048 else 4), 1)
    if dim <= 128 and cache_dtype is torch.bfloat16:
        return HOPPER_LAUNCH if _is_hopper(device) else AttentionLaunch(MAX_PROGRAM_ROWS, 32, 8, 4)
    if dim > 128 and has_small_shared_memory(device):
        return AttentionLaunch(64, 32, 4, 2)
    return AttentionLaunch(MAX_PROGRAM_ROWS, 64, 8, 3 if dim <= 128 else 2)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER_CAPABILITY
