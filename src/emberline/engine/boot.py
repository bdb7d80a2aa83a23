"""boot: builds an Engine from an EngineConfig, on a GPU or on the CPU.

The use of memory is computed before the model is loaded, instead of being measured in a trial run."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.cpus import core_count
from emberline.core.engine_config import EngineConfig
from emberline.core.freememory import free_memory
from emberline.engine.boot_checks import check_cpu_settings, check_host_memory
from emberline.engine.engine import Engine
from emberline.engine.engine_components import (
    choose_kv_dtype,
    make_grammar_compiler,
    make_host_tier,
    make_tiers,
    max_kv_tokens,
    open_transfer_endpoint,
)
from emberline.engine.gpu.device import can_use_gpu, warn_of_unused_gpu
from emberline.engine.group_choice import choose_groups
from emberline.engine.loaded_engine import LoadedEngine, dtype_name, full_context, numerics_of
from emberline.engine.paced_executor import pace_executor
from emberline.engine.runner import TorchRunner, allocate_cache
from emberline.engine.speculation.draft_cache import make_draft_cache, share_cache_memory
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.engine.state_memory import allocate_states
from emberline.engine.work_executor import WorkExecutor
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.cache import KVShape
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import (
    SameHostAccess,
    TransferEndpoint,
)
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import DTYPES, load_checkpoint
from emberline.models.weight_dtype import check_requested_dtype, stored_weight_format
from emberline.models.weight_form import check_requested_weights, choose_weight_form
from emberline.models.weights import Weights

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine
    from emberline.engine.gpu.region import DeviceRegion
    from emberline.models.reader import FileReader


def boot(
    config: EngineConfig, reader: FileReader | None = None, *, default_kv_bytes: int | None = None
) -> LoadedEngine:
    """Load the model and return its engine. Raises EmberlineError if settings or model are not usable.

    `reader`: for a GPU, a process that has been reading the checkpoint's files since before torch was imported.
    `default_kv_bytes`: size of the KV cache on a CPU if the config sets none; None: half of the free memory."""
    if runs_on_gpu(config) and config.parallel.num_ranks > 1:
        from emberline.engine.ranks import device_boot  # imported if needed, to start sooner

        if reader is not None:
            reader.close()  # it reads whole files, and each rank reads only its part
        config = config.with_gpu_defaults()
        if config.parallel.launcher == "ray":
            return device_boot.boot_device_ranks_on_ray(config.with_settings(device="cuda"))
        return device_boot.boot_device_ranks(config)
    if runs_on_gpu(config):
        return to_loaded_engine(boot_on_gpu(config.with_gpu_defaults(), reader))
    if config.device == "auto":
        warn_of_unused_gpu(config.gpu.kernels)
    if reader is not None:
        reader.close()
    if config.parallel.num_ranks > 1:
        from emberline.engine.ranks.boot import boot_ranks
        from emberline.engine.ranks.ray_boot import boot_on_ray

        if config.parallel.launcher == "ray":
            check_cpu_settings(config)
            boot_node = partial(boot_ranks, default_kv_bytes=default_kv_bytes)
            return boot_on_ray(config, "CPU", lambda settings, nodes: boot_node(settings, launcher=nodes))
        return boot_ranks(config, default_kv_bytes)
    return _boot_on_cpu(config, default_kv_bytes)


def runs_on_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and can_use_gpu(config.gpu.kernels))


def boot_on_gpu(config: EngineConfig, reader: FileReader | None) -> BootedGPUEngine:
    """Load the model on one GPU. `config`: the result of `EngineConfig.with_gpu_defaults`."""
    from emberline.engine.gpu import ipc
    from emberline.engine.gpu.boot import boot_from_checkpoint

    assert config.parallel.num_ranks == 1
    check_requested_dtype(config.dtype, on_gpu=True)
    check_requested_weights(config.gpu.weights, on_gpu=True)
    check_host_memory(config)

    def load_library() -> ctypes.CDLL | None:
        return ops.start_backend(threads=1).library

    def build_tiers(layout: str, shape: KVShape, snapshot_blocks: int) -> TierStack:
        host = make_host_tier(config, shape.block_bytes, snapshot_blocks)
        return make_tiers(config, layout, shape.block_bytes, shape.dtype, load_library(), host, snapshot_blocks)

    def open_endpoint(region: DeviceRegion) -> TransferEndpoint | None:
        assert config.transfer is not None
        return open_transfer_endpoint(config, config.transfer, region, ipc.make_ipc_transport(region), load_library())

    return boot_from_checkpoint(
        Path(config.model),
        config,
        dtype=DTYPES[config.dtype],
        reader=reader,
        make_compiler=make_grammar_compiler,
        build_tiers=build_tiers if config.tiers.has_tiers else None,
        build_endpoint=open_endpoint if config.transfer is not None else None,
    )


def to_loaded_engine(booted: BootedGPUEngine) -> LoadedEngine:
    kernels = ops.selected_gpu_kernels().name
    device = "cuda-portable" if kernels == "portable" else "cuda"  # their kernels round differently
    return LoadedEngine(
        engine=booted.engine,
        max_context=booted.engine.max_context,
        kv_tokens=booted.plan.kv_tokens,
        weight_bytes=booted.runner.model.weight_bytes,
        kv_bytes=booted.plan.kv_bytes + booted.plan.states,
        kernels=f"{kernels} ({torch.cuda.get_device_name()})",
        seconds=dict(booted.seconds),
        device="cuda",
        kv_dtype=dtype_name(booted.runner.cache.shape.dtype),
        numerics=numerics_of(
            booted.runner.model, booted.runner.cache, f"{booted.weights}{'-exact' * booted.runner.exact}", device
        ),
        stored_dtype=booted.stored_dtype,
        full_context=full_context(booted.runner.model),
    )


def _boot_on_cpu(config: EngineConfig, default_kv_bytes: int | None) -> LoadedEngine:
    began = time.perf_counter()
    check_cpu_settings(config)
    check_host_memory(config)
    threads = config.threads or core_count()
    backend = ops.start_backend(threads=threads)
    # torch's threads spin for a while after each op, on the cores that our kernels need next: one is enough for torch.
    torch.set_num_threads(1 if backend.library else threads)
    kernels = time.perf_counter()
    checkpoint = Checkpoint.open(Path(config.model))
    form = choose_weight_form(checkpoint, config.dtype, config.gpu.weights)
    model = load_checkpoint(checkpoint, config.dtype, config.requested_context, form)
    loaded = time.perf_counter()
    scheduler = config.scheduler.for_model(model.context)
    draft_model = _load_draft_model(config, model)
    groups = choose_groups(model.config.windows, model.context, model.config.parts.attention.state_layers)
    chosen_bytes = config.kv_cache.kv_memory or default_kv_bytes
    chosen_bytes = chosen_bytes or (free_memory() - config.tiers.kv_host_memory) // 2
    memory_bytes = share_cache_memory(chosen_bytes, model.config, draft_model, groups)
    states = allocate_states(model.config, memory_bytes, scheduler.max_running, config.speculation)
    cache = allocate_cache(
        model,
        groups=groups,
        dtype=choose_kv_dtype(config.kv_cache.kv_dtype, model.dtype),
        block_size=scheduler.block_size,
        memory_bytes=memory_bytes - (0 if states is None else states.num_bytes),
        max_tokens=max_kv_tokens(config, model.context),
        uses_shared_memory=config.transfer is not None,
    )
    eos = frozenset(model.config.eos)
    draft_runner = None if draft_model is None else DraftRunner(draft_model, make_draft_cache(draft_model, cache))
    make_compiler = partial(make_grammar_compiler, Path(config.model), model.config)
    executor = pace_executor(WorkExecutor(model, cache, groups, states), config.step_costs)
    runner = TorchRunner(model, cache, eos, make_compiler, draft_runner, groups, states, executor)
    tiers, endpoint, pages = None, None, runner.pages_per_slot
    if config.tiers.has_tiers:
        block_bytes, dtype = cache.shape.block_bytes, cache.shape.dtype
        host = make_host_tier(config, block_bytes, pages)
        tiers = make_tiers(config, runner.layout, block_bytes, dtype, backend.library, host, pages)
    if config.transfer is not None and (segment := cache.segment) is not None:
        endpoint = open_transfer_endpoint(
            config, config.transfer, segment.region, SameHostAccess.via_shared_memory(segment), backend.library
        )
    drafter = make_drafter(config.speculation, lambda: backend.library)
    engine = Engine(scheduler, runner, tiers=tiers, transfer_endpoint=endpoint, drafter=drafter)
    planned = time.perf_counter()
    return LoadedEngine(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=cache.num_blocks // len(groups.windows) * scheduler.block_size,  # of any requests, also short ones
        weight_bytes=model.weight_bytes,
        kv_bytes=cache.num_blocks * cache.shape.block_bytes + (0 if states is None else states.num_bytes),
        kernels=str(backend),
        seconds={"kernels": kernels - began, "weights": loaded - kernels, "cache": planned - loaded},
        device="cpu",
        kv_dtype=dtype_name(cache.shape.dtype),
        numerics=numerics_of(model, cache, form, "cpu"),
        stored_dtype=stored_weight_format(checkpoint),
        full_context=full_context(model),
    )


def _load_draft_model(config: EngineConfig, model: DecoderModel) -> DraftModel | None:
    if config.speculation.method != "mtp" and config.speculation.draft_source is None:
        return None
    from emberline.engine.speculation.draft_loader import load_draft_model

    dtype = torch.bfloat16 if model.dtype is torch.float16 else model.dtype

    def open_weights(checkpoint: Checkpoint) -> Weights:
        return Weights(checkpoint, dtype, form=choose_weight_form(checkpoint, config.dtype))

    return load_draft_model(config.speculation, model, Path(config.model), open_weights)
