"""boot_fleet: the models of a server become a Fleet. On a CPU all of them stay awake; on a GPU too, if its memory
allows it, and otherwise they take turns. What fits is known before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.config import EngineConfig, FleetConfig, GPUConfig
from emberline.core.errors import InvalidRequest, ModelError
from emberline.core.freememory import free_memory
from emberline.engine import memory
from emberline.engine.boot import Loaded, boot, boot_on_gpu, gpu_settings, loaded_on_gpu, on_gpu
from emberline.engine.engine import Engine
from emberline.engine.fleet import Fleet
from emberline.engine.gpu.swap import Swapped, room, shared_kv
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import Booted
    from emberline.models.reader import Reader

FOR_KV = 0.5  # of what weights leave in a CPU's memory, at most


class Settled:
    """A model that stays awake: nobody needs its memory."""

    nbytes = 0

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load = load
        self._loaded: Loaded | None = None

    @property
    def engine(self) -> Engine:
        assert self._loaded is not None
        return self._loaded.engine

    @property
    def idle(self) -> bool:
        return self._loaded is None or self._loaded.engine.idle

    def wake(self) -> int:
        self._loaded = self._load()
        return self._loaded.weight_bytes

    def sleep(self) -> int:
        raise AssertionError("nobody needs its memory")


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is known of a model before it is loaded."""

    config: ModelConfig
    dtype: str
    weight_bytes: int
    packed: bool  # whether a GPU keeps them in 12 bits

    @staticmethod
    def of(config: EngineConfig) -> Weighed:
        checkpoint = Checkpoint.open(Path(config.model))
        model = ModelConfig.of(checkpoint)
        dtype = memory.weight_dtype(checkpoint, config.dtype)
        packed = on_gpu(config) and memory.packs(checkpoint, gpu_settings(config), dtype)
        both = on_gpu(config) and config.weights == "both"
        size = memory.weight_bytes(model, memory.DTYPE_BYTES[dtype], packed=packed, both=both)
        return Weighed(model, dtype, size, packed)


def boot_fleet(
    configs: Mapping[str, EngineConfig], rules: FleetConfig, reader: Reader | None = None
) -> tuple[Fleet, dict[str, Loaded]]:
    """`reader`: of the last one's files, since the last is loaded first."""
    readers = {list(configs)[-1]: reader}
    loaded: dict[str, Loaded] = {}
    if len(configs) == 1 or not on_gpu(next(iter(configs.values()))):
        kv_room = None if len(configs) == 1 else room_for_kv(configs, free_memory())

        def load(name: str) -> Loaded:
            loaded[name] = boot(configs[name], readers.get(name), kv_room=kv_room)
            return loaded[name]

        return Fleet({name: Settled(partial(load, name)) for name in configs}, 0, rules), loaded
    from emberline.engine.gpu.boot import device_memory
    from emberline.engine.gpu.device import Cuda

    configs = {name: _without_transfer(config) for name, config in configs.items()}

    def load_on_gpu(name: str, settings: GPUConfig) -> Booted:
        booted = boot_on_gpu(configs[name], settings, readers.get(name))
        loaded[name] = loaded_on_gpu(booted)
        return booted

    members, space = taking_turns(configs, device_memory(Cuda().torch), free_memory(), load_on_gpu)
    return Fleet(members, space, rules), loaded


def room_for_kv(configs: Mapping[str, EngineConfig], free: int) -> int:
    """Bytes for each model's keys and values, where all stay in a CPU's memory."""
    weights = {name: Weighed.of(config).weight_bytes for name, config in configs.items()}
    asked = sum((config.kv_memory or 0) + config.kv_host_memory for config in configs.values())
    left = free - sum(weights.values()) - asked
    if left < 0:
        raise _too_much(weights, f" and {memory.gib(asked)} GiB of keys and values" if asked else "", free)
    return int(left * FOR_KV) // len(configs)


def taking_turns(
    configs: Mapping[str, EngineConfig], total: int, free: int, load: Callable[[str, GPUConfig], Booted]
) -> tuple[dict[str, Swapped], int]:
    """Of a GPU with so much memory, on a host with so much free; and the bytes for all that are awake together."""
    weighed = {name: Weighed.of(config) for name, config in configs.items()}
    settings = {name: gpu_settings(config) for name, config in configs.items()}

    def plans() -> dict[str, memory.MemoryPlan]:
        return {
            name: memory.plan_for(w.config, settings[name], total, w.dtype, packed=w.packed)
            for name, w in weighed.items()
        }

    planned, space = plans(), room(total)
    if all(s.kv_memory is None for s in settings.values()):
        part = shared_kv(planned.values(), space)
        if part is not None:
            for name, plan in planned.items():
                block = plan.kv_bytes // plan.kv_blocks
                settings[name] = replace(settings[name], kv_memory=part // block * block)
            planned = plans()
    members = {name: Swapped(plan, partial(load, name, settings[name])) for name, plan in planned.items()}
    weights = {name: w.weight_bytes for name, w in weighed.items()}
    kept = sum(config.kv_host_memory for config in configs.values())
    sleeps = sum(member.nbytes for member in members.values()) > space
    if sleeps * sum(weights.values()) + kept > free:
        besides = f" and {memory.gib(kept)} GiB of keys and values" if kept else ""
        raise _too_much(weights, (", which main memory must hold while they sleep" if sleeps else "") + besides, free)
    return members, space


def _without_transfer(config: EngineConfig) -> EngineConfig:
    """While a model sleeps, nobody can read its blocks; and when it wakes, they lie elsewhere."""
    if config.transfer is not None and config.transfer.required:
        hint = "serve one model with each worker, or with --role both"
        raise InvalidRequest("models that share a GPU exchange no blocks with others", param="transfer", hint=hint)
    return replace(config, transfer=None)


def _too_much(weights: Mapping[str, int], besides: str, free: int) -> ModelError:
    parts = ", ".join(f"{name} {memory.gib(size)}" for name, size in weights.items())
    return ModelError(
        f"the models do not fit: {memory.gib(sum(weights.values()))} GiB of weights ({parts}){besides}; "
        f"{memory.gib(free)} GiB of memory are free",
        hint="serve fewer models, or smaller ones",
    )
