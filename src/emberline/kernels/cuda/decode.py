"""decode_attention: attention of rows with one or a few new tokens each over the paged KV cache.

`decode.cu` has the kernel, and `worklist` splits the work. All queries of a row share one read of its keys and values.
The result of a query depends, bit for bit, only on its keys and on the positions at which the work list cuts them: it
is the same if the query is a row of its own with the same cuts.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels import work_limits, worklist
from emberline.kernels.attention_support import DECODE, HEAD_DIMS, PLAIN_SCORES, ScoreKind, explain_portable_kernels
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, TensorMap, count_sms, make_tensor_map
from emberline.kernels.worklist import HEADER_INTS, TILE_KEYS, WorkList

FILE = "decode.cu"
# Variants: query heads of a row for which there is space, whether rows may have several queries, and whether layers may
# have windows, chunks, capped scores or sinks. Fewer for head sizes and layers that are less frequent.
PLAIN_HEAD_DIMS = (64, 128)
PLAIN_KINDS = ("8, false, false", "16, false, false", "8, true, false", "16, true, false", "32, true, false")
OTHER_KINDS = ("8, false, true", "16, true, true", "32, true, true")
VARIANTS = tuple(
    f"decode<{dim}, {size}, {kind}>"
    for dim in HEAD_DIMS
    for size in (1, 2)
    for kind in (*(PLAIN_KINDS if dim in PLAIN_HEAD_DIMS else ()), *OTHER_KINDS)
    if not kind.startswith("32") or worklist.max_row_heads(dim) >= 32
)
COMPUTE_WARPS = 4  # warps of a team, which computes up to 16 query heads
WARP_KEYS = TILE_KEYS // COMPUTE_WARPS  # keys of a tile that each computing warp takes
RING_BYTES = 96 << 10  # tiles in flight, per team; twice as many for large heads
MAX_STAGES = 6  # per team


class DecodeTensorMaps:
    """TMA tensor maps of one layer's keys and values. The tensors must stay at their addresses."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        assert k_cache.shape == v_cache.shape and k_cache.dtype is v_cache.dtype
        assert supports_shape(1, 1, k_cache.shape[3], k_cache.dtype, k_cache.shape[2]), "unsupported cache"
        _, self.kv_heads, self.block_size, self.head_dim = k_cache.shape
        self.item_bytes = k_cache.element_size()
        boxes = ((cache, keys) for keys in (TILE_KEYS, WARP_KEYS) for cache in (k_cache, v_cache))
        self.maps = tuple(_make_cache_tensor_map(cache, keys) for cache, keys in boxes)
        self._memory = k_cache, v_cache


class DeviceWorkList:
    """A decode work list in device memory.

    `copy_from_host` overwrites `data` in place, so that a captured CUDA graph reads each new list.
    """

    def __init__(self, data: Tensor, rows: int, capacity: int) -> None:
        assert data.dtype is torch.int32 and data.is_contiguous() and data.data_ptr() % 16 == 0
        assert len(data) == worklist.num_data_ints(rows, capacity)
        self.data, self.rows, self.capacity = data, rows, capacity
        self.count, self.items, self.partial_starts = data, data[HEADER_INTS:], data[HEADER_INTS + 4 * capacity :]

    @staticmethod
    def allocate(rows: int, kv_heads: int, device: torch.device) -> DeviceWorkList:
        """Return an empty work list with memory for any list of `rows` rows."""
        capacity = work_limits.max_work_items(rows, kv_heads, count_sms(device))
        return DeviceWorkList(
            torch.zeros(worklist.num_data_ints(rows, capacity), dtype=torch.int32, device=device), rows, capacity
        )

    def copy_from_host(self, work: WorkList) -> None:
        """Copy a new list from the host. It must have the same number of rows and the same capacity."""
        assert (work.rows, work.capacity) == (self.rows, self.capacity)
        self.data.copy_(torch.from_numpy(work.data))


