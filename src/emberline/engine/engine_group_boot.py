"""boot_engine_group: loads the models of a server as one EngineGroup.

On a CPU all models stay awake. On GPUs they stay awake if they fit into the memory together; otherwise they take
turns. With `models_can_sleep`, a message can also put them to sleep. Whether they fit is computed before anything is
loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest
from emberline.core.freememory import free_memory
from emberline.engine import memory
from emberline.engine.boot import boot, boot_on_gpu, runs_on_gpu, to_loaded_engine
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup
from emberline.engine.gpu.swap import SwappedEngine, equal_kv_share, reset_prefix_cache, usable_model_bytes
from emberline.engine.host_memory import check_sleeping_models, out_of_main_memory_error
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.memory_plan import MemoryPlan, format_gib
from emberline.engine.quantised_estimate import estimate_quantised_sizes
from emberline.engine.runner import TorchRunner
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.weight_dtype import DTYPE_BYTES, choose_weight_dtype
from emberline.models.weight_form import choose_weight_form, kept_weight_bytes
from emberline.models.weight_formats import QuantisedSize

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine
    from emberline.models.reader import FileReader

KV_MEMORY_FRACTION = 0.5  # largest fraction for KV caches of the main memory that weights leave free


class AlwaysAwakeEngine:
    """A model that stays awake, because all models fit into memory."""

    nbytes = 0

    def __init__(self, load: Callable[[], LoadedEngine]) -> None:
        self._load = load
        self._loaded: LoadedEngine | None = None

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


class SleepingCPUEngine(AlwaysAwakeEngine):
    """A model on a CPU that gives the memory of its KV cache back while it sleeps. Its weights stay in memory."""

    def wake(self) -> int:
        return super().wake() if self._loaded is None else 0

    def sleep(self) -> int:
        runner = self.engine.runner
        assert isinstance(runner, TorchRunner)
        runner.free_caches()
        reset_prefix_cache(self.engine)
        return 0


@dataclass(frozen=True, slots=True)
class WeightEstimate:
    """What is known about a model's weights before it is loaded."""

    config: ModelConfig
    dtype: str
    weight_bytes: int
    is_packed: bool  # whether a GPU keeps the weights in 12 bits
    quantised: tuple[QuantisedSize, ...] = ()  # matrices that a GPU keeps quantised

    @staticmethod
    def from_config(config: EngineConfig) -> WeightEstimate:
        checkpoint = Checkpoint.open(Path(config.model))
        model = ModelConfig.from_checkpoint(checkpoint)
        dtype = choose_weight_dtype(checkpoint, config.dtype, on_gpu=runs_on_gpu(config))
        if not runs_on_gpu(config):
            form = choose_weight_form(checkpoint, config.dtype, config.gpu.weights)
            if form != "plain":
                return WeightEstimate(model, dtype, kept_weight_bytes(checkpoint, model, form), is_packed=False)
        packed = runs_on_gpu(config) and memory.uses_packed_weights(checkpoint, config, dtype, model)
        both = runs_on_gpu(config) and config.gpu.weights == "both"
        quantised = estimate_quantised_sizes(checkpoint, model, config, dtype) if runs_on_gpu(config) else []
        size = memory.weight_bytes(model, DTYPE_BYTES[dtype], packed=packed, both=both, quantised=quantised)
        return WeightEstimate(model, dtype, size, packed, tuple(quantised))


def boot_engine_group(
    configs: Mapping[str, EngineConfig], time_sharing: TimeSharingConfig, reader: FileReader | None = None
) -> tuple[EngineGroup, dict[str, LoadedEngine]]:
    """Load all models; return their group, and the loaded engine of each model by name.

    Raises ModelError if the models do not fit. `reader`: a process that already reads the files of the last model in
    `configs`, which is loaded first."""
    readers = {list(configs)[-1]: reader}
    loaded: dict[str, LoadedEngine] = {}
    on_gpu = runs_on_gpu(next(iter(configs.values())))
    is_alone = len(configs) == 1 and not time_sharing.models_can_sleep
    if time_sharing.models_can_sleep or (on_gpu and not is_alone):
        configs = {name: _without_transfer(config) for name, config in configs.items()}
    has_ranks = any(config.parallel.num_ranks > 1 for config in configs.values())
    if on_gpu and has_ranks and not is_alone:
        if reader is not None:
            reader.close()  # it reads whole files, and each rank reads only its part
        from emberline.engine.ranks.rank_group_boot import boot_rank_engine_group  # imported if needed

        settings = {name: config.with_gpu_defaults() for name, config in configs.items()}
        return boot_rank_engine_group(settings, time_sharing)
    if not on_gpu and time_sharing.models_can_sleep:
        for config in configs.values():
            _check_can_sleep_on_cpu(config)
    if not on_gpu or is_alone:
        kv_room = None if len(configs) == 1 else kv_bytes_per_model(configs, free_memory())

        def load(name: str) -> LoadedEngine:
            loaded[name] = boot(configs[name], readers.get(name), default_kv_bytes=kv_room)
            return loaded[name]

        engine_class = SleepingCPUEngine if time_sharing.models_can_sleep else AlwaysAwakeEngine
        return EngineGroup({name: engine_class(partial(load, name)) for name in configs}, 0, time_sharing), loaded
    from emberline.engine.gpu.device import CudaDevice, measure_memory
    from emberline.kernels.gpu_choice import name_kernels

    def load_on_gpu(name: str, settings: EngineConfig) -> BootedGPUEngine:
        booted = boot_on_gpu(settings, readers.get(name))
        loaded[name] = to_loaded_engine(booted)
        return booted

    device = CudaDevice(next(iter(configs.values())).gpu.kernels)
    total, others = measure_memory(device)
    members, space = plan_time_sharing(
        *(configs, total, free_memory(), load_on_gpu),
        other_bytes=others,
        can_sleep=time_sharing.models_can_sleep,
        kernels=name_kernels(device.torch_device),
    )
    max_waiting = max(config.scheduler.max_waiting for config in configs.values())
    return EngineGroup(members, space, time_sharing, max_waiting=max_waiting), loaded


