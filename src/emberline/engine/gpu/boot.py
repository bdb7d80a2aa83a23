"""boot: a model and settings become an Engine on a GPU. Memory is planned from arithmetic before anything is loaded."""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emberline.core.config import GPUConfig, SchedulerConfig, kernel_dir
from emberline.core.errors import ModelError
from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING, Admission, StepPlan, StepResult, Work
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import Cuda, Device
from emberline.engine.gpu.region import DeviceRegion
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.shape import sizes
from emberline.engine.memory import MemoryPlan
from emberline.engine.sampler import RowMaker
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.dock import Dock
from emberline.models.config import ModelConfig
from emberline.models.decoder import Decoder
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import IGNORABLE, fingerprint
from emberline.models.reader import Reader
from emberline.models.sleep import every
from emberline.models.weights import Weights

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

__all__ = ["Booted", "GPUConfig", "Plainly", "boot_from", "boot_gpu"]

log = logging.getLogger("emberline.engine")
KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn}
WARM_TOKENS = 16
CAPTURE_SECONDS = 4.0  # for capturing steps before requests are taken; the shapes left are captured when idle
MakeTiers = Callable[[str, KVShape], TierStack]  # for blocks of a layout
MakeDock = Callable[[DeviceRegion], Dock | None]
TURNS = 5e-4  # seconds after which a thread lets another have the interpreter, while several bring the weights


@dataclass(frozen=True, slots=True)
class Booted:
    engine: Engine
    runner: GPURunner
    plan: MemoryPlan
    seconds: Mapping[str, float]
    weights: str = "plain"  # as they are kept: plain, packed or both


class Plainly:
    """A runner that is given one plan at a time: the loop without lookahead, to compare with."""

    def __init__(self, runner: GPURunner) -> None:
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.eos, self.layout, self.prepare = runner.eos, runner.layout, runner.prepare
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)


def boot_gpu(
    config: ModelConfig,
    weights: Weights,
    *,
    context: int,
    settings: GPUConfig,
    identity: Callable[[], str] = lambda: "random",
    compiler: Callable[[], GrammarCompiler] | None = None,
    device: Device | None = None,
    tiers: MakeTiers | None = None,
    dock: MakeDock | None = None,
) -> Booted:
    """`weights` is where the tensors come from; it is finished here, with everything else made while they arrive.
    `identity` is asked for when they have. `tiers`, `dock`: make those that the settings speak of."""
    assert (tiers is not None) == settings.tiers and (dock is not None) == settings.transfer
    began = time.perf_counter()
    device = device or Cuda()
    model = Decoder.load(config, weights, context, "")
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = KV_DTYPES[memory.kv_dtype(settings, dtype)]
    shape = KVShape(config.layers, config.kv_heads, config.head_dim, settings.block_size, kv_dtype)
    served = replace(settings, max_context=context)
    plan = memory.plan_for(config, served, _device_memory(device), dtype, packed=weights.packed)
    tuned = _tune(model, settings) if device.torch.type == "cuda" and settings.graphs else 0.0  # while much is free
    cache = KVCache(shape, plan.kv_blocks, str(device.torch))
    made = time.perf_counter()
    eos = frozenset(config.eos)
    runner = GPURunner(model, cache, eos, RowMaker(eos, compiler), settings, device, context)
    ready = time.perf_counter()
    seconds = {"plan": made - began - tuned, "tune": tuned, "runner": ready - made, **_fill(weights, runner)}
    if settings.weights == "both":
        seconds["pack"] = _keep_packed(weights, runner)
    filled = time.perf_counter()
    if (weights.packed or settings.weights == "both") and weights.taken_bytes > plan.weights + plan.spare // 2:
        taken = f"with weights {settings.weights} they take {weights.taken_bytes} bytes"
        raise ModelError(f"{taken}; {plan.weights} were planned for", hint="serve it with --weights plain")
    # It reads a little of every tensor: not while the disk is busy.
    kept = "both" if settings.weights == "both" else "packed" if weights.packed else "plain"
    named = identity() if kept == "plain" else f"{identity()}-{kept}"  # other kernels make their keys and values
    runner.model = replace(model, fingerprint=named, weight_bytes=weights.taken_bytes)
    seconds["identity"] = time.perf_counter() - filled
    scheduler = SchedulerConfig(
        block_size=settings.block_size,
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_running),
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_context=context,
        prefix_cache=settings.prefix_cache,
        itl_target=None if settings.itl_target_ms is None else settings.itl_target_ms / 1e3,
        itl_tail=settings.itl_tail,
    )
    begun = time.perf_counter()
    below = tiers_of(runner, tiers) if tiers is not None else None
    seconds["tiers"] = time.perf_counter() - begun
    shared = dock(region_of(runner, device)) if dock is not None else None
    engine = Engine(scheduler, runner if settings.overlap else Plainly(runner), tiers=below, dock=shared)
    seconds["capture"] = _capture_first(runner, scheduler)
    gc.freeze()  # half a million objects of imported libraries: looking through them takes a tenth of a second
    return Booted(engine, runner, plan, seconds, kept)


