"""Device: the few things a runner asks of a GPU's runtime. `Host` stands in where there is no GPU: it does all at once,
in order, so that a runner's bookkeeping is tested anywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the device's work."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def since(self, earlier: Mark) -> float:
        """Seconds between two marks that have passed."""
        ...


class Device(Protocol):
    torch: torch.device

    def mark(self) -> Mark: ...
    def pinned(self, size: int) -> Tensor: ...
    def working(self) -> AbstractContextManager[object]:
        """Inside, work goes to the runner's own stream."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Runs the work once, and gives back a call that repeats it on the same addresses."""
        ...


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Cuda:
    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch)
        self._pool: Any = None  # torch has no public name for it

    def mark(self) -> Mark:
        return _CudaMark()

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        work()  # compiles what is not compiled, and sets handles up: neither may happen during a capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One pool for all: they run one after the other, so each may use what the others left behind.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


class _HostMark:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        return

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self.at - earlier.at


class Host:
    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def mark(self) -> Mark:
        return _HostMark()

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def working(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        return lambda: (work(), None)[1]
