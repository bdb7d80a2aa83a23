"""Racing: a device on the CPU that detects races which could occur on a real one, where streams run in parallel.

It executes all work at once and in order. Meanwhile torch reports which memory each operation uses, and the device
records which earlier operations each stream and the host have waited for. If two operations use the same memory, one of
them writes, and no event orders them, that is a race. Only memory passed to `watch` is checked.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emberline.engine.gpu.device import DeviceEvent, DeviceStream, HostStream

HOST = "host"
Progress = dict[str, int]  # for each stream, how many of its operations are known to be complete


class TrackedEvent:
    def __init__(self, device: RaceDetector, progress: Progress) -> None:
        self.device, self.progress = device, progress

    def wait(self) -> None:
        self.device.learn(HOST, self.progress)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return 1e-3


class TrackedStream(HostStream):
    def __init__(self, device: RaceDetector, name: str) -> None:
        self.device, self.name = device, name

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        before, self.device.at_work = self.device.at_work, self.name
        yield
        self.device.at_work = before

    def record_event(self) -> DeviceEvent:
        return TrackedEvent(self.device, dict(self.device.pasts[self.name]))

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, TrackedEvent)
        self.device.learn(self.name, event.progress)


class RaceDetector(TorchDispatchMode):
    """A context manager: operations inside it are checked."""

    def __init__(self, *, pins: bool = True) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.pasts: defaultdict[str, Progress] = defaultdict(dict)
        self.at_work = HOST
        self.races: list[str] = []
        self.pinned_now: list[Tensor] = []
        self._pins = pins
        self._names: dict[int, str] = {}  # uses of watched memory, by address
        self._area = range(0)
        self._host_memory: set[int] = set()  # which is not device memory
        self._written: dict[int, tuple[str, int]] = {}
        self._read: defaultdict[int, Progress] = defaultdict(dict)
        self._num_streams = 0
        self.step_stream: DeviceStream = TrackedStream(self, "steps")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, which takes seconds

    def allocate_pinned(self, size: int) -> Tensor:
        made = torch.zeros(size, dtype=torch.uint8)
        self.watch(pinned=[made])
        self._host_memory.add(made.data_ptr())
        return made

    def pin(self, memory: Tensor) -> bool:
        if self._pins:
            self.pinned_now.append(memory)
        return self._pins

    def unpin(self, memory: Tensor) -> None:
        self.pinned_now.remove(memory)
        used = {address for address in (*self._written, *self._read) if address in self._area}
        self._act(HOST, [(address, True) for address in used], "unpinning")

    def new_stream(self) -> DeviceStream:
        self._num_streams += 1
        return TrackedStream(self, f"stream {self._num_streams}")

    def split(self, number: int) -> tuple[DeviceStream, DeviceStream]:
        return self.new_stream(), self.new_stream()

    def watch(self, area: memoryview | None = None, **memory: Iterable[Tensor]) -> None:
        """Check the use of this memory. `area`: memory with buffers that are distinguished by their first address."""
        for name, tensors in memory.items():
            for i, tensor in enumerate(tensors):
                self._names[tensor.untyped_storage().data_ptr()] = f"{name} {i}"
        if area is not None:
            begin = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
            self._area = range(begin, begin + len(area))

    def learn(self, stream: str, progress: Progress) -> None:
        mine = self.pasts[stream]
        mine.update({other: max(count, mine.get(other, 0)) for other, count in progress.items()})

    def note(self, operation: str, *memory: Tensor | memoryview, writes: bool) -> None:
        """Record a use of memory that torch does not report."""
        tensors = [m if isinstance(m, Tensor) else torch.frombuffer(m, dtype=torch.uint8) for m in memory]
        self._act(self.at_work, [(t.untyped_storage().data_ptr(), writes) for t in tensors], operation)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
        if not is_view:  # a view does not use memory
            values = [(args[i] if i < len(args) else kwargs.get(a.name), a) for i, a in enumerate(schema.arguments)]
            used = [
                (value.untyped_storage().data_ptr(), arg.alias_info is not None and arg.alias_info.is_write)
                for value, arg in values
                if isinstance(value, Tensor)
            ]
            by_host = bool(used) and all(address in self._host_memory or address in self._area for address, _ in used)
            self._act(HOST if by_host else self.at_work, used, str(func))
            if func is torch.ops.aten.index_copy_.default and len(set(args[2].tolist())) < len(args[2]):
                self.races.append("one index_copy_ writes an index twice")
        return func(*args, **kwargs)

    def _act(self, stream: str, used: list[tuple[int, bool]], operation: str) -> None:
        """Add an operation of the stream, after everything that the host knows to be complete."""
        progress = self.pasts[stream]
        self.learn(stream, self.pasts[HOST])
        progress[stream] = progress.get(stream, 0) + 1
        for address, writes in used:
            if address in self._names or address in self._area:
                self._use(stream, address, writes, operation)

    def _use(self, stream: str, address: int, writes: bool, operation: str) -> None:
        progress = self.pasts[stream]
        others = dict([self._written[address]]) if address in self._written else {}
        if writes:
            others |= {other: max(count, others.get(other, 0)) for other, count in self._read[address].items()}
        for other, count in others.items():
            if progress.get(other, 0) < count:
                name = self._names.get(address) or f"buffer at {address - self._area.start}"
                self.races.append(f"{operation} on {stream} uses {name}, possibly before {other} is done with it")
        if writes:
            self._written[address], self._read[address] = (stream, progress[stream]), {}
        else:
            self._read[address][stream] = progress[stream]
