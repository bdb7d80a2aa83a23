"""PackedExperts: the matrices of a layer's experts, [experts, n, k], packed as one.

Each is a packed weight with row bases and escapes of its own, as if it had been packed alone, and lies as far from the
next as that from the one after: a kernel can find any of them by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from emberline.kernels.cuda import uw12
from emberline.kernels.cuda.uw12 import Packed


@dataclass(frozen=True, slots=True)
class PackedExperts:
    whole: Packed  # all rows, one expert's after the other's
    count: int

    @staticmethod
    def pack(weights: Tensor, pack: Callable[[Tensor], Packed | None] = uw12.pack) -> PackedExperts | None:
        """None where they had better stay as they are: all do, or none."""
        count, n, k = weights.shape
        whole = pack(weights.reshape(count * n, k)) if uw12.supports(n, k) else None
        return None if whole is None else PackedExperts(whole, count)

    def __getitem__(self, expert: int) -> Packed:
        assert 0 <= expert < self.count
        n = self.whole.n // self.count
        return self.whole.rows(expert * n, (expert + 1) * n)
