"""Sleeper: several models take turns on one GPU; those that were used longest ago sleep. The policy is torch-free.

While a model sleeps its weights wait in pinned host memory. They never change, so they are copied there once: going to
sleep again costs nothing but giving the memory back. Keys and values are forgotten, and the prefix cache with them, but
for what lies in lower tiers. All else that the runner keeps on the device comes back as zeros, as it was when it was
new. Memory comes back at another address, so captured steps are dropped, and made again when a step of their size is
next wanted.
"""

from __future__ import annotations

import gc
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from emberline.core.clock import Clock, SystemClock
from emberline.core.errors import ModelError, ModelNotFound, Overloaded
from emberline.core.events import Turns
from emberline.engine.engine import Engine
from emberline.engine.memory import FRACTION, RESERVE, MemoryPlan, gib
from emberline.kv.manager import KVManager

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import Booted
    from emberline.engine.gpu.runner import GPURunner
    from emberline.models.sleep import Sleep


class Resident(Protocol):
    """A model that can give its memory back. One that has never been awake counts as asleep."""

    nbytes: int  # on the device while it is awake; asleep, none

    @property
    def idle(self) -> bool:
        """It has no open requests."""
        ...

    def wake(self) -> int:
        """Bytes copied. If it raises, it is asleep as before."""
        ...

    def sleep(self) -> int:
        """Bytes copied. If it raises, it is awake as before."""
        ...


class Sleeper:
    def __init__(self, memory: int, clock: Clock | None = None) -> None:
        """`memory`: bytes for all that are awake together; see `room`."""
        self.memory = memory
        self.turns: dict[str, Turns] = {}
        self.changed: set[str] = set()  # who fell asleep or woke; whoever reads it empties it
        self._clock = clock or SystemClock()
        self._models: dict[str, Resident] = {}
        self._awake: OrderedDict[str, float] = OrderedDict()  # since when; used longest ago first

    @property
    def awake(self) -> tuple[str, ...]:
        return tuple(self._awake)

    def since(self, name: str) -> float | None:
        """When it woke; None: it sleeps."""
        return self._awake.get(name)

    @property
    def used(self) -> int:
        return sum(self._models[name].nbytes for name in self._awake)

    def add(self, name: str, resident: Resident) -> None:
        """It sleeps until it is used."""
        assert name not in self._models
        if resident.nbytes > self.memory:
            raise ModelError(
                f"{name} needs {gib(resident.nbytes)} GiB and there are {gib(self.memory)} GiB for models",
                hint="give it fewer tokens of keys and values, or take a smaller model",
            )
        self._models[name] = resident
        self.turns[name] = Turns()

    def use(self, name: str) -> None:
        """It is awake when this returns, and the last to be put to sleep. Who has open requests is not disturbed; what
        cannot be done for that reason is refused before anything is done."""
        if name not in self._models:
            raise ModelNotFound(f"there is no model {name!r}", hint=f"there are: {' '.join(self._models)}")
        if name not in self._awake:
            for other in self._leaving(name):
                self._sleep(other)
            self._wake(name)
        self._awake.move_to_end(name)

    def in_the_way(self, name: str) -> list[str]:
        """Those with open requests that would have to sleep for it, used longest ago first."""
        missing, busy = self._missing(name), []
        for other in sorted(self._awake, key=lambda other: not self._models[other].idle):
            if missing <= 0:
                break
            missing -= self._models[other].nbytes
            if not self._models[other].idle:
                busy.append(other)
        return busy

    def _missing(self, name: str) -> int:
        return 0 if name in self._awake else self.used + self._models[name].nbytes - self.memory

    def _leaving(self, name: str) -> list[str]:
        missing = self._missing(name)
        leaving = []
        for other in self._awake:
            if missing <= 0:
                break
            if self._models[other].idle:
                leaving.append(other)
                missing -= self._models[other].nbytes
        if missing > 0:
            busy = " ".join(other for other in self._awake if other not in leaving)
            raise Overloaded(
                f"{name} needs {gib(missing)} GiB more than there are while others have open requests: {busy}",
                hint="try again when they are done",
            )
        return leaving

    def _sleep(self, name: str) -> None:
        began, turns = self._clock.now(), self.turns[name]
        turns.sleep_bytes += self._models[name].sleep()
        del self._awake[name]
        self.changed.add(name)
        turns.sleeps += 1
        turns.sleep_seconds += self._clock.now() - began

    def _wake(self, name: str) -> None:
        began, turns = self._clock.now(), self.turns[name]
        turns.wake_bytes += self._models[name].wake()
        self._awake[name] = self._clock.now()
        self.changed.add(name)
        turns.wakes += 1
        turns.wake_seconds += self._awake[name] - began


