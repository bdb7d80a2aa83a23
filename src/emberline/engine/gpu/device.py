"""Device: what the runner needs of CUDA: streams, events, captured graphs and pinned memory.

`HostDevice` implements it without a GPU by doing everything at once and in order, for tests."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.core.errors import InvalidRequest, ModelError
from emberline.models.pinned import pin, unpin

log = logging.getLogger("emberline.engine")


class Mark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None: ...
    def since(self, earlier: Mark) -> float:
        """Return the seconds between two events that have both passed."""
        ...


class Lane(Protocol):
    """A queue of work that the device executes in order. Streams run in parallel."""

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued on this stream."""
        ...

    def mark(self) -> Mark:
        """Return an event after all work that was queued so far."""
        ...

    def after(self, mark: Mark) -> None:
        """Make later work of this stream wait for an event of another stream."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Record the work as a graph without executing it, and return a function that executes it.

        The graph reads and writes the same addresses each time.

        The work must have been executed once before, so that nothing is compiled during the capture."""
        ...

    def forget(self) -> None:
        """Release the memory of captured graphs; they must not be used again."""
        ...


class Device(Protocol):
    torch: torch.device
    lane: Lane  # the stream of the steps, with high priority

    def pinned(self, size: int) -> Tensor: ...
    def pin(self, memory: Tensor) -> bool:
        """Pin main memory until `unpin`, so that the device can copy it; return False if that fails."""
        ...

    def unpin(self, memory: Tensor) -> None: ...
    def beside(self) -> Lane:
        """Return another stream."""
        ...


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaLane:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool: Any = None  # torch has no public type for it

    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._stream.wait_event(mark.event)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One memory pool for all graphs of a stream: they run one after the other, so they can share memory.
        # Not torch's own context manager, which would wait for the device and empty torch's memory cache.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def forget(self) -> None:
        self._pool = None


def has_hopper() -> bool:
    """Return whether the GPU has compute capability 9.0, which the kernels need exactly."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Cuda:
    def __init__(self) -> None:
        if not has_hopper():
            hint = "use --device auto; emberline doctor shows the hardware"
            raise InvalidRequest("device is cuda, but there is no GPU with compute capability 9.0", hint=hint)
        self.torch = torch.device("cuda", 0)
        # High priority: other streams get only the multiprocessors that a step leaves free.
        self.lane: Lane = CudaLane(torch.cuda.Stream(self.torch, priority=-1))

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        try:
            pin(memory)
        except ModelError as error:
            log.warning("pinning main memory failed, copying KV blocks through a buffer: reason=%s", error.message)
            with contextlib.suppress(RuntimeError):  # the next CUDA call reports the same error once more
                torch.zeros(1, device=self.torch)
            return False
        return True

    def unpin(self, memory: Tensor) -> None:
        unpin(memory)

    def beside(self) -> Lane:
        return CudaLane(torch.cuda.Stream(self.torch))


class _HostMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        return

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self.at - earlier.at


class HostLane:
    def working(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        return _HostMark()

    def after(self, mark: Mark) -> None:
        return

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        return lambda: (work(), None)[1]

    def forget(self) -> None:
        return


class Host:
    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.lane: Lane = HostLane()

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> bool:
        return True

    def unpin(self, memory: Tensor) -> None:
        return

    def beside(self) -> Lane:
        return HostLane()