def kv_bytes_per_model(configs: Mapping[str, EngineConfig], free_bytes: int) -> int:
    """Return the size in bytes of each model's KV cache on a CPU, which is the same for all models.

    Raises ModelError if the models do not fit into `free_bytes`."""
    weights = {
        name: WeightEstimate.from_config(config).weight_bytes // config.parallel.nodes
        for name, config in configs.items()
    }
    configured = sum(
        (config.kv_cache.kv_memory or 0) * config.parallel.num_ranks // config.parallel.nodes
        + config.tiers.kv_host_memory
        for config in configs.values()
    )
    left = free_bytes - sum(weights.values()) - configured
    if left < 0:
        raise out_of_main_memory_error(
            weights, f" and {format_gib(configured)} GiB of KV blocks" if configured else "", free_bytes
        )
    return int(left * KV_MEMORY_FRACTION) // len(configs)


def plan_time_sharing(
    configs: Mapping[str, EngineConfig],
    device_bytes: int,
    free_host_bytes: int,
    load: Callable[[str, EngineConfig], BootedGPUEngine],
    other_bytes: int = 0,
    *,
    can_sleep: bool = False,
    kernels: str = "",
) -> tuple[dict[str, SwappedEngine], int]:
    """Plan the memory of models that share a GPU with `device_bytes` on a host with `free_host_bytes`.

    Return the models by name, not loaded yet, and the bytes that all models that are awake may use together. `load`:
    loads a model, given its name and its settings. `other_bytes`: GPU memory that other processes use. `can_sleep`:
    models may have to sleep although they fit. `kernels`: those of the GPU, hopper or portable; empty: not known.
    Raises ModelError if the models do not fit, InvalidRequest if one has a draft model."""
    for name, config in configs.items():
        if config.speculation.uses_draft_model:
            message = f"speculate of the model {name!r} is {config.speculation.speculate}, but models that share a GPU"
            raise InvalidRequest(f"{message} cannot have draft models", param="speculate", hint="serve it alone")
    weighed = {name: WeightEstimate.from_config(config) for name, config in configs.items()}
    settings = {name: config.with_gpu_defaults() for name, config in configs.items()}

    def plan_all_models() -> dict[str, MemoryPlan]:
        return {
            name: memory.plan_engine_memory(
                w.config,
                settings[name],
                device_bytes,
                w.dtype,
                packed=w.is_packed,
                quantised=w.quantised,
                other_bytes=other_bytes,
                kernels=kernels,
            )
            for name, w in weighed.items()
        }

    planned = plan_all_models()
    utilization = min(s.gpu.gpu_memory_utilization for s in settings.values())
    space = usable_model_bytes(device_bytes, utilization, other_bytes)
    if all(s.kv_cache.kv_memory is None for s in settings.values()):
        part = equal_kv_share([[plan] for plan in planned.values()], space)
        if part is not None:
            for name, plan in planned.items():
                block = plan.kv_bytes // plan.kv_blocks
                settings[name] = settings[name].with_settings(kv_memory=part // block * block)
            planned = plan_all_models()
    members = {name: SwappedEngine(plan, partial(load, name, settings[name])) for name, plan in planned.items()}
    weights = {name: w.weight_bytes for name, w in weighed.items()}
    kv_bytes = sum(config.tiers.kv_host_memory for config in configs.values())
    sleeps = can_sleep or sum(member.nbytes for member in members.values()) > space
    check_sleeping_models(weights, kv_bytes, free_host_bytes, sleeps=sleeps)
    return members, space


def _without_transfer(config: EngineConfig) -> EngineConfig:
    """Return the settings with KV transfers off, since a sleeping model cannot send KV blocks to peers.

    Raises InvalidRequest if the settings require transfers."""
    if config.transfer is not None and config.transfer.required:
        hint = "serve one model per worker, or use --role both"
        message = "models that share a GPU cannot exchange KV blocks with other workers"
        raise InvalidRequest(message, param="transfer", hint=hint)
    return replace(config, transfer=None)


def _check_can_sleep_on_cpu(config: EngineConfig) -> None:
    """Raise InvalidRequest if a model with these settings cannot sleep."""
    if config.parallel.num_ranks > 1:
        message = f"can_sleep is set, but the model has {config.parallel.num_ranks} ranks on CPUs; it must have one"
        raise InvalidRequest(message, param="can_sleep", hint="drop --can-sleep, or --tp and --pp, or use GPUs")