def boot_from(
    directory: Path,
    settings: GPUConfig,
    *,
    dtype: torch.dtype | None = None,
    reader: Reader | None = None,
    compiler: Callable[[Path, ModelConfig], GrammarCompiler] | None = None,
    tiers: MakeTiers | None = None,
    dock: MakeDock | None = None,
) -> Booted:
    """From a checkpoint. `reader`: one that has been reading its files since before torch was imported."""
    began = time.perf_counter()
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.of(checkpoint)
    memory.refuse_experts(config)
    context = memory.context(config, settings)
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    used = memory.weight_dtype(checkpoint, name)
    packed = memory.packs(checkpoint, settings, used)
    opened = time.perf_counter()
    with ThreadPoolExecutor(1, "codec") as other:
        codec = other.submit(_start_codec, checkpoint)
        device = Cuda()
        torch.cuda.synchronize(device.torch)
    codec.result()
    there = time.perf_counter()
    weights = DeviceWeights(checkpoint, dtype, device.torch, reader, packed=packed)
    identity = partial(fingerprint, checkpoint, config, used, context)
    grammars = None if compiler is None else partial(compiler, directory, config)
    booted = boot_gpu(
        config,
        weights,
        context=context,
        settings=settings,
        identity=identity,
        compiler=grammars,
        device=device,
        tiers=tiers,
        dock=dock,
    )
    return replace(booted, seconds={"config": opened - began, "device": there - opened, **booted.seconds})


def tiers_of(runner: GPURunner, make: MakeTiers) -> TierStack:
    """Where blocks go that the runner's cache has no room for; the first is in its device's reach until it closes."""
    assert runner.copier is not None
    tiers = make(runner.layout, runner.cache.shape)
    runner.copier.reach(tiers.host.area)
    tiers.host.on_close = runner.copier.let_go
    return tiers


def region_of(runner: GPURunner, device: Device) -> DeviceRegion:
    """Its cache, for other engines."""
    layout = runner.cache.shape.layout(runner.model.fingerprint, turned=False)
    return DeviceRegion(layout, runner.cache, device)


def _tune(model: Decoder, settings: GPUConfig) -> float:
    """Of all the sizes that steps have, by what their products are fastest: known from an earlier start, or measured.
    Seconds."""
    from emberline.kernels import tuning

    weights = set(every(ops.PackedWeight, model.layers))
    return tuning.tune(weights, model.config.hidden, sizes(settings.max_running, settings.max_batch_tokens))


def _capture_first(runner: GPURunner, config: SchedulerConfig) -> float:
    """Capture the steps that requests need first, and rehearse one; return the seconds."""
    began = time.perf_counter()
    if runner.graphs and runner.cache.keys.is_cuda:
        runner.set_up()
        until = time.perf_counter() + CAPTURE_SECONDS
        while time.perf_counter() < until and runner.prepare_next():
            pass
    if runner.cache.keys.is_cuda:
        rehearse(runner, config)
    return time.perf_counter() - began


def rehearse(runner: GPURunner, config: SchedulerConfig) -> None:
    """Serve one request, by an engine of its own whose counters and cache are dropped: what runs for the first time
    takes up to 2 ms more, and the first request would have to wait for it. The runner's cache must be empty."""
    engine = Engine(config, runner)
    length = min(WARM_TOKENS, engine.max_context - 2)
    if length > 0:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        engine.add(Submission("rehearsal", [0] * length, params))
        while not engine.idle:
            engine.step()
        engine.step()  # its plan lets the runner forget the request


def _fill(weights: Weights, runner: GPURunner) -> dict[str, float]:
    """Waits for the weights; meanwhile everything a first request would have to load is loaded. How long each took."""
    model, late = runner.model, weights.packed and isinstance(weights, DeviceWeights)

    def warm() -> float:
        try:
            runner.model = _stand_in(model) if late else model  # what is to be packed has no place before it has come
            return compile_kernels(runner) + warm_up(runner)
        finally:
            runner.model = model

    began = time.perf_counter()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TURNS)
    try:
        with ThreadPoolExecutor(1, "warm-up") as other:
            warmed = other.submit(warm)
            weights.finish(IGNORABLE)
            loaded = time.perf_counter()
            warm_seconds = warmed.result()
            if late:
                torch.cuda.empty_cache()  # what stood in was as large as a layer and the head
    finally:
        sys.setswitchinterval(interval)
    times = weights.times if isinstance(weights, DeviceWeights) else None
    if times is None:
        return {"weights": loaded - began, "warm_up": warm_seconds}
    parts = {"disk_wait": times.wait_seconds, "copy": times.copy_seconds, "pin": times.pin_seconds}
    decode = {"decode_threads": times.decode_seconds} if times.decoded_bytes else {}
    return {"weights": loaded - began, **parts, **decode, "warm_up": warm_seconds}


