"""SleepManager: lets several models share one GPU. The least recently used models sleep.

The weights of a sleeping model are in pinned host memory. Weights never change, so they are copied there once, and
later sleeps only free device memory. The KV cache and its prefixes are lost, except for blocks in lower tiers. After
waking, all other buffers of the runner are zero, as they were at first. Device memory is then at different
addresses, so captured steps are dropped and captured again at their next use. The policy needs no torch."""

from __future__ import annotations

import gc
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from emberline.core.clock import Clock, SystemClock
from emberline.core.errors import ModelError, ModelNotFound, Overloaded
from emberline.core.events import SleepStats
from emberline.engine.engine import Engine
from emberline.engine.memory import DEFAULT_UTILIZATION, RESERVE_BYTES, usable_bytes
from emberline.engine.memory_plan import MemoryPlan, format_gib

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine
    from emberline.engine.gpu.runner import GPURunner
    from emberline.models.sleep import SleepingMemory


class SwappableModel(Protocol):
    """A model that can free its device memory. Before its first `wake`, a model counts as asleep."""

    nbytes: int  # device memory while it is awake; 0 while it sleeps

    @property
    def idle(self) -> bool:
        """Whether the model has no open requests."""
        ...

    def wake(self) -> int:
        """Wake the model and return the bytes copied. If this raises, the model is still asleep."""
        ...

    def sleep(self) -> int:
        """Put the model to sleep and return the bytes copied. If this raises, the model is still awake."""
        ...


class SleepManager:
    def __init__(self, memory: int, clock: Clock | None = None) -> None:
        """`memory`: bytes that all models that are awake may use together; see `usable_model_bytes`."""
        self.memory = memory
        self.stats: dict[str, SleepStats] = {}
        self.sleep_changes: set[str] = set()  # models that fell asleep or woke; the reader clears it
        self._clock = clock or SystemClock()
        self._models: dict[str, SwappableModel] = {}
        self._awake_since: OrderedDict[str, float] = OrderedDict()  # time of waking; least recently used model first

    @property
    def awake_models(self) -> tuple[str, ...]:
        return tuple(self._awake_since)

    def awake_since(self, name: str) -> float | None:
        """Return the time when a model woke; None if it sleeps."""
        return self._awake_since.get(name)

    @property
    def used_bytes(self) -> int:
        return sum(self._models[name].nbytes for name in self._awake_since)

    def add(self, name: str, model: SwappableModel) -> None:
        """Add a model, which is asleep at first. Raises ModelError if it alone needs more than `memory`."""
        assert name not in self._models
        if model.nbytes > self.memory:
            raise ModelError(
                f"the model {name!r} needs {format_gib(model.nbytes)} GiB; "
                f"the GPU has {format_gib(self.memory)} GiB for models",
                hint="lower --kv-memory or use a smaller model",
            )
        self._models[name] = model
        self.stats[name] = SleepStats()

    def ensure_awake(self, name: str) -> None:
        """Wake a model if it sleeps, and make it the most recently used one.

        Idle models are put to sleep if their memory is needed. Raises Overloaded, before anything is changed, if a
        model with open requests would have to sleep."""
        if name not in self._models:
            raise ModelNotFound(f"there is no model {name!r}", hint=f"available models: {' '.join(self._models)}")
        if name not in self._awake_since:
            for other in self._idle_models_to_sleep(name):
                self.put_to_sleep(other)
            self._wake_model(name)
        self._awake_since.move_to_end(name)

    def has_room_for(self, name: str) -> bool:
        """Return whether the model is awake, or can wake while all models that are awake stay so."""
        return self._missing_bytes(name) <= 0

    def busy_models_to_sleep(self, name: str) -> list[str]:
        """Return the busy models that must sleep before this model can wake, least recently used first."""
        missing, busy = self._missing_bytes(name), []
        for other in sorted(self._awake_since, key=lambda other: not self._models[other].idle):
            if missing <= 0:
                break
            missing -= self._models[other].nbytes
            if not self._models[other].idle:
                busy.append(other)
        return busy

    def _missing_bytes(self, name: str) -> int:
        return 0 if name in self._awake_since else self.used_bytes + self._models[name].nbytes - self.memory

    def _idle_models_to_sleep(self, name: str) -> list[str]:
        missing = self._missing_bytes(name)
        to_sleep = []
        for other in self._awake_since:
            if missing <= 0:
                break
            if self._models[other].idle:
                to_sleep.append(other)
                missing -= self._models[other].nbytes
        if missing > 0:
            busy = " ".join(other for other in self._awake_since if other not in to_sleep)
            raise Overloaded(
                f"the model {name!r} needs {format_gib(missing)} GiB more GPU memory, which busy models use: {busy}",
                hint="retry when their requests have ended",
            )
        return to_sleep

    def put_to_sleep(self, name: str) -> None:
        """Put a model to sleep that is awake and has no open requests."""
        began, stats = self._clock.now(), self.stats[name]
        stats.sleep_bytes += self._models[name].sleep()
        del self._awake_since[name]
        self.sleep_changes.add(name)
        stats.sleeps += 1
        stats.sleep_seconds += self._clock.now() - began

    def _wake_model(self, name: str) -> None:
        began, stats = self._clock.now(), self.stats[name]
        stats.wake_bytes += self._models[name].wake()
        self._awake_since[name] = self._clock.now()
        self.sleep_changes.add(name)
        stats.wakes += 1
        stats.wake_seconds += self._awake_since[name] - began


