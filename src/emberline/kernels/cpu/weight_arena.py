"""WeightArena: memory for packed weights, side by side in large mappings.

torch's allocator rounds sizes up and keeps freed pages: the weights of a small model took a third more memory than
their size.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from weakref import ReferenceType, ref

import torch
from torch import Tensor

MAPPING_BYTES = 256 << 20  # of address space; only pages that are written take memory
ALIGN_BYTES = 64


class WeightArena:
    """Allocates tensors in large memory mappings. A mapping is freed when the last tensor in it is freed."""

    def __init__(self) -> None:
        self._mapping: ReferenceType[mmap.mmap] | None = None  # weak: its tensors keep it alive
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Return an empty tensor of bytes, aligned to a cache line."""
        if num_bytes > MAPPING_BYTES:
            return torch.frombuffer(_map_memory(num_bytes), dtype=torch.uint8)
        mapping = None if self._mapping is None else self._mapping()
        if mapping is None or self._used + num_bytes > MAPPING_BYTES:
            mapping = _map_memory(MAPPING_BYTES)
            self._mapping, self._used = ref(mapping), 0
        start = self._used
        self._used += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=start)


def _map_memory(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError, ValueError):  # a kernel without huge pages is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