class DecodeScratch:
    """Scratch memory of `decode_attention`: partial results, and counters that are zero between launches.

    It is enough for rows of up to `max_queries` queries each. Launches that share this memory must not overlap.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        max_queries: int = 1,
    ) -> None:
        self.rows, self.capacity, self.heads, self.max_queries = rows, capacity, q_heads, max_queries
        self.partials = torch.empty(capacity, q_heads * max_queries, head_dim, device=device)
        self.max_and_sum = torch.empty(capacity, q_heads * max_queries, 2, device=device)
        self.counters = torch.zeros(2 + rows * kv_heads, dtype=torch.int32, device=device)


class _DecodeArguments(ctypes.Structure):
    """The C struct `Arguments` of decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "items", "partial_starts", "count", "tables", "context")),
        *((name, ctypes.c_void_p) for name in ("partials", "max_and_sum", "arrivals", "queue")),
        *((name, ctypes.c_int) for name in ("qkv_stride", "table_width", "block_shift", "group", "kv_heads")),
        *((name, ctypes.c_int) for name in ("window", "pdl", "beside_prefill")),
        ("scale", ctypes.c_float),
        ("slot_rows", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("query_start", "sinks")),
        *((name, ctypes.c_float) for name in ("softcap", "cap_factor")),
        *((name, ctypes.c_int) for name in ("chunked", "window_parts", "rows")),
    )


