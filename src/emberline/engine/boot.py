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
from emberline.engine.runner import TorchRunner, plan_cache
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.checksum import crc_of
from emberline.kv.codec import codec_of
from emberline.kv.confine import LOOPBACK, address_of
from emberline.kv.tiers.base import Tier, buffer_size
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.remote import RemoteTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.tiers.storeclient import StorePlace
from emberline.kv.transfer.dock import STORE_PORT, Dock, Near, Ways, port_at
from emberline.kv.transfer.region import Region
from emberline.models.config import ModelConfig
from emberline.models.decoder import Decoder
from emberline.models.loader import DTYPES, load

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import Booted
    from emberline.engine.gpu.region import DeviceRegion
    from emberline.engine.grammar import GrammarCompiler
    from emberline.models.reader import Reader

STAGING_BLOCKS = 128  # buffers for blocks on their way to disk and back, if kv_host_memory is 0
CONTEXTS_KEPT = 8  # full contexts that the CPU's cache holds by default, if memory allows


@dataclass(frozen=True, slots=True)
class Loaded:
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


def boot(config: EngineConfig, reader: Reader | None = None, *, kv_room: int | None = None) -> Loaded:
    """Load the model and return its engine.

    Raises EmberlineError if the settings or the model are not usable.

    `reader`: a reader of the checkpoint's files that was started before torch was imported, for a GPU.
    `default_kv_bytes`: KV cache on the CPU if the config sets none; None: half of the free memory."""
    if on_gpu(config):
        return loaded_on_gpu(boot_on_gpu(config, gpu_settings(config), reader))
    if reader is not None:
        reader.close()
    return _boot_on_cpu(config, kv_room)


def on_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and has_hopper())


def gpu_settings(config: EngineConfig) -> GPUConfig:
    if config.threads:
        raise InvalidRequest(
            f"threads is {config.threads}, but only an engine on the CPU uses it",
            param="threads",
            hint="drop --threads",
        )
    given = {
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
        **given,
    )


def boot_on_gpu(config: EngineConfig, settings: GPUConfig, reader: Reader | None) -> Booted:
    from emberline.engine.gpu import ipc
    from emberline.engine.gpu.boot import boot_from

    _check_host_memory(config)

    def library() -> ctypes.CDLL | None:
        return ops.start(threads=1).library

    def tiers(layout: str, shape: KVShape) -> TierStack:
        return _tiers(config, layout, shape, library())

    def dock(region: DeviceRegion) -> Dock | None:
        assert config.transfer is not None
        return _dock(config, config.transfer, region, ipc.near(region), library())

    return boot_from(
        Path(config.model),
        settings,
        dtype=_dtype("dtype", config.dtype),
        reader=reader,
        compiler=_compiler,
        tiers=tiers if settings.tiers else None,
        dock=dock if settings.transfer else None,
    )


def loaded_on_gpu(made: Booted) -> Loaded:
    return Loaded(
        engine=made.engine,
        max_context=made.engine.max_context,
        kv_tokens=made.plan.kv_tokens,
        weight_bytes=made.runner.model.weight_bytes,
        kv_bytes=made.plan.kv_bytes,
        kernels=f"cuda ({torch.cuda.get_device_name()})",
        seconds=dict(made.seconds),
        device="cuda",
        kv_dtype=_name(made.runner.cache.shape.dtype),
        numerics=_numerics(made.runner.model, made.runner.cache, made.weights, "cuda"),
    )


