"""Pins ordinary host memory for fast copies to a GPU, with cudaHostRegister."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from emberline.core.errors import ModelError


def allocate_host_bytes(count: int) -> Tensor:
    """Return a uint8 tensor of `count` bytes that `pin` can pin.

    torch's own allocator of pinned memory would round the size up to a power of two.
    """
    pages = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=count) if count else torch.empty(0, dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Pin the memory. It must be unpinned before it is freed. Raises ModelError if the driver refuses."""
    if memory.nbytes:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status:
            raise ModelError(
                f"the CUDA driver cannot pin {memory.nbytes} bytes of host memory (error {status})",
                hint="free host memory, or raise the limit of locked memory (ulimit -l)",
            )


def unpin(memory: Tensor) -> None:
    if memory.nbytes:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
