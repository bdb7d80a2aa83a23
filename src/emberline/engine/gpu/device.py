"""Device: the few things a runner asks of a GPU's runtime. `Host` stands in where there is no GPU: it does all at once,
in order, so that a runner's bookkeeping is tested anywhere."""

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
    """A point in a lane's work."""

    def wait(self) -> None: ...
    def since(self, earlier: Mark) -> float:
        """Seconds between two marks that have passed."""
        ...


class Lane(Protocol):
    """Work in order. Lanes run beside each other."""

    def working(self) -> AbstractContextManager[object]:
        """Inside, work goes to this lane."""
        ...

    def mark(self) -> Mark:
        """Here, after all that was given to the lane so far."""
        ...

    def after(self, mark: Mark) -> None:
        """What comes next waits for another lane's mark."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Notes the work down without doing it, and gives back a call that does it, on the same addresses. The work
        was done once before, so that nothing is left to compile."""
        ...

    def forget(self) -> None:
        """All that was captured is gone: its memory may go too."""
        ...


class Device(Protocol):
    torch: torch.device
    lane: Lane  # all of the device

    def pinned(self, size: int) -> Tensor: ...
    def pin(self, memory: Tensor) -> bool:
        """Lets the device reach main memory by itself, until `unpin`; False: it cannot."""
        ...

    def unpin(self, memory: Tensor) -> None: ...
    def beside(self) -> Lane:
        """Another lane with all of the device."""
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
        self._pool: Any = None  # torch has no public name for it

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
        # One pool for all of a lane: they run one after the other, so each may use what the others left behind.
        # Begun by hand: torch's own context would wait for the device, and empty its cache of memory.
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
    """Our kernels use what came with compute capability 9.0, in the form that only 9.0 has."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Cuda:
    def __init__(self) -> None:
        if not has_hopper():
            hint = "serve with --device auto; emberline doctor says what is here"
            raise InvalidRequest("device is cuda; there is no GPU here that our kernels are made for", hint=hint)
        self.torch = torch.device("cuda", 0)
        # Before all others: what runs beside a step takes the multiprocessors that it leaves.
        self.lane: Lane = CudaLane(torch.cuda.Stream(self.torch, priority=-1))

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        try:
            pin(memory)
        except ModelError as error:
            log.warning("%s: keys and values are copied once more on their way", error.message)
            with contextlib.suppress(RuntimeError):  # the runtime tells its last error once more, to whoever is next
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
