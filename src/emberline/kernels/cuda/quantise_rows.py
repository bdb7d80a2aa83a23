"""quantise_rows: quantises rows of bf16 to float8 for products with float8 weights, after an optional RMS norm.

`quantise.cu` has the kernel. Columns are in the order of fp8.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule
from emberline.kernels.cuda.fp8_weight import MAX_K, ORDER_GROUP, UNIT_K

FILE = "quantise.cu"
MAX_THREADS = 512  # most threads of a CTA, as in quantise.cu
THREADS_PER_WARP = 32
CHUNKS = (1, 2, 4)  # groups of ORDER_GROUP columns of a thread
SCALE_ROW_GRAIN = 128  # rows are padded to a multiple for scales of blocks: a tile reads all its scales


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    codes: Tensor  # uint8 [m, k]
    scales: Tensor  # float32: [m], or of blocks of 128 columns [k / 128, m padded]

    def slice_rows(self, begin: int, end: int) -> QuantisedRows:
        """Return a view of the rows [begin, end). Scales of blocks keep the strides of the whole tensor."""
        return QuantisedRows(self.codes[begin:end], self.scales[..., begin:end])


def quantise_rows(
    x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, blocks: bool = False, pdl: bool = True
) -> QuantisedRows:
    """Return the rows of x, or of its RMS norm with the weight `norm`, as float8.

    There is a scale for each row, or with `blocks` one for each row and 128 columns.
    """
    m, k = x.shape
    assert x.dtype is torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    assert k % ORDER_GROUP == 0 and k <= MAX_K
    assert norm is None or (norm.dtype is torch.float32 and norm.shape == (k,) and norm.is_contiguous())
    codes = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format)
    pitch = -(-m // SCALE_ROW_GRAIN) * SCALE_ROW_GRAIN
    scales = torch.empty((-(-k // UNIT_K), pitch) if blocks else (m,), device=x.device)
    chunks, threads = choose_chunks(k)
    if m:
        kernel = _get_kernel(_format_name(chunks, norm is not None, blocks))
        kernel((m, 1, 1), threads, (x, x.stride(0), norm, float(eps), codes, scales, pitch, k), pdl=pdl)
    return QuantisedRows(codes, scales)


@cache
def choose_chunks(k: int) -> tuple[int, int]:
    """Return for a row of k columns how many groups of columns a thread has, and the number of threads."""
    chunks = next(chunks for chunks in CHUNKS if chunks * MAX_THREADS * ORDER_GROUP >= k)
    return chunks, -(-k // (chunks * ORDER_GROUP * THREADS_PER_WARP)) * THREADS_PER_WARP


def _format_name(chunks: int, norm: bool, blocks: bool) -> str:
    return f"quantise_rows<{chunks}, {str(norm).lower()}, {str(blocks).lower()}>"


VARIANTS = tuple(_format_name(*options) for options in product(CHUNKS, (False, True), (False, True)))


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name)
