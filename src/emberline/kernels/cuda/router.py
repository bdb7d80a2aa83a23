"""norm_and_score: norms rows and computes the logits of a router, in one kernel. `router.cu` has the kernel."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule

FILE = "router.cu"
MAX_ROWS = 256  # up to so many rows, one kernel is faster than a norm and a product
BLOCK_ROWS, BLOCK_EXPERTS, THREADS = 16, 16, 512
COLUMNS_PER_CHUNK = 512  # of the weights that a thread keeps in registers
CHUNK_COUNTS = (4,)  # more need more registers than there are


def supports(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes the logits of these rows, and is faster than others."""
    chunks, rest = divmod(weight.shape[1], COLUMNS_PER_CHUNK)
    is_bf16 = x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16
    is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return 0 < len(x) <= MAX_ROWS and is_bf16 and not rest and chunks in CHUNK_COUNTS and is_aligned


def norm_and_score(
    x: Tensor, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the normed rows of x and the router's logits, float32 [rows, experts], for each of them.

    `scale`: weight of the norm, float32. `weight`: of the router, [experts, columns]. `bias`: float32 [experts].
    """
    (rows, columns), experts = x.shape, len(weight)
    assert supports(x, weight) and weight.is_contiguous() and scale.is_contiguous()
    normed = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    chunks = columns // COLUMNS_PER_CHUNK
    _get_kernel(chunks)(
        (-(-rows // BLOCK_ROWS), -(-experts // BLOCK_EXPERTS), 1),
        THREADS,
        (x, x.stride(0), scale, eps, weight, bias, rows, experts, normed, logits),
        pdl=pdl,
        shared_bytes=_count_shared_bytes(chunks),
    )
    return normed, logits


VARIANTS = tuple(f"norm_and_score<{count}>" for count in CHUNK_COUNTS)


def _count_shared_bytes(chunks: int) -> int:
    return (2 * BLOCK_ROWS + 4) * COLUMNS_PER_CHUNK * chunks + 16 * BLOCK_ROWS


@cache
def _get_kernel(chunks: int) -> CudaKernel:
    name = f"norm_and_score<{chunks}>"
    return CudaModule(FILE, [name]).kernel(name, _count_shared_bytes(chunks))
