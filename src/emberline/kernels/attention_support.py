"""explain_portable_kernels: which phases of a model's attention on a GPU use Triton kernels, and why.

The CUDA kernels are faster, but support fewer shapes than the Triton kernels.
"""

from __future__ import annotations

import torch

DECODE, PREFILL = "decode", "prefill"  # the phases
DECODE_HEAD_DIMS, PREFILL_HEAD_DIMS = (64, 128, 256), (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP_HEADS = 16  # query heads per KV head in decode: the rows of an mma fragment


def explain_portable_kernels(
    heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int
) -> dict[str, str]:
    """Return the reason for each phase whose CUDA kernel does not support the shape; other phases are absent.

    `heads` is (query heads, KV heads, head size), and `dtype` is that of the activations. Prefill with a float8 cache
    uses the CUDA kernel on bf16 copies of the KV blocks, for the head sizes that decode supports.
    """
    q_heads, kv_heads, head_dim = heads
    is_float8 = cache_dtype is torch.float8_e4m3fn
    if dtype is not torch.bfloat16:
        return dict.fromkeys((DECODE, PREFILL), f"activations of {_name(dtype)}")
    if cache_dtype is not torch.bfloat16 and not is_float8:
        return dict.fromkeys((DECODE, PREFILL), f"a KV cache of {_name(cache_dtype)}")
    if block_size not in BLOCK_SIZES:
        return dict.fromkeys((DECODE, PREFILL), f"a block size of {block_size}")
    reasons = {}
    if head_dim not in DECODE_HEAD_DIMS:
        reasons[DECODE] = f"a head size of {head_dim}"
    elif q_heads // kv_heads > MAX_GROUP_HEADS:
        reasons[DECODE] = f"{q_heads // kv_heads} query heads per KV head"
    if head_dim not in PREFILL_HEAD_DIMS:
        reasons[PREFILL] = f"a head size of {head_dim}"
    elif is_float8 and DECODE in reasons:
        reasons[PREFILL] = f"{reasons[DECODE]} with a float8 KV cache"
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
