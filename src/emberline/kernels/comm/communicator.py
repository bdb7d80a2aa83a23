"""Communicator: how the ranks of a group exchange tensors.

A group's ranks make the same calls in the same order. Every call ends within the group's deadline: if a rank does not
take part, the call raises RankLost on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from emberline.kernels.comm.rank_lost import RankLost as RankLost


class Communicator(Protocol):
    rank: int  # of this process or thread in its group
    size: int  # number of ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, which it may overwrite.

        The sum is computed in float32, in the order of the ranks, and rounded once to the dtype of x: every rank gets
        the same bits, and the sum of one element does not depend on where in x it is.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' x, which have the same shape, concatenated by their last dimension."""
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send rows of x to each rank, and return the rows that the ranks send to this one, in the order of the ranks.

        The first `send_counts[0]` rows go to rank 0, and so on. `receive_counts`: how many rows each rank sends here.
        Rows have the same shape and dtype on all ranks; counts may be 0."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x on all ranks with that of `source`, which has the same shape and dtype, and return it."""
        ...

    def send(self, x: Tensor, to: int) -> None: ...

    def receive(self, x: Tensor, source: int) -> None:
        """Overwrite x with the tensor that `source` sends."""
        ...

    def abort(self) -> None:
        """End all calls that wait, and all later ones, with RankLost. Any thread may call this method."""
        ...

    def close(self) -> None: ...