class Swapped:
    """A model's engine: made when it is first wanted, and without memory on the device while it sleeps."""

    def __init__(self, plan: MemoryPlan, boot: Callable[[], Booted]) -> None:
        """`plan`: the one that `boot` will come to."""
        self.nbytes = plan.fixed - plan.reserve + plan.kv_bytes
        self._boot = boot
        self._booted: Booted | None = None
        self._slept: Sleep | None = None  # what came back by it is kept on the host, for the next time
        self._awake = False

    @property
    def booted(self) -> Booted:
        assert self._booted is not None and self._awake, "it sleeps"
        return self._booted

    @property
    def engine(self) -> Engine:
        return self.booted.engine

    @property
    def idle(self) -> bool:
        return self._booted is None or self._booted.engine.idle

    def wake(self) -> int:
        assert not self._awake
        _empty_cache()  # what others freed, for allocations of any size
        if self._booted is None:
            self._booted = _booted(self._boot)
            taken = self._booted.plan
            assert taken.fixed - taken.reserve + taken.kv_bytes <= self.nbytes, "it came to another plan"
            copied = self._booted.runner.model.weight_bytes
        else:
            assert self._slept is not None
            wake_runner(self._slept)
            copied = self._slept.copied_bytes
        self._awake = True
        return copied

    def sleep(self) -> int:
        assert self._booted is not None and self._awake and self.idle
        first = self._slept is None
        self._slept = sleep_runner(self._booted.runner, self._slept)
        forget_prefixes(self._booted.engine)
        self._awake = False
        return self._slept.copied_bytes if first else 0

    def close(self) -> None:
        """Lets its copies on the host go. It cannot be used again."""
        if self._slept is not None:
            self._slept.close()
        self._booted, self._slept, self._awake = None, None, False


def room(total: int) -> int:
    """What a device has for models: the reserve is for all of them together, and for what they leave while they sleep
    (compiled kernels, workspaces of libraries)."""
    return int(total * FRACTION) - RESERVE


def shared_kv(plans: Collection[MemoryPlan], memory: int) -> int | None:
    """Bytes of keys and values for each, if all are to be awake together: an equal part of what everything else leaves.
    None: one of them would not have room for a full context, so they had better take turns with all of the memory."""
    part = (memory - sum(plan.fixed - plan.reserve for plan in plans)) // len(plans)
    fits = all(part >= plan.kv_bytes // plan.kv_tokens * (plan.max_context + plan.block_size) for plan in plans)
    return part if fits else None


def sleep_runner(runner: GPURunner, slept: Sleep | None = None) -> Sleep:
    """For a runner whose results have all been fetched. `slept`: what it slept by before."""
    from torch import Tensor

    from emberline.models.sleep import every, sleep

    _forget_addresses(runner)
    if slept is None:
        return sleep(every(Tensor, runner.model), zeroed=runner.buffers())
    slept.again()
    return slept


def wake_runner(slept: Sleep) -> None:
    """As it was before, but for what it had captured and what was cached. If memory runs out, none is held."""
    try:
        slept.wake(keep=True)
    except BaseException:
        slept.again()
        raise


def forget_prefixes(engine: Engine) -> None:
    assert engine.idle
    old = engine.kv
    kv = KVManager(
        old.total,
        old.block_size,
        engine.runner.layout,
        prefix_cache=old.prefix_cache,
        clock=engine.clock,
        load_timeout=engine.config.load_timeout,
        tiers=old.tiers,
    )
    kv.queries, kv.hits = old.queries, old.hits  # counters only rise
    if old.watched:
        kv.watch()
    engine.kv = engine.scheduler.kv = kv


def _booted(boot: Callable[[], Booted]) -> Booted:
    try:
        return boot()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold what was loaded so far
        gc.collect()
        _empty_cache()
        raise


def check_device() -> None:
    """Raises if no work can be done on it any more: then nothing but a new process helps."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget_addresses(runner: GPURunner) -> None:
    from emberline.kernels.cuda.linear import Weight
    from emberline.models.sleep import every

    runner.forget()
    for weight in every(Weight, runner.model):
        weight.forget()
