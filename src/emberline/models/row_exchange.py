"""RowExchange: moves rows between ranks that have different requests, but share the weights of some layers.

With data-parallel attention, a rank has the rows of its own requests. In a layer whose weights are divided among ranks,
each rank computes its part for the rows of all ranks. Each rank then gets the sums over the ranks of its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class RowExchange:
    comm: Communicator
    counts: tuple[int, ...]  # rows of each rank
    # An integer for each row of all ranks: 1 for a row of a request, 0 for padding; None: unknown.
    counted: Tensor | None = None

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def num_local_rows(self) -> int:
        """The number of rows of this rank."""
        return self.counts[self.comm.rank]

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the ranks. `x`: the rows of this rank."""
        assert len(x) == self.num_local_rows, f"{len(x)} rows, and not {self.num_local_rows}"
        size = self.comm.size
        return self.comm.all_to_all(x.repeat(size, *[1] * (x.dim() - 1)), [len(x)] * size, self.counts)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of this rank's rows. `x`: the rows of all ranks, in the order of the ranks.

        As in `all_reduce`, sums are computed in float32, in the order of the ranks, and rounded once. For x in float64
        they are computed in float64.
        """
        assert len(x) == self.total, f"{len(x)} rows, and not {self.total}"
        size = self.comm.size
        first, *others = self.comm.all_to_all(x, self.counts, [self.num_local_rows] * size).chunk(size)
        total = first.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        return total.to(x.dtype)