class SwappedEngine:
    """A model whose engine is loaded at its first `wake`, and which has no device memory while it sleeps."""

    def __init__(self, plan: MemoryPlan, boot: Callable[[], BootedGPUEngine]) -> None:
        """`boot`: loads the engine. `plan`: the memory plan that the loaded engine will have."""
        self.nbytes = plan.fixed_bytes - plan.reserve + plan.kv_bytes
        self._boot = boot
        self._gpu_engine: BootedGPUEngine | None = None
        self._memory: RunnerMemory | None = None
        self._is_awake = False

    @property
    def gpu_engine(self) -> BootedGPUEngine:
        assert self._gpu_engine is not None and self._is_awake, "the model sleeps"
        return self._gpu_engine

    @property
    def engine(self) -> Engine:
        return self.gpu_engine.engine

    @property
    def idle(self) -> bool:
        return self._gpu_engine is None or self._gpu_engine.engine.idle

    def wake(self) -> int:
        assert not self._is_awake
        if self._memory is None:
            free_cached_memory()
            self._gpu_engine = _boot_or_clean_up(self._boot)
            plan = self._gpu_engine.plan
            assert plan.fixed_bytes - plan.reserve + plan.kv_bytes <= self.nbytes, "the engine has another memory plan"
            self._memory = RunnerMemory(self._gpu_engine.runner)
            copied = self._gpu_engine.runner.model.weight_bytes
        else:
            copied = self._memory.restore()
        self._is_awake = True
        return copied

    def sleep(self) -> int:
        assert self._gpu_engine is not None and self._memory is not None and self._is_awake and self.idle
        copied = self._memory.free()
        reset_prefix_cache(self._gpu_engine.engine)
        self._is_awake = False
        return copied

    def close(self) -> None:
        """Free the model's weights in host memory. The model cannot be used again."""
        if self._memory is not None:
            self._memory.close()
        self._gpu_engine, self._memory, self._is_awake = None, None, False


