"""boot: builds an Engine from an EngineConfig, on a GPU or the CPU.

Memory is computed in advance, not probed."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.config import EngineConfig, GPUConfig, SchedulerConfig, TransferConfig, core_count
from emberline.core.errors import InvalidRequest
from emberline.core.freememory import free_memory
from emberline.core.numerics import Numerics
from emberline.engine import memory
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import has_hopper
from emberline.engine.runner import TorchRunner, allocate_cache
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.checksum import select_crc
from emberline.kv.codec import select_kv_codec
from emberline.kv.confine import LOOPBACK, resolve_ipv4_address
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.remote import RemoteTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.tiers.storeclient import StoreListenAddress
from emberline.kv.transfer.endpoint import (
    STORE_PORT_OFFSET,
    SameHostAccess,
    TransferEndpoint,
    TransferOptions,
    port_at_offset,
)
from emberline.kv.transfer.region import Region
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.loader import DTYPES, load_decoder

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine
    from emberline.engine.gpu.region import DeviceRegion
    from emberline.engine.grammar import GrammarCompiler
    from emberline.models.reader import FileReader

STAGING_BLOCKS = 128  # buffers for blocks on their way to disk and back, if kv_host_memory is 0
DEFAULT_KV_CONTEXTS = 8  # full contexts that the CPU's cache holds by default, if memory allows


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded engine, its properties, and the seconds of each phase of loading."""

    engine: Engine
    max_context: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    kernels: str
    seconds: dict[str, float]
    device: str
    kv_dtype: str
    numerics: Numerics


def boot(
    config: EngineConfig, reader: FileReader | None = None, *, default_kv_bytes: int | None = None
) -> LoadedEngine:
    """Load the model and return its engine.

    Raises EmberlineError if the settings or the model are not usable.

    `reader`: a reader of the checkpoint's files that was started before torch was imported, for a GPU.
    `default_kv_bytes`: KV cache on the CPU if the config sets none; None: half of the free memory."""
    if runs_on_gpu(config):
        return loaded_from_gpu(boot_on_gpu(config, gpu_settings(config), reader))
    if reader is not None:
        reader.close()
    return _boot_on_cpu(config, default_kv_bytes)


def runs_on_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and has_hopper())


def gpu_settings(config: EngineConfig) -> GPUConfig:
    if config.threads:
        raise InvalidRequest(
            f"threads is {config.threads}, but only an engine on the CPU uses it",
            param="threads",
            hint="drop --threads",
        )
    overrides = {
        name: value
        for name in ("max_batch_tokens", "max_running", "block_size")
        if (value := getattr(config, name)) is not None
    }
    return GPUConfig(
        max_waiting=config.max_waiting,
        max_context=config.max_context,
        prefix_cache=config.prefix_cache,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        kv_memory=config.kv_memory,
        itl_target_ms=config.itl_target_ms,
        itl_tail=config.itl_tail,
        tiers=config.has_tiers,
        transfer=config.transfer is not None,
        **overrides,
    )


def boot_on_gpu(config: EngineConfig, settings: GPUConfig, reader: FileReader | None) -> BootedGPUEngine:
    from emberline.engine.gpu import ipc
    from emberline.engine.gpu.boot import boot_from_checkpoint

    _check_host_memory(config)

    def library() -> ctypes.CDLL | None:
        return ops.start_backend(threads=1).library

    def make_tiers(layout: str, shape: KVShape) -> TierStack:
        return _make_tiers(config, layout, shape, library())

    def open_endpoint(region: DeviceRegion) -> TransferEndpoint | None:
        assert config.transfer is not None
        return _open_transfer_endpoint(config, config.transfer, region, ipc.make_ipc_transport(region), library())

    return boot_from_checkpoint(
        Path(config.model),
        settings,
        dtype=_parse_dtype("dtype", config.dtype),
        reader=reader,
        compiler=_make_compiler,
        tiers=make_tiers if settings.tiers else None,
        endpoint=open_endpoint if settings.transfer else None,
    )


def loaded_from_gpu(booted: BootedGPUEngine) -> LoadedEngine:
    return LoadedEngine(
        engine=booted.engine,
        max_context=booted.engine.max_context,
        kv_tokens=booted.plan.kv_tokens,
        weight_bytes=booted.runner.model.weight_bytes,
        kv_bytes=booted.plan.kv_bytes,
        kernels=f"cuda ({torch.cuda.get_device_name()})",
        seconds=dict(booted.seconds),
        device="cuda",
        kv_dtype=_dtype_name(booted.runner.cache.shape.dtype),
        numerics=_numerics_of(booted.runner.model, booted.runner.cache, booted.weights, "cuda"),
    )


