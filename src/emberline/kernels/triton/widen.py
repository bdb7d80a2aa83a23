"""widen_blocks: copies float8 KV blocks as bf16, for the prefill kernel, which reads only bf16."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

NUM_PROGRAMS = 528  # four for each SM of an H200


@jit
def _widen(
    k_cache: tensor, v_cache: tensor, keys: tensor, values: tensor, tables: tensor, sources: tensor, count: tensor,
    cache_stride: tensor, table_stride: tensor, HEADS: constexpr, SIZE: constexpr, SIZE_PADDED: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    at = tl.arange(0, SIZE_PADDED)
    for unit in range(tl.program_id(0), tl.load(count) * HEADS, tl.num_programs(0)):
        piece, head = unit // HEADS, unit % HEADS
        row, index = tl.load(sources + 2 * piece).to(tl.int64), tl.load(sources + 2 * piece + 1)
        block = tl.load(tables + row * table_stride + index).to(tl.int64)
        source, target = block * cache_stride + head * SIZE + at, tl.cast(unit, tl.int64) * SIZE + at
        tl.store(keys + target, tl.load(k_cache + source, at < SIZE).to(keys.dtype.element_ty), at < SIZE)
        tl.store(values + target, tl.load(v_cache + source, at < SIZE).to(values.dtype.element_ty), at < SIZE)


def widen_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    sources: Tensor,
    count: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Copy KV blocks as bf16 into blocks 0 .. count[0] - 1 of `keys` and `values`.

    Block i is copied from block tables[sources[i, 0], sources[i, 1]] of the caches. All four tensors are
    [blocks, heads, block_size, head_dim], and each block must be contiguous.
    """
    _, heads, size, dim = k_cache.shape
    assert keys.is_contiguous() and values.is_contiguous() and keys.shape[1:] == k_cache.shape[1:]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (size * dim, dim, 1)
    _widen[(NUM_PROGRAMS,)](
        k_cache, v_cache, keys, values, tables, sources, count, k_cache.stride(0), tables.stride(0), heads, size * dim,
        next_power_of_two(size * dim), pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
