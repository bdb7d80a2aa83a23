"""explain_portable_kernels: which phases of a model's attention on a GPU use Triton kernels, and why.

The CUDA kernels are faster, but support fewer shapes than the Triton kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels import worklist

DECODE, PREFILL = "decode", "prefill"  # the phases
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)


class ScoreKind(NamedTuple):
    """The fields of AttentionLayer that tell CUDA kernels how scores differ from Llama's."""

    chunked: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return not self.chunked and not self.softcap and self.sinks is None

    def exponent_factor(self, scale: float) -> float:
        """Return the factor that turns scores, after capping, into exponents of 2."""
        return (1.0 if self.softcap else scale) * math.log2(math.e)

    def cap_factor(self, scale: float) -> float:
        """Return f such that 2 ** (f * score) is exp(2 * x), where softcap * tanh(x) is the capped score; 0: no cap."""
        return 2 * math.log2(math.e) * scale / self.softcap if self.softcap else 0.0

    @property
    def sinks_address(self) -> int | None:
        return None if self.sinks is None else self.sinks.data_ptr()


PLAIN_SCORES = ScoreKind()


def explain_portable_kernels(
    heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int
) -> dict[str, str]:
    """Return the reason for each phase whose CUDA kernel does not support the shape; other phases are absent.

    `heads` is (query heads, KV heads, head size), and `dtype` is that of the activations. Prefill with a float8 cache
    uses the CUDA kernel on bf16 copies of the KV blocks, if decode uses it too.
    """
    q_heads, kv_heads, head_dim = heads
    is_float8 = cache_dtype is torch.float8_e4m3fn
    if dtype is not torch.bfloat16:
        return dict.fromkeys((DECODE, PREFILL), f"activations of {_name(dtype)}")
    if cache_dtype is not torch.bfloat16 and not is_float8:
        return dict.fromkeys((DECODE, PREFILL), f"a KV cache of {_name(cache_dtype)}")
    if block_size not in BLOCK_SIZES:
        return dict.fromkeys((DECODE, PREFILL), f"a block size of {block_size}")
    if head_dim not in HEAD_DIMS:
        return dict.fromkeys((DECODE, PREFILL), f"a head size of {head_dim}")
    if q_heads // kv_heads <= worklist.max_row_heads(head_dim):
        return {}
    reason = f"{q_heads // kv_heads} query heads of size {head_dim} per KV head"
    return {DECODE: reason, PREFILL: f"{reason} with a float8 KV cache"} if is_float8 else {DECODE: reason}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
