"""LoneRank: a Communicator that exchanges nothing, to measure the time and memory of one rank by itself.

The results of the model are wrong, because the sums and parts of other ranks are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.kernels.comm.communicator import Communicator


class LoneRank(Communicator):
    """A Communicator whose calls return at once."""

    can_capture = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return as many copies of x as there are ranks, so that the result has the size of a real gather."""
        return torch.cat([x] * self.size, dim=-1)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Return rows of x, repeated until there are `sum(receive_counts)` of them."""
        count = sum(receive_counts)
        return x[torch.arange(count, device=x.device) % len(x)] if len(x) else x.new_zeros(count, *x.shape[1:])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        pass

    def receive(self, x: Tensor, source: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass
