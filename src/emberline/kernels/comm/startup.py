"""StartupCommunicator: lets a rank compile and try its kernels alone, before all ranks are ready."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.comm.lone_rank import LoneRank


class StartupCommunicator:
    """A Communicator that exchanges nothing until `open`, and then passes all calls to `group`.

    Ranks compile their kernels for different lengths of time. Without this class, a rank that is ready early could wait
    for another rank until its deadline."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._lone_rank = LoneRank(group.rank, group.size)
        self._active: Communicator = self._lone_rank

    def open(self) -> None:
        """Exchange tensors from now on: later calls wait for the other ranks."""
        self._active = self.group

    def receive(self, x: Tensor, source: int) -> None:
        if self._active is self._lone_rank:
            x.zero_()  # x may hold NaN, which would stay in the recurrent states of padding rows
        else:
            self._active.receive(x, source)

    def close(self) -> None:
        self.group.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._active, name)
