"""boot_engine_group: loads the models of a server as one EngineGroup.

On a CPU all models stay awake. On a GPU they do if they fit into its memory together; otherwise they share it over
time. Whether they fit is computed before anything is loaded."""

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

FOR_KV = 0.5  # largest fraction for KV caches of the main memory that weights leave free


class Settled:
    """A model that stays awake, because all models fit into memory."""

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
        raise AssertionError("a model that stays awake was put to sleep")


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is known about a model's weights before it is loaded."""

    config: ModelConfig
    dtype: str
    weight_bytes: int
    packed: bool  # whether a GPU keeps the weights in 12 bits

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
    """Load all models and return their group and each loaded engine.

    Raises ModelError if they do not fit.

    `reader`: a started reader of the files of the last model, which is loaded first."""
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
    """Return the bytes of each model's KV cache on a CPU. Raises ModelError if the models do not fit."""
    weights = {name: Weighed.of(config).weight_bytes for name, config in configs.items()}
    configured = sum((config.kv_memory or 0) + config.kv_host_memory for config in configs.values())
    left = free - sum(weights.values()) - configured
    if left < 0:
        raise _too_much(weights, f" and {memory.gib(configured)} GiB of KV blocks" if configured else "", free)
    return int(left * FOR_KV) // len(configs)


def taking_turns(
    configs: Mapping[str, EngineConfig], total: int, free: int, load: Callable[[str, GPUConfig], Booted]
) -> tuple[dict[str, Swapped], int]:
    """Plan the memory of models that share a GPU with `device_bytes` on a host with `free_host_bytes`.

    Return the models, which are not loaded yet, and the bytes for all that are awake at the same time. Raises
    ModelError if the models do not fit."""
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
        besides = f" and {memory.gib(kept)} GiB of KV blocks" if kept else ""
        reason = ", which main memory must hold while they sleep" if sleeps else ""
        raise _too_much(weights, reason + besides, free)
    return members, space


def _without_transfer(config: EngineConfig) -> EngineConfig:
    """Return the settings without KV transfers, which need a model that is always awake.

    Raises InvalidRequest if transfers are required."""
    if config.transfer is not None and config.transfer.required:
        hint = "serve one model with each worker, or with --role both"
        message = "models that share a GPU cannot exchange KV blocks with other workers"
        raise InvalidRequest(message, param="transfer", hint=hint)
    return replace(config, transfer=None)


def _too_much(weights: Mapping[str, int], besides: str, free: int) -> ModelError:
    parts = ", ".join(f"{name} {memory.gib(size)}" for name, size in weights.items())
    return ModelError(
        f"the models do not fit into main memory: they have {memory.gib(sum(weights.values()))} GiB of weights "
        f"({parts}){besides}; {memory.gib(free)} GiB are free",
        hint="serve fewer or smaller models",
    )
