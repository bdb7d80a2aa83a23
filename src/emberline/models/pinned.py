"""Host memory that a GPU copies from and to by itself: pages of our own, pinned where they lie."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from emberline.core.errors import ModelError


def host_bytes(count: int) -> Tensor:
    """uint8[count], not pinned. torch's own pinned allocator would round the size up to a power of two."""
    pages = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=count) if count else torch.empty(0, dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Unpin it before it is freed."""
    if memory.nbytes:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status:
            raise ModelError(
                f"the driver cannot pin {memory.nbytes} bytes of host memory (error {status})", hint="free some memory"
            )


def unpin(memory: Tensor) -> None:
    if memory.nbytes:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
