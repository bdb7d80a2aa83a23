"""GatheredLoads: loads of parts of tensors that are not contiguous in their files, or that must be decoded.

They are copied from a memory map of the file. The ranks of a machine need neighbouring bytes of the same pages; through
the page cache, each page is read from the disk once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from emberline.models.tensor_load import TensorLoad
from emberline.unweight.ordered_map import map_in_order


class GatheredLoads:
    def __init__(self) -> None:
        self._parts: list[tuple[TensorLoad, Callable[[], Tensor]]] = []

    def add(self, load: TensorLoad, gather: Callable[[], Tensor]) -> None:
        """Add a load of a part of a tensor. `gather`: returns the part's bytes, and may be called by any thread."""
        self._parts.append((load, gather))

    def fill(self, pool: ThreadPoolExecutor) -> None:
        """Copy all parts to the device. The threads of `pool` gather the next few parts ahead."""
        parts, self._parts = self._parts, []
        for (load, _), part in zip(parts, map_in_order(pool, _gather, parts), strict=True):
            load.copy_part(0, part)


def _gather(part: tuple[TensorLoad, Callable[[], Tensor]]) -> Tensor:
    return part[1]()