def _boot_on_cpu(config: EngineConfig, default_kv_bytes: int | None) -> LoadedEngine:
    began = time.perf_counter()
    if config.itl_target_ms is not None:
        raise InvalidRequest(
            "itl_target_ms is set, but only an engine on a GPU supports it",
            param="itl_target_ms",
            hint="drop --itl-target-ms",
        )
    memory.reject_packed_weights(config.weights)
    _check_host_memory(config)
    _check_block_size(config)
    threads = config.threads or core_count()
    backend = ops.start_backend(threads=threads)
    # torch's threads spin for a while after each op, on the cores that our kernels need next: one is enough for torch.
    torch.set_num_threads(1 if backend.library else threads)
    kernels = time.perf_counter()
    model = load_decoder(Path(config.model), config.dtype, config.max_context)
    loaded = time.perf_counter()
    defaults = SchedulerConfig()
    running, block = config.max_running or defaults.max_running, config.block_size or defaults.block_size
    cache = allocate_cache(
        model,
        dtype=_parse_dtype("kv_dtype", config.kv_dtype) or model.dtype,
        block_size=block,
        memory=config.kv_memory or default_kv_bytes or (free_memory() - config.kv_host_memory) // 2,
        max_tokens=_max_kv_tokens(config, running, model.context),
        shared=config.transfer is not None,
    )
    eos = frozenset(model.config.eos)
    runner = TorchRunner(model, cache, eos, lambda: _make_compiler(Path(config.model), model.config))
    scheduler = SchedulerConfig(
        block_size=block,
        max_batch_tokens=max(config.max_batch_tokens or defaults.max_batch_tokens, running),
        max_running=running,
        max_waiting=config.max_waiting,
        max_context=model.context,
        prefix_cache=config.prefix_cache,
    )
    tiers = _make_tiers(config, runner.layout, cache.shape, backend.library) if config.has_tiers else None
    endpoint = None
    if config.transfer is not None and (segment := cache.segment) is not None:
        endpoint = _open_transfer_endpoint(
            config, config.transfer, segment.region, SameHostAccess.via_shared_memory(segment), backend.library
        )
    engine = Engine(scheduler, runner, tiers=tiers, transfer_endpoint=endpoint)
    planned = time.perf_counter()
    return LoadedEngine(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=cache.num_blocks * block,
        weight_bytes=model.weight_bytes,
        kv_bytes=cache.num_blocks * cache.shape.block_bytes,
        kernels=str(backend),
        seconds={"kernels": kernels - began, "weights": loaded - kernels, "cache": planned - loaded},
        device="cpu",
        kv_dtype=_dtype_name(cache.shape.dtype),
        numerics=_numerics_of(model, cache, "plain", "cpu"),
    )


def _numerics_of(model: DecoderModel, cache: KVCache, weights: str, device: str) -> Numerics:
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (model.dtype, cache.shape.dtype))
    return Numerics(model.fingerprint.partition("-")[0], dtype, weights, kv_dtype, device)


def _check_block_size(config: EngineConfig) -> None:
    if config.block_size is not None and config.block_size not in (8, 16, 32) and config.block_size % 64:
        message = f"block_size is {config.block_size}; on a CPU it must be 8, 16, 32 or a multiple of 64"
        raise InvalidRequest(message, param="block_size")


def _check_host_memory(config: EngineConfig) -> None:
    """Raise InvalidRequest if kv_host_memory is more than the free memory.

    A GPU's host tier is pinned, so all of it is allocated at the start."""
    if config.kv_host_memory > (free := free_memory()):
        raise InvalidRequest(
            f"kv_host_memory is {memory.format_gib(config.kv_host_memory)} GiB; "
            f"{memory.format_gib(free)} GiB of memory are free",
            param="kv_host_memory",
            hint="lower --kv-host-memory",
        )


def _make_tiers(config: EngineConfig, layout: str, shape: KVShape, library: ctypes.CDLL | None) -> TierStack:
    size, crc = shape.block_bytes, select_crc(library)
    codec = select_kv_codec(config.kv_codec, library, str(shape.dtype))
    host = HostTier(size, config.kv_host_memory or STAGING_BLOCKS * buffer_bytes_for(size), config.kv_policy)
    below: list[Tier] = []
    if config.kv_disk is not None and config.kv_disk_size is not None:
        directory, quota, policy = Path(config.kv_disk), config.kv_disk_size, config.kv_policy
        below.append(
            DiskTier(directory, layout, size, quota, policy=policy, crc=crc, codec=codec, coding=config.kv_codec)
        )
    if config.kv_store is not None:
        memory = config.kv_store_memory
        address = StoreListenAddress(config.kv_mooncake_host, port_at_offset(config.kv_port, STORE_PORT_OFFSET))
        tier = RemoteTier(config.kv_store, layout, size, memory, address, crc=crc, codec=codec, coding=config.kv_codec)
        below.append(tier)
    return TierStack(host, below)


def _open_transfer_endpoint(
    config: EngineConfig,
    transfer: TransferConfig,
    region: Region,
    same_host: SameHostAccess | None,
    library: ctypes.CDLL | None,
) -> TransferEndpoint | None:
    codec = select_kv_codec(config.kv_codec, library, region.layout.dtype)
    mooncake = (
        resolve_ipv4_address(config.kv_mooncake_host or LOOPBACK, "kv_mooncake_host") if config.kv_mooncake else None
    )
    options = TransferOptions(select_crc(library), codec, config.kv_codec == "uw", mooncake, config.checksums_blocks)
    try:
        return TransferEndpoint.open(transfer, region, same_host, options)
    except OSError as error:
        if transfer.required:
            address = f"{transfer.host}:{transfer.port}"
            raise InvalidRequest(
                f"KV transfers cannot listen at {address}: {error}", param="transfer", hint="choose another --kv-port"
            ) from error
        return None


def _make_compiler(directory: Path, config: ModelConfig) -> GrammarCompiler:
    from emberline.engine.grammar import GrammarCompiler

    return GrammarCompiler(directory / "tokenizer.json", config.vocab, sorted(set(config.eos)))


def _parse_dtype(field: str, name: str) -> torch.dtype | None:
    if name not in DTYPES:
        raise InvalidRequest(f"{field} is {name!r}; it must be one of {', '.join(DTYPES)}", param=field)
    return DTYPES[name]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_kv_tokens(config: EngineConfig, running: int, context: int) -> int:
    if config.kv_memory is not None:
        return 1 << 40  # kv_memory is set: use all of it
    return min(DEFAULT_KV_CONTEXTS, running) * context
