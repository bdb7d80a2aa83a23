"""Device: the CUDA functions that the runner uses: streams, events, captured graphs and pinned memory.

`HostDevice` implements them without a GPU, for tests: it does everything at once and in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.core.environment import visible_gpus
from emberline.core.errors import InvalidRequest, ModelError
from emberline.core.gpu_kernels import format_capability
from emberline.engine.memory import bytes_used_by_other_processes
from emberline.kernels.backend import start_gpu_backend
from emberline.kernels.gpu_choice import describe_gpu, has_hopper_kernels
from emberline.models.pinned import pin, unpin

log = logging.getLogger("emberline.engine")


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists if the driver of NVIDIA GPUs is loaded


class DeviceEvent(Protocol):
    """A point in the work of a stream. It has passed when all earlier work is done."""

    def wait(self) -> None: ...
    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the seconds between two events that have both passed."""
        ...


class DeviceStream(Protocol):
    """A queue of work that the device executes in order. Streams run in parallel."""

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued on this stream."""
        ...

    def record_event(self) -> DeviceEvent:
        """Return an event after all work that was queued so far."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work of this stream wait for an event of another stream."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Record the work as a graph without executing it; return a function that executes the graph.

        The graph reads and writes the same addresses each time. The work must have been executed once before, so
        that nothing is compiled during the capture."""
        ...

    def release_captures(self) -> None:
        """Release the memory of captured graphs; they must not be used again."""
        ...


class Device(Protocol):
    torch_device: torch.device
    step_stream: DeviceStream  # the stream of the steps, with high priority

    def allocate_pinned(self, size: int) -> Tensor: ...
    def pin(self, memory: Tensor) -> bool:
        """Pin main memory until `unpin`, so that the device can copy it; return False if that fails."""
        ...

    def unpin(self, memory: Tensor) -> None: ...
    def new_stream(self) -> DeviceStream:
        """Return a new stream, which runs in parallel to all other streams."""
        ...


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool: Any = None  # torch has no public type for it

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record_event(self) -> DeviceEvent:
        return _CudaEvent(self._stream)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        from emberline.kernels.cuda import chain, wide
        from emberline.kernels.triton import linear

        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One memory pool for all graphs of a stream: they run one after the other, so they can share memory.
        # Not torch's own context manager, which would wait for the device and empty torch's memory cache.
        with torch.cuda.stream(self._stream):
            if has_hopper_kernels():
                wide.get_exchange_memory(self._stream.device)
                chain.get_arrivals(self._stream.device)
            linear.arrival_counters(self._stream.device)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def release_captures(self) -> None:
        self._pool = None


def can_use_gpu(kernels: str = "auto") -> bool:
    """Return whether this process can compute on a GPU.

    Raises InvalidRequest if the GPU cannot run the kernels that the setting `kernels` names."""
    gpu = describe_gpu(kernels)
    return gpu is not None and gpu.kernels.is_usable


def warn_of_unused_gpu(kernels: str = "auto") -> None:
    """Log a warning if there is a GPU that cannot be used, so that the CPU computes."""
    if (gpu := describe_gpu(kernels)) is not None:
        log.warning(
            "Computing on the CPU, the GPU cannot be used: gpu=%r capability=%s reason=%r",
            *(gpu.name, format_capability(gpu.capability), gpu.kernels.reason),
        )
    elif NVIDIA_DRIVER.exists() and visible_gpus() != []:
        log.warning("Computing on the CPU, the GPU cannot be used: reason=%r", explain_missing_gpu())


def explain_missing_gpu() -> str:
    """Return why torch sees no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch sees no NVIDIA GPU"


class CudaDevice:
    def __init__(self, kernels: str = "auto") -> None:
        """Use the current GPU, with the kernels that the setting `kernels` names.

        Raises InvalidRequest if there is no GPU, or it cannot be used."""
        hint = "use --device auto; emberline doctor shows the hardware"
        if (gpu := describe_gpu(kernels)) is None:
            raise InvalidRequest(f"device is cuda, but {explain_missing_gpu()}", param="device", hint=hint)
        if not gpu.kernels.is_usable:
            message = f"device is cuda, but the GPU {gpu.name} cannot be used: {gpu.kernels.reason}"
            raise InvalidRequest(message, param="device", hint=hint)
        start_gpu_backend(gpu.kernels)
        log.info(
            "Computing on a GPU: gpu=%r capability=%s kernels=%s reason=%r",
            *(gpu.name, format_capability(gpu.capability), gpu.kernels.name, gpu.kernels.reason),
        )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # High priority: other streams get only the multiprocessors that a step leaves free.
        self.step_stream: DeviceStream = CudaStream(torch.cuda.Stream(self.torch_device, priority=-1))

    def allocate_pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        try:
            pin(memory)
        except ModelError as error:
            log.warning("Pinning main memory failed, copying KV blocks through a buffer: reason=%s", error.message)
            with contextlib.suppress(RuntimeError):  # the next CUDA call reports the same error once more
                torch.zeros(1, device=self.torch_device)
            return False
        return True

    def unpin(self, memory: Tensor) -> None:
        unpin(memory)

    def new_stream(self) -> DeviceStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))


class _HostEvent:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _HostEvent)
        return self.at - earlier.at


class HostStream:
    def activate(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record_event(self) -> DeviceEvent:
        return _HostEvent()

    def wait_event(self, event: DeviceEvent) -> None:
        return

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        return lambda: (work(), None)[1]

    def release_captures(self) -> None:
        return


class HostDevice:
    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.step_stream: DeviceStream = HostStream()

    def allocate_pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> bool:
        return True

    def unpin(self, memory: Tensor) -> None:
        return

    def new_stream(self) -> DeviceStream:
        return HostStream()


def measure_memory(device: Device) -> tuple[int, int]:
    """Return the bytes of a device's memory, and how many of them other processes use."""
    where = device.torch_device
    if where.type != "cuda":
        return 1 << 30, 0
    free, total = torch.cuda.mem_get_info(where)
    return total, bytes_used_by_other_processes(total, free, torch.cuda.memory_reserved(where))