def supports_shape(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> bool:
    """Return whether `decode_attention` supports the shape.

    `dtype` is that of the KV cache. Queries and output are always bf16.
    """
    heads = q_heads, kv_heads, head_dim
    return q_heads % kv_heads == 0 and DECODE not in explain_portable_kernels(heads, torch.bfloat16, dtype, block_size)


def decode_attention(
    qkv: Tensor,
    cache_maps: DecodeTensorMaps,
    block_tables: Tensor,
    context: Tensor,
    work: DeviceWorkList,
    scale: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    kind: ScoreKind = PLAIN_SCORES,
    out: Tensor,
    scratch: DecodeScratch,
    pdl: bool = True,
    overlaps_prefill: bool = False,
    query_start: Tensor | None = None,
    max_queries: int = 1,
    window_parts: int = 0,
) -> Tensor:
    """Write the attention of each row into `out` and return it.

    Without `query_start`, the only query of row b is token b. Otherwise the queries of row b are the tokens
    [query_start[b], query_start[b + 1]), at most `max_queries` and possibly none. Query j of row b attends to the keys
    [0, context[b] + j], or to the last `window` of these keys. The items of `work` must cover them, and may cover more.
    If `window_parts` is not 0, `work` is not read: the visible keys of each row are cut into that many parts, so that a
    layer with a window does not pay for the whole context. `query_start` is required with `window_parts`, if
    `max_queries` is more than 1, and with more than 8 query heads per KV head.

    With `pdl` (programmatic dependent launch), the kernel starts while preceding kernels still run, and already reads
    `work`, `block_tables`, `context`, `query_start` and all keys except the newest of each row. These must be written
    before the first kernel that is launched with `pdl`. The newest keys of a row are its last one or, if `max_queries`
    is more than 1, its last `worklist.MAX_NEW_TOKENS`; only then may several rows have tokens of one sequence.
    `overlaps_prefill`: the preceding launch is `prefill_attention` of the same pass, and both run at the same time.
    """
    assert (cache_maps.kv_heads, cache_maps.head_dim) == (kv_heads, head_dim)
    assert qkv.dtype is torch.bfloat16 and qkv.stride(1) == 1 and qkv.stride(0) % 2 == 0
    assert out.dtype is torch.bfloat16 and out.shape == (len(qkv), q_heads * head_dim) and out.is_contiguous()
    assert block_tables.dtype is context.dtype is torch.int32 and block_tables.stride(1) == 1
    assert work.rows <= min(len(qkv), scratch.rows) and work.capacity <= scratch.capacity and q_heads == scratch.heads
    group = q_heads // kv_heads
    assert 1 <= max_queries <= min(scratch.max_queries, worklist.max_row_queries(group))
    assert not window_parts or (window and work.rows * window_parts <= scratch.capacity)
    row_heads, is_plain = group * max_queries, kind.is_plain and not window_parts
    variant = _choose_variant(head_dim, cache_maps.item_bytes, row_heads, max_queries > 1, is_plain)
    assert query_start is not None or not (variant.several or window_parts)
    assert query_start is None or (query_start.dtype is torch.int32 and len(query_start) == work.rows + 1)
    arguments = _DecodeArguments(
        *(t.data_ptr() for t in (qkv, out, work.items, work.partial_starts, work.count, block_tables, context)),
        *(t.data_ptr() for t in (scratch.partials, scratch.max_and_sum, scratch.counters[2:], scratch.counters)),
        *(qkv.stride(0), block_tables.stride(0), cache_maps.block_size.bit_length() - 1, group, kv_heads),
        *(window, int(pdl), int(overlaps_prefill), kind.exponent_factor(scale), row_heads),
        *(None if query_start is None else query_start.data_ptr(), kind.sinks_address),
        *(kind.softcap, kind.cap_factor(scale), int(kind.chunked), window_parts, work.rows),
    )
    ctas = worklist.ctas_per_sm(group, max_queries, head_dim) * count_sms(qkv.device)
    grid = min(ctas, (work.rows * window_parts or work.capacity) * kv_heads)
    _get_kernel(variant)((grid, 1, 1), _count_threads(row_heads), (*cache_maps.maps, arguments), pdl=pdl)
    return out


def shared_bytes(head_dim: int, item_bytes: int, teams: int = 1) -> int:
    """Return the kernel's shared memory in bytes: tiles of keys and values, sums, barriers, work items."""
    columns, is_large = _count_columns(head_dim), head_dim > work_limits.MAX_SMALL_HEAD_DIM
    stage, ring = 2 * TILE_KEYS * columns * item_bytes, RING_BYTES * (2 if is_large else 1)
    return teams * (stage * min(MAX_STAGES, ring // stage) + COMPUTE_WARPS * 8 * columns * 4 + 896)


def _count_columns(head_dim: int) -> int:
    """Return the columns of a key in shared memory; those beyond the head size are zero."""
    return next(columns for columns in (64, 128, 256) if head_dim <= columns)


def _count_teams(row_heads: int) -> int:
    return 1 if row_heads <= work_limits.MAX_HEADS_OF_SMALL_CTA else 2


def _count_threads(row_heads: int) -> int:
    return 32 * (COMPUTE_WARPS * _count_teams(row_heads) + 1)


def _make_cache_tensor_map(cache: Tensor, keys_per_copy: int) -> TensorMap:
    """Return a tensor map whose copies have `keys_per_copy` keys, or one KV block if that is smaller."""
    blocks, kv_heads, block_size, head_dim = cache.shape
    assert cache.stride()[1:] == (block_size * head_dim, head_dim, 1), "a block must be contiguous"
    rows = cache.as_strided((blocks, kv_heads * block_size, head_dim), (cache.stride(0), head_dim, 1))
    swizzle = min(128, _count_columns(head_dim) * cache.element_size())
    return make_tensor_map(rows, (1, min(keys_per_copy, block_size), swizzle // cache.element_size()), swizzle=swizzle)


class _Variant(NamedTuple):
    """Template arguments of the kernel."""

    head_dim: int
    item_bytes: int
    row_heads: int
    several: bool  # whether rows may have several queries, so that it reads `query_start`
    kinds: bool  # whether layers may have windows, chunks, capped scores or sinks

    def __str__(self) -> str:
        return f"decode<{', '.join(str(value).lower() for value in self)}>"


def _choose_variant(head_dim: int, item_bytes: int, row_heads: int, several: bool, is_plain: bool) -> _Variant:
    """Return one of VARIANTS. `row_heads`: queries of a row times query heads per KV head."""
    assert row_heads <= worklist.max_row_heads(head_dim), "unsupported rows"
    space = next(heads for heads in (8, 16, 32) if row_heads <= heads)
    if is_plain and head_dim in PLAIN_HEAD_DIMS:
        return _Variant(head_dim, item_bytes, space, several or space > 16, False)
    several = several or space > 8
    return _Variant(head_dim, item_bytes, max(space, 16) if several else space, several, True)


@cache
def _get_kernel(variant: _Variant) -> CudaKernel:
    """Return the kernel of this shape. It is compiled on first use, because a model uses only a few shapes."""
    shared = shared_bytes(variant.head_dim, variant.item_bytes, _count_teams(variant.row_heads))
    return CudaModule(FILE, [str(variant)]).kernel(str(variant), shared)
