"""boot: a model and settings become an Engine on a GPU. Memory is planned from arithmetic before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.config import GPUConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import StepPlan, StepResult
from emberline.engine import memory
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import Cuda, Device
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.memory import MemoryPlan
from emberline.engine.sampler import RowMaker
from emberline.hub.checkpoint import Checkpoint
from emberline.kv.cache import KVCache, KVShape
from emberline.models.config import ModelConfig
from emberline.models.decoder import Decoder
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import IGNORABLE, fingerprint
from emberline.models.reader import Reader
from emberline.models.weights import Weights

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

__all__ = ["Booted", "GPUConfig", "Plainly", "boot_from", "boot_gpu"]

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Booted:
    engine: Engine
    runner: GPURunner
    plan: MemoryPlan
    seconds: Mapping[str, float]


class Plainly:
    """A runner that is given one plan at a time: the loop without lookahead, to compare with."""

    def __init__(self, runner: GPURunner) -> None:
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.eos, self.layout = runner.eos, runner.layout
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)


def boot_gpu(
    config: ModelConfig,
    weights: Weights,
    *,
    context: int,
    settings: GPUConfig,
    identity: str = "random",
    compiler: Callable[[], GrammarCompiler] | None = None,
    device: Device | None = None,
) -> Booted:
    """`weights` is where the tensors come from; it is finished here, with everything else made while they arrive."""
    began = time.perf_counter()
    device = device or Cuda()
    model = Decoder.load(config, weights, context, identity)
    kv_dtype = model.dtype if settings.kv_dtype == "auto" else KV_DTYPES.get(settings.kv_dtype)
    if kv_dtype is None:
        raise InvalidRequest(
            f"kv_dtype is {settings.kv_dtype!r}; it must be one of auto, {', '.join(KV_DTYPES)}", param="kv_dtype"
        )
    shape = KVShape(config.layers, config.kv_heads, config.head_dim, settings.block_size, kv_dtype)
    token_bytes = shape.block_bytes // settings.block_size
    plan = memory.plan(
        config,
        _device_memory(device),
        dtype_bytes=model.dtype.itemsize,
        kv_dtype_bytes=kv_dtype.itemsize,
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        max_context=context,
        fraction=settings.memory_fraction,
        kv_tokens=settings.kv_tokens if settings.kv_memory is None else settings.kv_memory // token_bytes,
    )
    cache = KVCache(shape, plan.kv_blocks, str(device.torch))
    made = time.perf_counter()
    weights.finish(IGNORABLE)
    loaded = time.perf_counter()
    eos = frozenset(config.eos)
    runner = GPURunner(model, cache, eos, RowMaker(config.vocab, eos, compiler), settings, device, context)
    scheduler = SchedulerConfig(
        block_size=settings.block_size,
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_running),
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_context=context,
        prefix_cache=settings.prefix_cache,
        itl_target=None if settings.itl_target_ms is None else settings.itl_target_ms / 1e3,
    )
    engine = Engine(scheduler, runner if settings.overlap else Plainly(runner))
    ready = time.perf_counter()
    seconds = {"plan": made - began, "weights": loaded - made, "runner": ready - loaded}
    return Booted(engine, runner, plan, seconds)


def boot_from(
    directory: Path,
    settings: GPUConfig,
    *,
    dtype: torch.dtype | None = None,
    reader: Reader | None = None,
    compiler: Callable[[Path, ModelConfig], GrammarCompiler] | None = None,
) -> Booted:
    """From a checkpoint. `reader`: one that has been reading its files since before torch was imported."""
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_hf(checkpoint.config)
    context = settings.max_context or config.max_context
    if not 1 <= context <= config.longest_context:
        raise InvalidRequest(
            f"max_context is {context}; this model allows 1 to {config.longest_context}", param="max_context"
        )
    device = Cuda()
    weights = DeviceWeights(checkpoint, dtype, device.torch, reader)
    identity = fingerprint(checkpoint, config, str(dtype), context)
    grammars = None if compiler is None else partial(compiler, directory, config)
    return boot_gpu(
        config, weights, context=context, settings=settings, identity=identity, compiler=grammars, device=device
    )


def _device_memory(device: Device) -> int:
    if device.torch.type == "cuda":
        return int(torch.cuda.mem_get_info(device.torch)[1])
    return 1 << 30