def _keep_packed(weights: Weights, runner: GPURunner) -> float:
    """All that is there plainly, in 12 bits too; and what reads it, loaded. Seconds."""
    began = time.perf_counter()
    weights.taken_bytes += sum(ops.keep_packed(weight) for weight in every(ops.PackedWeight, runner.model))
    warm_up(runner)
    return time.perf_counter() - began


def _stand_in(model: Decoder) -> Decoder:
    """The same kernels run for it, of weights that are zeros: one for all of a shape."""
    device = model.layers[0].attention.cos_sin.device

    @cache
    def zeros(n: int, k: int, gated: bool) -> ops.PackedWeight:
        weight = ops.empty_weight(n, k, torch.bfloat16, device, gated=gated)
        ops.settle(weight, torch.zeros(n, k, dtype=torch.bfloat16, device=device))
        return weight

    parts = {name: _like(getattr(model, name), zeros) for name in ("embedding", "layers", "head")}
    return replace(model, **parts)


def _like(part: Any, zeros: Callable[[int, int, bool], ops.PackedWeight]) -> Any:
    """No closure: one that knows itself would keep the zeros until the collector comes by, and nobody lets it."""
    if isinstance(part, ops.PackedWeight):
        return zeros(part.n, part.k, part.gated) if part.dtype is torch.bfloat16 else part
    if isinstance(part, tuple):
        return tuple(_like(one, zeros) for one in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{field.name: _like(getattr(part, field.name), zeros) for field in fields(part)})


def _start_codec(checkpoint: Checkpoint) -> None:
    """Packed files need it; it may have to be compiled."""
    if any(tensor.packed is not None for tensor in checkpoint.tensors.values()):
        backend = ops.start(threads=1)
        if backend.library is None:
            log.warning("packed weights are decoded by numpy, which is slow: %s", backend.reason)


def compile_kernels(runner: GPURunner) -> float:
    """Compile all kernels that steps will need at the same time, unless an earlier start did; return the seconds.

    Compiled one by one as they are first used, they would hold up the first requests for a second each."""
    began = time.perf_counter()
    if not runner.cache.keys.is_cuda:
        return 0.0
    from emberline.kernels.cuda import driver, nvrtc, sample

    facts = [repr(runner.model.config), str(runner.cache.keys.dtype), nvrtc.sources_digest(), str(runner.shapes)]
    done = kernel_dir() / f"compiled-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:32]}"
    if not done.exists():
        with driver.compiling_together(sample.module()):
            runner.meet_kernels()
            torch.cuda.synchronize()
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    return time.perf_counter() - began


def warm_up(runner: GPURunner) -> float:
    """A first request, whatever the weights are by now; seconds. Its step is not a captured one: to capture, a thread
    must be alone with the device."""
    began = time.perf_counter()
    graphs, runner.graphs = runner.graphs, False
    keys, size = runner.cache.keys, runner.cache.shape.block_size
    if keys.is_cuda:
        torch.cuda.default_stream(keys.device).synchronize()  # on it the cache and the inputs' memory become zero
    tokens = [0] * min(WARM_TOKENS, size * runner.num_blocks, runner.model.context)
    if len(tokens) > 1:
        blocks = range(-(-len(tokens) // size))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        admission = Admission("warm-up", tokens, len(tokens), params, 0)
        runner.run(StepPlan(0, [admission], [Work("warm-up", 0, tokens, blocks, samples=True)], []))
        if blocks[-1] * size + size > len(tokens):  # there is room for one more
            work = Work("warm-up", len(tokens), [PENDING], blocks, samples=True)
            runner.run(StepPlan(0, [], [work], []))
        runner.run(StepPlan(0, [], [], ["warm-up"]))
        for part in (keys, runner.cache.values):
            part[:, : len(blocks)].zero_()  # no stray NaN may stay
    if keys.is_cuda:
        torch.cuda.default_stream(keys.device).synchronize()
    runner.graphs = graphs
    return time.perf_counter() - began


def _device_memory(device: Device) -> int:
    return device_memory(device.torch) if device.torch.type == "cuda" else 1 << 30


def device_memory(device: torch.device) -> int:
    """Bytes that a plan may share out."""
    free, total = torch.cuda.mem_get_info(device)
    return memory.usable(total, free, torch.cuda.memory_reserved(device))
