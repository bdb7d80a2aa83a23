"""decode_attention: rows with one new token each over the paged cache. `decode.cu` says how, `worklist` who does what.

A row's result depends on its keys and on where the work list cuts them, and to the bit on nothing else.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from emberline.kernels import worklist
from emberline.kernels.cuda.driver import Kernel, Module, TensorMap, tensor_map
from emberline.kernels.worklist import HEAD, TILE, WorkList

FILE = "decode.cu"
VARIANTS = tuple(f"decode<{dim}, {size}, {halves}>" for dim in (64, 128) for size in (1, 2) for halves in (1, 2))
CTAS = 2  # of a multiprocessor
WORKERS = 4
GROUP = TILE // WORKERS  # keys that a worker takes of a tile
THREADS = 32 * (WORKERS + 1)
MOST_HEADS = 16  # of queries to a head of keys: the rows of a fragment
RING_BYTES = 96 << 10
MOST_STAGES = 6


class LayerCache:
    """One layer's keys and values as the copy engine sees them. Made once: the memory must stay where it is."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        assert k_cache.shape == v_cache.shape and k_cache.dtype is v_cache.dtype
        assert supports(1, 1, k_cache.shape[3], k_cache.dtype, k_cache.shape[2]), "see `supports`"
        _, self.kv_heads, self.block_size, self.head_dim = k_cache.shape
        self.item_bytes = k_cache.element_size()
        boxes = ((cache, keys) for keys in (TILE, GROUP) for cache in (k_cache, v_cache))
        self.maps = tuple(_map(cache, keys) for cache, keys in boxes)
        self._memory = k_cache, v_cache


class Work:
    """A work list on the device: `data` has a place there, so that a graph finds the next one too. See `rooms`."""

    def __init__(self, data: Tensor, rows: int, capacity: int) -> None:
        assert data.dtype is torch.int32 and data.is_contiguous() and data.data_ptr() % 16 == 0
        assert len(data) == worklist.ints(rows, capacity)
        self.data, self.rows, self.capacity = data, rows, capacity
        self.count, self.items, self.row_parts = data, data[HEAD:], data[HEAD + 4 * capacity :]

    @staticmethod
    def rooms(rows: int, kv_heads: int, device: torch.device) -> Work:
        """Room for any list of `rows` rows; nothing to do until one is loaded."""
        capacity = worklist.capacity(rows, kv_heads, multiprocessors(device))
        return Work(torch.zeros(worklist.ints(rows, capacity), dtype=torch.int32, device=device), rows, capacity)

    def load(self, made: WorkList) -> None:
        assert (made.rows, made.capacity) == (self.rows, self.capacity)
        self.data.copy_(torch.from_numpy(made.data))


class Scratch:
    """What launches leave for themselves: partials, and counters that are zero between launches. Those that share one
    must follow each other."""

    def __init__(
        self, rows: int, capacity: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.rows, self.capacity, self.heads = rows, capacity, q_heads
        self.partials = torch.empty(capacity, q_heads, head_dim, device=device)
        self.tops = torch.empty(capacity, q_heads, 2, device=device)
        self.counters = torch.zeros(2 + rows * kv_heads, dtype=torch.int32, device=device)


class _Call(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "items", "row_parts", "count", "tables", "context")),
        *((name, ctypes.c_void_p) for name in ("partials", "tops", "arrivals", "queue")),
        *((name, ctypes.c_int) for name in ("qkv_stride", "table_width", "block_shift", "group", "kv_heads")),
        *((name, ctypes.c_int) for name in ("window", "early", "beside")),
        ("scale", ctypes.c_float),
    )


def supports(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> bool:
    """`dtype` is the cache's; queries and output are bf16."""
    return (
        q_heads % kv_heads == 0
        and q_heads // kv_heads <= MOST_HEADS
        and head_dim in (64, 128)
        and dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and block_size in (16, 32, 64, 128)
    )


def decode_attention(
    qkv: Tensor,
    cached: LayerCache,
    block_tables: Tensor,
    context: Tensor,
    work: Work,
    scale: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    out: Tensor,
    scratch: Scratch,
    pdl: bool = True,
    beside: bool = False,
) -> Tensor:
    """Row b sees keys [0, context[b]] or the last `window` of them, as far as the work list names them: a list
    made without the window, or for longer rows without one, serves as well, with some idle work.

    `pdl`: the list, the tables, the contexts and all keys but the newest of each row were written before the first of
    the kernels that are chained by it, so they are read while the kernel before still runs.
    `beside`: the launch before it in the stream is `prefill_attention` of the same step, and both run at the same time.
    """
    assert (cached.kv_heads, cached.head_dim) == (kv_heads, head_dim) and q_heads // kv_heads <= MOST_HEADS
    assert qkv.dtype is out.dtype is torch.bfloat16 and out.shape == (len(qkv), q_heads * head_dim)
    assert out.is_contiguous() and qkv.stride(1) == 1 and qkv.stride(0) % 2 == 0 and block_tables.stride(1) == 1
    assert block_tables.dtype is context.dtype is torch.int32
    assert work.rows <= min(len(qkv), scratch.rows) and work.capacity <= scratch.capacity and q_heads == scratch.heads
    group = q_heads // kv_heads
    call = _Call(
        *(t.data_ptr() for t in (qkv, out, work.items, work.row_parts, work.count, block_tables, context)),
        *(t.data_ptr() for t in (scratch.partials, scratch.tops, scratch.counters[2:], scratch.counters)),
        *(qkv.stride(0), block_tables.stride(0), cached.block_size.bit_length() - 1, group, kv_heads),
        *(window, int(pdl), int(beside), scale * math.log2(math.e)),
    )
    grid = min(CTAS * multiprocessors(qkv.device), work.capacity * kv_heads)
    kernel = _kernel(head_dim, cached.item_bytes, 1 if group <= 8 else 2)
    kernel((grid, 1, 1), THREADS, (*cached.maps, call), pdl=pdl)
    return out


def shared_bytes(head_dim: int, item_bytes: int) -> int:
    """Tiles of keys and values, the four warps' sums, and barriers and notes."""
    stage = 2 * TILE * head_dim * item_bytes
    return stage * min(MOST_STAGES, RING_BYTES // stage) + WORKERS * 8 * head_dim * 4 + 896


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _map(cache: Tensor, keys: int) -> TensorMap:
    """For copies of so many keys, or of a block if that has fewer."""
    blocks, kv_heads, block_size, head_dim = cache.shape
    assert cache.stride()[1:] == (block_size * head_dim, head_dim, 1), "contiguous but for the first stride"
    rows = cache.as_strided((blocks, kv_heads * block_size, head_dim), (cache.stride(0), head_dim, 1))
    line = min(128, head_dim * cache.element_size())
    return tensor_map(rows, (1, min(keys, block_size), line // cache.element_size()), swizzle=line)


@cache
def _kernel(head_dim: int, item_bytes: int, halves: int) -> Kernel:
    """Compiled when first used: a model needs one of them."""
    variant = f"decode<{head_dim}, {item_bytes}, {halves}>"
    return Module(FILE, [variant]).kernel(variant, shared_bytes(head_dim, item_bytes))
