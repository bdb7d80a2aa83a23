"""explain_portable_kernels: which phases of a model's attention on a GPU use Triton kernels, and why.

The CUDA kernels are faster, but support fewer shapes than the Triton kernels.
"""

from __future__ import annotations

import torch

DECODE, PREFILL = "decode", "prefill"  # the phases
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP_HEADS = 16  # query heads per KV head in decode: the rows of an mma fragment


def explain_portable_kernels(
    heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int
) -> dict[str, str]:
    """Return the reason for each phase whose CUDA kernel does not support the shape; other phases are absent.

    `heads` is (query heads, KV heads, head size), and `dtype` is that of the activations. Prefill with a float8 cache
    uses the CUDA kernel on bf16 copies of the KV blocks.
    """
    q_heads, kv_heads, head_dim = heads
    reasons = {}
    if dtype is not torch.bfloat16:
        reasons = dict.fromkeys((DECODE, PREFILL), f"activations of {_name(dtype)}")
    elif cache_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        reasons = dict.fromkeys((DECODE, PREFILL), f"a KV cache of {_name(cache_dtype)}")
    elif head_dim not in HEAD_DIMS:
        reasons = dict.fromkeys((DECODE, PREFILL), f"a head size of {head_dim}")
    elif block_size not in BLOCK_SIZES:
        reasons = dict.fromkeys((DECODE, PREFILL), f"a block size of {block_size}")
    elif q_heads // kv_heads > MAX_GROUP_HEADS:
        reasons = {DECODE: f"{q_heads // kv_heads} query heads per KV head"}
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
