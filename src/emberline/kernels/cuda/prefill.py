"""prefill_attention: attention of prompt chunks over the paged KV cache, with wgmma instructions.

`prefill.cu` has the kernel. A query's result depends, bit for bit, only on its own keys: not on other requests of the
batch, the chunking of its prompt, or the SM that computes it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels.attention_support import BLOCK_SIZES, HEAD_DIMS, PLAIN_SCORES, ScoreKind
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, KernelArgument, TensorMap, count_sms, make_tensor_map

FILE = "prefill.cu"
# Variants: head size, and whether layers may have chunks, capped scores or sinks.
VARIANTS = tuple(f"prefill<{dim}, {kinds}>" for dim in HEAD_DIMS for kinds in ("false", "true"))
TILE_QUERIES, STAGES, THREADS = 128, 2, 384  # as in prefill.cu
PANEL_COLUMNS, PANEL_ROW_BYTES = 64, 128
NO_WINDOW = 1 << 30

IntSequence = Sequence[int] | NDArray[np.signedinteger[Any]]


class _Kinds(ctypes.Structure):
    """The C struct `Kinds` of prefill.cu."""

    _fields_ = (
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("sink_factor", "cap", "cap_factor")),
        ("chunked", ctypes.c_int),
    )


class PrefillTensorMaps:
    """TMA tensor maps of one layer's keys and values. The caller must keep the memory alive."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        _, self.kv_heads, self.block_size, self.head_dim = k_cache.shape
        assert k_cache.shape == v_cache.shape and supports_cache(k_cache) and supports_cache(v_cache), (
            "unsupported cache"
        )
        self.keys, self.values = _make_cache_tensor_map(k_cache), _make_cache_tensor_map(v_cache)


def supports_cache(k_cache: Tensor) -> bool:
    return k_cache.dtype == torch.bfloat16 and supports_shape(*k_cache.shape[2:])


def supports_shape(block_size: int, head_dim: int) -> bool:
    return head_dim in HEAD_DIMS and block_size in BLOCK_SIZES


def make_tiles(query_counts: IntSequence, contexts: IntSequence) -> NDArray[np.int32]:
    """Return tiles (row, index of the tile's first query in the row's chunk) that cover all new tokens.

    A tile has up to TILE_QUERIES new tokens of one request. The tiles with the most keys come first, so that the last
    tiles are short and all SMs finish at about the same time.
    """
    counts, before = np.asarray(query_counts, np.int64), np.asarray(contexts, np.int64)
    tile_counts = -(-counts // TILE_QUERIES)
    request = np.repeat(np.arange(len(counts)), tile_counts)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(tile_counts) - tile_counts, tile_counts)) * TILE_QUERIES
    keys = before[request] + np.minimum(first + TILE_QUERIES, counts[request])
    order = np.argsort(-keys, kind="stable")
    return np.stack([request, first], axis=1)[order].astype(np.int32)


def prefill_attention(
    qkv: Tensor,
    cache_maps: PrefillTensorMaps,
    block_tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    tiles: Tensor,
    scale: float,
    q_heads: int,
    *,
    window: int = 0,
    kind: ScoreKind = PLAIN_SCORES,
    out: Tensor | None = None,
    pdl: bool = True,
    num_sms: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Return the attention of the new queries, as `OpBackend.paged_attention` describes it.

    The new keys must already be in the cache. `tiles` is the result of `make_tiles`, on the device. `num_sms`, an
    int32 on the device, is the number of SMs to use; a kernel that runs at the same time uses the remaining SMs.
    `counters` are from `allocate_counters`; launches that share them must not overlap. By default all launches on one
    device share them.
    """
    head_dim = cache_maps.head_dim
    assert qkv.dtype == torch.bfloat16 and qkv.shape[1] == (q_heads + 2 * cache_maps.kv_heads) * head_dim
    assert tiles.dtype == torch.int32 and tiles.is_contiguous() and block_tables.stride(1) == 1
    out = qkv.new_empty(len(qkv), q_heads * head_dim) if out is None else out
    assert out.is_contiguous() and out.dtype == torch.bfloat16
    items = len(tiles) * q_heads
    if not items:
        return out
    factor = kind.exponent_factor(scale)
    kinds = _Kinds(
        *(kind.sinks_address, math.log2(math.e) / factor, kind.softcap, kind.cap_factor(scale), int(kind.chunked))
    )
    arguments: list[KernelArgument] = [
        make_tensor_map(qkv, (TILE_QUERIES, 64)), cache_maps.keys, cache_maps.values, out, tiles, items, query_start,
        context, block_tables, block_tables.stride(0), q_heads, q_heads // cache_maps.kv_heads, cache_maps.block_size,
        window or NO_WINDOW, factor, _counters(qkv.device) if counters is None else counters, num_sms, kinds,
    ]  # fmt: skip
    grid = min(count_sms(qkv.device), items)
    _get_kernel(head_dim, not kind.is_plain)((grid, 1, 1), THREADS, arguments, pdl=pdl)
    return out


def shared_bytes(head_dim: int) -> int:
    rows = TILE_QUERIES + 2 * STAGES * _tile_keys(head_dim)
    panels = -(-head_dim // PANEL_COLUMNS)
    return rows * panels * PANEL_ROW_BYTES + 128 + 16 + 1024  # barriers, the work item, and alignment to 1024


def _tile_keys(head_dim: int) -> int:
    return 64 if head_dim > 128 else 128


def _make_cache_tensor_map(cache: Tensor) -> TensorMap:
    blocks, kv_heads, block_size, head_dim = cache.shape
    inner = kv_heads * block_size
    assert cache.stride()[1:] == (block_size * head_dim, head_dim, 1), "a block must be contiguous"
    rows = cache.as_strided((blocks, inner, head_dim), (cache.stride(0), head_dim, 1))
    return make_tensor_map(rows, (1, min(block_size, _tile_keys(head_dim)), PANEL_COLUMNS))


@cache
def _get_kernel(head_dim: int, kinds: bool) -> CudaKernel:
    variant = f"prefill<{head_dim}, {str(kinds).lower()}>"
    return CudaModule(FILE, [variant]).kernel(variant, shared_bytes(head_dim))


def allocate_counters(device: torch.device) -> Tensor:
    """Return two zero int32 counters for `prefill_attention`, which sets them back to zero at its end."""
    return torch.zeros(2, dtype=torch.int32, device=device)


_counters = cache(allocate_counters)
