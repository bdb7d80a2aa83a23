"""Communicator: how the ranks of a group exchange tensors.

A group's ranks make the same calls in the same order. Every call ends within the group's deadline: if a rank does not
take part, the call raises RankLost on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from emberline.kernels.backend import backend_of
from emberline.kernels.comm.rank_lost import RankLost as RankLost


class CollectivesUnavailable(Exception):
    """The GPUs of a group cannot exchange tensors in the way that was asked for. All ranks get this error."""


class Communicator(Protocol):
    """The collective operations of a group of ranks, called by one of its ranks.

    Operations that can be composed of others have a default implementation. Classes with a faster one override it."""

    rank: int  # of this process or thread in its group
    size: int  # number of ranks
    can_capture: bool  # whether calls with tensors on a GPU can be captured in a CUDA graph
    fuses_norm: bool = False  # whether `all_reduce_add_norm` takes less time than a sum and a norm

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the x of all ranks. May overwrite x.

        The sum is computed in float32, in the order of the ranks, and rounded once to the dtype of x: every rank gets
        the same bits, and the sum of one element does not depend on where in x it is. With `--collectives nccl`, NCCL
        chooses the order instead.
        """
        ...

    def all_reduce_add(self, x: Tensor, partial: Tensor) -> Tensor:
        """Add the sum of the `partial` of all ranks to x in place and return x. May overwrite `partial`.

        The sum is rounded before it is added, as by `all_reduce`. x must be equal on all ranks.
        """
        return x.add_(self.all_reduce(partial))

    def all_reduce_add_norm(self, x: Tensor, partial: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of the `partial` of all ranks to x, as `all_reduce_add`, and return the RMS norm of x."""
        x = self.all_reduce_add(x, partial)
        return backend_of(x).rms_norm(x, weight, eps, torch.empty_like(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the x of all ranks, concatenated along the last dimension. All x have the same shape."""
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send rows of x to each rank, and return the rows that the ranks send to this one, in the order of the ranks.

        The first `send_counts[0]` rows go to rank 0, and so on. `receive_counts`: how many rows each rank sends here.
        Rows have the same shape and dtype on all ranks; counts may be 0."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x on all ranks with the x of rank `source`, and return it. All x have the same shape and dtype."""
        ...

    def send(self, x: Tensor, to: int) -> None: ...

    def receive(self, x: Tensor, source: int) -> None:
        """Overwrite x with the tensor that rank `source` sends."""
        ...

    @property
    def nbytes(self) -> int:
        """The device memory that the communicator holds, in bytes."""
        return 0

    def check(self) -> None:
        """Raise RankLost if a kernel of an earlier call has failed. The results of that call must not be used.

        Calls with tensors on a GPU return before their kernels end. `check` does not wait for these kernels."""
        return

    def abort(self) -> None:
        """Make all waiting calls and all later calls raise RankLost. Any thread may call this method.

        Kernels that wait for other ranks end too, and `check` raises RankLost."""
        ...

    def close(self) -> None: ...


def gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Return the `data` of each rank. `comm`: must exchange tensors in main memory."""
    lengths = comm.all_gather(torch.tensor([len(data)])).tolist()
    padded = torch.frombuffer(bytearray(data.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
    parts = comm.all_gather(padded).view(comm.size, -1)
    return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]