def _boot_on_cpu(config: EngineConfig, kv_room: int | None) -> Loaded:
    began = time.perf_counter()
    if config.itl_target_ms is not None:
        raise InvalidRequest(
            "itl_target_ms is set, but only an engine on a GPU supports it",
            param="itl_target_ms",
            hint="drop --itl-target-ms",
        )
    memory.refuse_packed(config.weights)
    _check_host_memory(config)
    _check_block_size(config)
    threads = config.threads or core_count()
    backend = ops.start(threads=threads)
    # torch's threads spin for a while after each op, on the cores that our kernels need next: one is enough for torch.
    torch.set_num_threads(1 if backend.library else threads)
    kernels = time.perf_counter()
    model = load(Path(config.model), config.dtype, config.max_context)
    loaded = time.perf_counter()
    defaults = SchedulerConfig()
    running, block = config.max_running or defaults.max_running, config.block_size or defaults.block_size
    cache = plan_cache(
        model,
        dtype=_dtype("kv_dtype", config.kv_dtype) or model.dtype,
        block_size=block,
        memory=config.kv_memory or kv_room or (free_memory() - config.kv_host_memory) // 2,
        max_tokens=_most_tokens(config, running, model.context),
        shared=config.transfer is not None,
    )
    eos = frozenset(model.config.eos)
    runner = TorchRunner(model, cache, eos, lambda: _compiler(Path(config.model), model.config))
    scheduler = SchedulerConfig(
        block_size=block,
        max_batch_tokens=max(config.max_batch_tokens or defaults.max_batch_tokens, running),
        max_running=running,
        max_waiting=config.max_waiting,
        max_context=model.context,
        prefix_cache=config.prefix_cache,
    )
    tiers = _tiers(config, runner.layout, cache.shape, backend.library) if config.has_tiers else None
    dock = None
    if config.transfer is not None and (segment := cache.segment) is not None:
        dock = _dock(config, config.transfer, segment.region, Near.by_memory(segment), backend.library)
    engine = Engine(scheduler, runner, tiers=tiers, dock=dock)
    planned = time.perf_counter()
    return Loaded(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=cache.num_blocks * block,
        weight_bytes=model.weight_bytes,
        kv_bytes=cache.num_blocks * cache.shape.block_bytes,
        kernels=str(backend),
        seconds={"kernels": kernels - began, "weights": loaded - kernels, "cache": planned - loaded},
        device="cpu",
        kv_dtype=_name(cache.shape.dtype),
        numerics=_numerics(model, cache, "plain", "cpu"),
    )


def _numerics(model: Decoder, cache: KVCache, weights: str, device: str) -> Numerics:
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
            f"kv_host_memory is {memory.gib(config.kv_host_memory)} GiB; {memory.gib(free)} GiB of memory are free",
            param="kv_host_memory",
            hint="lower --kv-host-memory",
        )


def _tiers(config: EngineConfig, layout: str, shape: KVShape, library: ctypes.CDLL | None) -> TierStack:
    size, crc = shape.block_bytes, crc_of(library)
    codec = codec_of(config.kv_codec, library, str(shape.dtype))
    host = HostTier(size, config.kv_host_memory or STAGING_BLOCKS * buffer_size(size), config.kv_policy)
    below: list[Tier] = []
    if config.kv_disk is not None and config.kv_disk_size is not None:
        where, quota, policy = Path(config.kv_disk), config.kv_disk_size, config.kv_policy
        below.append(DiskTier(where, layout, size, quota, policy=policy, crc=crc, codec=codec, coding=config.kv_codec))
    if config.kv_store is not None:
        memory = config.kv_store_memory
        place = StorePlace(config.kv_mooncake_host, port_at(config.kv_port, STORE_PORT))
        tier = RemoteTier(config.kv_store, layout, size, memory, place, crc=crc, codec=codec, coding=config.kv_codec)
        below.append(tier)
    return TierStack(host, below)


def _dock(
    config: EngineConfig, transfer: TransferConfig, region: Region, near: Near | None, library: ctypes.CDLL | None
) -> Dock | None:
    codec = codec_of(config.kv_codec, library, region.layout.dtype)
    mooncake = address_of(config.kv_mooncake_host or LOOPBACK, "kv_mooncake_host") if config.kv_mooncake else None
    ways = Ways(crc_of(library), codec, config.kv_codec == "uw", mooncake, config.seals_blocks)
    try:
        return Dock.opened(transfer, region, near, ways)
    except OSError as error:
        if transfer.required:
            where = f"{transfer.host}:{transfer.port}"
            raise InvalidRequest(
                f"KV transfers cannot listen at {where}: {error}", param="transfer", hint="choose another --kv-port"
            ) from error
        return None


def _compiler(directory: Path, config: ModelConfig) -> GrammarCompiler:
    from emberline.engine.grammar import GrammarCompiler

    return GrammarCompiler(directory / "tokenizer.json", config.vocab, sorted(set(config.eos)))


def _dtype(field: str, name: str) -> torch.dtype | None:
    if name not in DTYPES:
        raise InvalidRequest(f"{field} is {name!r}; it must be one of {', '.join(DTYPES)}", param=field)
    return DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _most_tokens(config: EngineConfig, running: int, context: int) -> int:
    if config.kv_memory is not None:
        return 1 << 40  # kv_memory is set: use all of it
    return min(CONTEXTS_KEPT, running) * context
