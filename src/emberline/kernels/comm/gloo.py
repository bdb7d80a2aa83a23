"""GlooGroup: exchanges tensors between processes through torch's gloo backend, in main memory.

Tensors on a GPU are copied to main memory and back, and every call waits for the current stream. That is slow: it is
for tests of several ranks on one GPU, and for GPUs that can neither access each other's memory nor use NCCL."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from emberline.kernels.comm.communicator import Communicator, RankLost
from emberline.kernels.comm.rendezvous import Rendezvous

ABORT_TAG = 1  # of a message that no rank sends


class GlooGroup(Communicator):
    """A Communicator over TCP connections between all ranks of a group."""

    can_capture = False

    def __init__(
        self, rendezvous: Rendezvous, name: str, rank: int, size: int, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Connect to the other ranks, and wait for them up to `connect_timeout_s`. Raises RankLost.

        `rendezvous`: where the ranks find each other. Groups with different names may share it.
        `timeout_s`: the deadline of every later call.
        """
        self.rank, self.size, self._name = rank, size, name
        self._group: Any = None
        self._rendezvous: Rendezvous | None = None
        # torch opens the file by its path again when the group is freed: if its descriptor were closed before, the path
        # might name another file. So the group has a descriptor of its own.
        self._rendezvous = rendezvous.duplicate()
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
        self._connect_timeout = options._timeout = timedelta(seconds=connect_timeout_s)
        options._threads = 1
        self._timeout = timedelta(seconds=timeout_s)
        self._gather_options, self._exchange_options = AllgatherOptions(), AllToAllOptions()
        self._gather_options.timeout = self._exchange_options.timeout = self._timeout
        try:
            self._group = self._guard(lambda: self._connect(options))
        except RankLost:
            self.close()
            raise

    def _connect(self, options: Any) -> Any:
        assert self._rendezvous is not None
        store = distributed.PrefixStore(self._name, self._rendezvous.open_store(options._timeout))
        try:
            return distributed.ProcessGroupGloo(store, self.rank, self.size, options)
        finally:
            del store  # an error that is raised here must not keep it

    def open_store(self, name: str) -> Any:
        """Return a torch Store that the ranks share while this group is open, for connecting another torch backend."""
        assert self._rendezvous is not None
        return distributed.PrefixStore(f"{self._name}/{name}", self._rendezvous.open_store(self._connect_timeout))

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._gather(x)
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), dim=-1).to(x.device)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert len(x) == sum(send_counts), f"{len(x)} rows, counts {send_counts}"
        received = _empty_on_host(x, sum(receive_counts), *x.shape[1:])
        row_bytes = x.element_size() * math.prod(x.shape[1:])
        sent, sizes = (
            _as_bytes(_copy_to_host(x)),
            ([row_bytes * n for n in counts] for counts in (receive_counts, send_counts)),
        )
        call = partial(self._group.alltoall_base, _as_bytes(received), sent, *sizes, self._exchange_options)
        self._guard(lambda: call().wait())
        return received.to(x.device)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._gather(x)[source])

    def send(self, x: Tensor, to: int) -> None:
        sent = _as_bytes(_copy_to_host(x))
        self._guard(lambda: self._group.send([sent], to, 0).wait(self._timeout))

    def receive(self, x: Tensor, source: int) -> None:
        received = _empty_on_host(x, *x.shape) if x.is_cuda else x
        self._guard(lambda: self._group.recv([_as_bytes(received)], source, 0).wait(self._timeout))
        if x.is_cuda:
            x.copy_(received)

    def abort(self) -> None:
        """Make all waiting calls and all later calls raise RankLost. Any thread may call this method.

        gloo closes all connections of a group when one call times out, so this method makes a call that times out."""
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):
                received = torch.empty(1, dtype=torch.uint8)
                group.recv([received], (self.rank + 1) % self.size, ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        self._group = None  # frees it
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def __del__(self) -> None:
        self.close()

    def _gather(self, x: Tensor) -> list[Tensor]:
        x = _copy_to_host(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        outputs, inputs = [[_as_bytes(part) for part in parts]], [_as_bytes(x)]
        self._guard(lambda: self._group.allgather(outputs, inputs, self._gather_options).wait())
        return parts

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's DistBackendError is one too
            raise RankLost(f"group {self._name}, rank {self.rank} of {self.size}: {error}") from error


def _copy_to_host(x: Tensor) -> Tensor:
    """Return x as a contiguous tensor in main memory."""
    return _empty_on_host(x, *x.shape).copy_(x) if x.is_cuda else x.contiguous()


def _empty_on_host(x: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor in main memory with the dtype of x; pinned if x is on a GPU, so that copies are fast."""
    return torch.empty(shape, dtype=x.dtype, pin_memory=x.is_cuda)


def _as_bytes(x: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, because gloo does not know all dtypes."""
    return x.view(-1).view(torch.uint8)
