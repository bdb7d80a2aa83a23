"""ThreadGroup: a group whose ranks are threads of one process. It is for tests, and for several ranks on one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from emberline.kernels.comm.communicator import Communicator, RankLost

Result = TypeVar("Result")


class ThreadGroup:
    def __init__(self, size: int, deadline_s: float = 60.0, *, in_turns: bool = False) -> None:
        """`deadline_s`: how long a call waits for the other ranks.

        `in_turns`: whether `run` lets only one rank run at a time, until that rank ends or waits in a call. Then two
        threads never compile kernels at once."""
        self.size, self.deadline_s = size, deadline_s
        self._running = threading.Semaphore(1 if in_turns else size)  # ranks that run
        self.communicators = [ThreadCommunicator(self, rank) for rank in range(size)]
        self._barrier = threading.Barrier(size)
        # Two sets of slots are used in turn: a rank that is one call ahead does not overwrite what others still read.
        # A slot holds the number of a call, its description and its tensor.
        self._slots: list[list[tuple[int, str, Tensor]]] = [[(0, "", torch.empty(0))] * size for _ in range(2)]
        self._messages: list[list[SimpleQueue[Tensor]]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]

    def run(self, function: Callable[[ThreadCommunicator], Result]) -> list[Result]:
        """Run the function in a thread for each rank, and return the results.

        If it raises an error on a rank, the other ranks get RankLost, and `run` raises the error."""

        def run_rank(communicator: ThreadCommunicator) -> Result:
            try:
                with self._running:
                    return function(communicator)
            except BaseException:
                self.abort()
                raise

        with ThreadPoolExecutor(self.size, "rank") as pool:
            futures = [pool.submit(run_rank, communicator) for communicator in self.communicators]
            wait(futures)
        raise_first_cause(futures)
        return [future.result() for future in futures]

    def abort(self) -> None:
        """Make all waiting calls and all later calls raise RankLost."""
        self._barrier.abort()

    def exchange(self, rank: int, turn: int, call: str, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks. `turn`: the number of this call, the same on all ranks."""
        if self._barrier.broken:
            raise RankLost(f"{call} was called after a rank had ended")
        slots = self._slots[turn % 2]
        slots[rank] = turn, call, x
        # After all ranks have reached the barrier, others may end before this one has left it.
        if not self._wait_for_all() and any(found < turn for found, _, _ in slots):
            raise RankLost(f"a rank did not take part in {call} within {self.deadline_s} s, or ended")
        calls = [found for _, found, _ in slots]
        if set(calls) != {call}:
            raise RankLost(f"rank {rank} called {call}, but the calls of all ranks are {', '.join(calls)}")
        return [tensor for _, _, tensor in slots]

    def _wait_for_all(self) -> bool:
        """Return whether all ranks reached the barrier within the deadline, and none has ended."""
        self._running.release()
        try:
            self._barrier.wait(self.deadline_s)
            return True
        except threading.BrokenBarrierError:
            return False
        finally:
            self._running.acquire()

    def send(self, source: int, to: int, x: Tensor) -> None:
        self._messages[source][to].put(x)

    def receive(self, source: int, to: int) -> Tensor:
        try:
            return self._messages[source][to].get(timeout=self.deadline_s)
        except Empty:
            raise RankLost(f"rank {source} sent nothing to rank {to} within {self.deadline_s} s") from None


class ThreadCommunicator(Communicator):
    """A Communicator of a ThreadGroup."""

    can_capture = False

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size = rank, group.size
        self._group, self._turn = group, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._exchange(x, f"all_reduce of {tuple(x.shape)} {x.dtype}")
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x, f"all_gather of {tuple(x.shape)} {x.dtype}"), dim=-1)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert len(x) == sum(send_counts), f"{len(x)} rows, counts {send_counts}"
        counts = [each.tolist() for each in self._exchange(torch.tensor(send_counts), "all_to_all counts")]
        if (sent := [each[self.rank] for each in counts]) != list(receive_counts):
            self._group.abort()
            raise RankLost(f"rank {self.rank} expects {list(receive_counts)} rows of the ranks, which send {sent}")
        row = f"all_to_all of rows of {tuple(x.shape[1:])} {x.dtype}"
        parts = [each.split(sizes) for each, sizes in zip(self._exchange(x, row), counts, strict=True)]
        return torch.cat([each[self.rank] for each in parts])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._exchange(x, f"broadcast of {tuple(x.shape)} {x.dtype}")[source])

    def send(self, x: Tensor, to: int) -> None:
        self._group.send(self.rank, to, x.clone())

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self._group.receive(source, self.rank))

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()

    def _exchange(self, x: Tensor, call: str) -> list[Tensor]:
        """Return the tensors of all ranks. `call`: a description of the call, which must be equal on all ranks."""
        self._turn += 1
        return self._group.exchange(self.rank, self._turn, call, x.clone())


def raise_first_cause(futures: list[Future[Result]]) -> None:
    """Raise the error of a rank, if any failed. RankLost is raised only if no rank has another error."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankLost)):
        raise error
