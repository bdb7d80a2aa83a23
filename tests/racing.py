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
Past = dict[str, int]  # for each stream, how many of its operations are known to be complete


class RacingMark:
    def __init__(self, device: Racing, past: Past) -> None:
        self.device, self.past = device, past

    def wait(self) -> None:
        self.device.learn(HOST, self.past)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return 1e-3


class RacingLane(HostStream):
    def __init__(self, device: Racing, name: str) -> None:
        self.device, self.name = device, name

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        before, self.device.at_work = self.device.at_work, self.name
        yield
        self.device.at_work = before

    def record_event(self) -> DeviceEvent:
        return RacingMark(self.device, dict(self.device.pasts[self.name]))

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, RacingMark)
        self.device.learn(self.name, event.past)


class Racing(TorchDispatchMode):
    """A context manager: operations inside it are checked."""

    def __init__(self, *, pins: bool = True) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.pasts: defaultdict[str, Past] = defaultdict(dict)
        self.at_work = HOST
        self.races: list[str] = []
        self.pinned_now: list[Tensor] = []
        self._pins = pins
        self._names: dict[int, str] = {}  # uses of watched memory, by address
        self._area = range(0)
        self._host_memory: set[int] = set()  # which is not device memory
        self._written: dict[int, tuple[str, int]] = {}
        self._read: defaultdict[int, Past] = defaultdict(dict)
        self._lanes = 0
        self.step_stream: DeviceStream = RacingLane(self, "steps")

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
        used = {where for where in (*self._written, *self._read) if where in self._area}
        self._act(HOST, [(where, True) for where in used], "unpinning")

    def new_stream(self) -> DeviceStream:
        self._lanes += 1
        return RacingLane(self, f"lane {self._lanes}")

    def split(self, few: int) -> tuple[DeviceStream, DeviceStream]:
        return self.new_stream(), self.new_stream()

    def watch(self, area: memoryview | None = None, **memory: Iterable[Tensor]) -> None:
        """`memory`: where buffers lie that are told apart by where they begin."""
        for name, tensors in memory.items():
            for i, tensor in enumerate(tensors):
                self._names[tensor.untyped_storage().data_ptr()] = f"{name} {i}"
        if area is not None:
            begin = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
            self._area = range(begin, begin + len(area))

    def learn(self, who: str, past: Past) -> None:
        mine = self.pasts[who]
        mine.update({lane: max(count, mine.get(lane, 0)) for lane, count in past.items()})

    def note(self, what: str, *memory: Tensor | memoryview, writes: bool) -> None:
        """Record a use of memory that torch does not report."""
        tensors = [m if isinstance(m, Tensor) else torch.frombuffer(m, dtype=torch.uint8) for m in memory]
        self._act(self.at_work, [(t.untyped_storage().data_ptr(), writes) for t in tensors], what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        looks = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
        if not looks:  # a view does not use memory
            values = [(args[i] if i < len(args) else kwargs.get(a.name), a) for i, a in enumerate(schema.arguments)]
            used = [
                (value.untyped_storage().data_ptr(), arg.alias_info is not None and arg.alias_info.is_write)
                for value, arg in values
                if isinstance(value, Tensor)
            ]
            by_host = bool(used) and all(where in self._host_memory or where in self._area for where, _ in used)
            self._act(HOST if by_host else self.at_work, used, str(func))
            if func is torch.ops.aten.index_copy_.default and len(set(args[2].tolist())) < len(args[2]):
                self.races.append("two are copied to one place at once")
        return func(*args, **kwargs)

    def _act(self, who: str, used: list[tuple[int, bool]], what: str) -> None:
        """Add an operation of the stream, after everything that the host knows to be complete."""
        past = self.pasts[who]
        self.learn(who, self.pasts[HOST])
        past[who] = past.get(who, 0) + 1
        for where, writes in used:
            if where in self._names or where in self._area:
                self._use(who, where, writes, what)

    def _use(self, who: str, where: int, writes: bool, what: str) -> None:
        past = self.pasts[who]
        others = dict([self._written[where]]) if where in self._written else {}
        if writes:
            others |= {lane: max(count, others.get(lane, 0)) for lane, count in self._read[where].items()}
        for lane, count in others.items():
            if past.get(lane, 0) < count:
                name = self._names.get(where) or f"buffer at {where - self._area.start}"
                self.races.append(f"{what} on {who} uses {name}, perhaps before {lane} is done with it")
        if writes:
            self._written[where], self._read[where] = (who, past[who]), {}
        else:
            self._read[where][who] = past[who]
