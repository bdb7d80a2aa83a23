"""NcclGroup: exchanges tensors between GPUs through torch's NCCL backend, on one machine or several.

NCCL needs a GPU for each rank. The order in which NCCL itself adds numbers depends on the size of the tensor, the
number of ranks and the links between GPUs. All ranks get the same bits, and so do repeated runs on the same machines.
But other communicators get other bits, and the sum of an element depends on its place in the tensor. So NCCL only
gathers the tensors of all ranks, and each rank adds them in the order of the ranks, unless that is turned off.

If a rank does not take part within the deadline, NCCL's watchdog ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from emberline.kernels.comm.communicator import CollectivesUnavailable, Communicator, RankLost
from emberline.kernels.comm.gloo import GlooGroup


class NcclGroup(Communicator):
    can_capture = True

    def __init__(
        self, host: GlooGroup, device: torch.device, *, timeout_s: float, sums_in_rank_order: bool = True
    ) -> None:
        """Connect the GPUs of the ranks of `host`. `close` closes `host` too.

        `sums_in_rank_order`: whether `all_reduce` sums in the order of the ranks; otherwise NCCL sums, which is faster.
        Raises CollectivesUnavailable if NCCL is missing or refuses the GPUs.
        """
        self.rank, self.size, self._host, self._sums_in_rank_order = host.rank, host.size, host, sums_in_rank_order
        self._is_aborted, self._abort_lock = False, threading.Lock()
        if not distributed.is_nccl_available():
            raise CollectivesUnavailable("this build of torch has no NCCL")
        options: Any = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = distributed.ProcessGroupNCCL(host.open_store("nccl"), host.rank, host.size, options)
            self.all_gather(torch.zeros(1, device=device))  # connects
            torch.cuda.synchronize(device)
        except RuntimeError as error:  # torch's DistBackendError is one too
            raise CollectivesUnavailable(f"NCCL cannot connect rank {host.rank} of {host.size}: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._sums_in_rank_order:
            x = x.contiguous()
            self._call(lambda: self._group.allreduce([x]))
            return x
        first, *others = self._gather(x)
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), dim=-1)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert len(x) == sum(send_counts), f"{len(x)} rows, counts {send_counts}"
        received, sent = x.new_empty(sum(receive_counts), *x.shape[1:]), x.contiguous()
        counts = list(receive_counts), list(send_counts)
        self._call(lambda: self._group.alltoall_base(received, sent, *counts))
        return received

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        options, shared = distributed.BroadcastOptions(), x.contiguous()
        options.rootRank = source
        self._call(lambda: self._group.broadcast([shared], options))
        return x if shared is x else x.copy_(shared)

    def send(self, x: Tensor, to: int) -> None:
        sent = x.contiguous()
        self._call(lambda: self._group.send([sent], to, 0))

    def receive(self, x: Tensor, source: int) -> None:
        received = x.contiguous()
        self._call(lambda: self._group.recv([received], source, 0))
        if received is not x:
            x.copy_(received)

    def check(self) -> None:
        if self._is_aborted:
            raise RankLost(f"rank {self.rank} of {self.size}: the group was aborted")

    def abort(self) -> None:
        """Make the calls of all threads fail. Do nothing if the group was aborted or closed before."""
        if (group := self._take_running_group()) is not None:
            group.abort()

    def close(self) -> None:
        """End the connections. A second call does nothing."""
        if (group := self._take_running_group()) is not None:
            group.shutdown()
        self._group = None
        self._host.close()

    def _take_running_group(self) -> Any:
        """Mark this group as aborted and return torch's group; None: it was already marked, by any thread."""
        with self._abort_lock:
            was_aborted, self._is_aborted = self._is_aborted, True
            return None if was_aborted else self._group

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = x.new_empty(self.size, *x.shape)
        self._call(lambda: self._group._allgather_base(parts, x.contiguous()))
        return list(parts.unbind())

    def _call(self, start: Callable[[], Any]) -> None:
        """Start a call of NCCL, which runs on a stream of its own, and make the current stream wait for it."""
        self.check()
        try:
            start().wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size}: {error}") from error