class RunnerMemory:
    """The device memory of a runner, which is freed while its model sleeps."""

    def __init__(self, runner: GPURunner) -> None:
        self._runner = runner
        self._sleeping_memory: SleepingMemory | None = None  # keeps the weights on the host, also while awake

    def free(self) -> int:
        """Free the memory, after all results of the engine were read, and return the bytes copied to the host."""
        check_device()  # other ranks may be faster: this one may still compute
        first = self._sleeping_memory is None
        self._sleeping_memory = sleep_runner(self._runner, self._sleeping_memory)
        return self._sleeping_memory.copied_bytes if first else 0

    def restore(self) -> int:
        """Allocate the memory again, and return the bytes copied from the host.

        The KV cache is empty then, and captured steps are dropped."""
        assert self._sleeping_memory is not None, "the memory was never freed"
        free_cached_memory()
        wake_runner(self._sleeping_memory)
        return self._sleeping_memory.copied_bytes

    def close(self) -> None:
        """Free the copy of the weights on the host."""
        if self._sleeping_memory is not None:
            self._sleeping_memory.close()
        self._sleeping_memory = None


def usable_model_bytes(device_bytes: int, utilization: float = DEFAULT_UTILIZATION, other_bytes: int = 0) -> int:
    """Return how many bytes of a device's memory the models that are awake may use together.

    `other_bytes`: what other processes use. RESERVE_BYTES are kept as a reserve, which also holds what sleeping models
    leave on the device: compiled kernels and workspaces of libraries."""
    return usable_bytes(device_bytes, utilization, other_bytes) - RESERVE_BYTES


def equal_kv_share(models: Collection[Collection[MemoryPlan]], available_bytes: int) -> int | None:
    """Return the bytes of each model's KV cache on a GPU if all stay awake and share the free memory equally.

    `models`: the memory plans of each model, one for each of its ranks. Return None if some model's share could not
    hold one full context; then models should take turns instead."""
    fixed = sum(max(plan.fixed_bytes - plan.reserve - plan.states for plan in plans) for plans in models)
    part = (available_bytes - fixed) // len(models)
    # Recurrent states are part of the share, and get up to half of it.
    fits = all(part >= (2 if plan.state_slots else 1) * plan.context_kv_bytes for plans in models for plan in plans)
    return part if fits else None


def sleep_runner(runner: GPURunner, previous_sleep: SleepingMemory | None = None) -> SleepingMemory:
    """Free the device memory of a runner, and return what `wake_runner` needs to restore it.

    All results of the runner must have been read. `previous_sleep`: what this function returned when the runner last
    slept; None if it has not slept yet."""
    from torch import Tensor

    from emberline.models.sleep import iter_instances, put_to_sleep

    _drop_device_addresses(runner)
    if previous_sleep is None:
        return put_to_sleep(iter_instances(Tensor, runner.model), zeroed_tensors=runner.device_buffers())
    previous_sleep.sleep_again()
    return previous_sleep


def wake_runner(sleeping_memory: SleepingMemory) -> None:
    """Restore a runner's device memory, with an empty KV cache and without captured steps.

    If memory runs out, everything that was allocated is freed again."""
    try:
        sleeping_memory.wake(keep_host_copies=True)
    except BaseException:
        sleeping_memory.sleep_again()
        raise


def reset_prefix_cache(engine: Engine) -> None:
    """Forget all cached prefixes of an engine whose device memory was freed; those in tiers stay usable."""
    engine.reset_kv()


def _boot_or_clean_up(boot: Callable[[], BootedGPUEngine]) -> BootedGPUEngine:
    try:
        return boot()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # the frames refer to what was loaded so far
        gc.collect()
        free_cached_memory()
        raise


def check_device() -> None:
    """Raise an error if the GPU has failed and this process can no longer use it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def free_cached_memory() -> None:
    """Return memory that models freed to the device. It can then be allocated in any size."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _drop_device_addresses(runner: GPURunner) -> None:
    from emberline.kernels.cuda.fp8_weight import FP8Weight
    from emberline.kernels.cuda.linear import BF16Weight
    from emberline.models.sleep import iter_instances

    runner.drop_device_addresses()
    for plain in iter_instances(BF16Weight, runner.model):
        plain.drop_tensor_maps()
    for narrow in iter_instances(FP8Weight, runner.model):
        narrow.drop_tensor_maps()
