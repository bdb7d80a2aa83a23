"""boot_gpu: builds an Engine on a GPU from a model and settings. Memory is planned before anything is loaded."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING_TOKEN, Admission, StepPlan, StepResult, WorkItem
from emberline.core.request import Submission
from emberline.engine import expert_limits, memory
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import CudaDevice, Device, measure_memory
from emberline.engine.gpu.draft_boot import load_on_device
from emberline.engine.gpu.exact import require_fixed_order
from emberline.engine.gpu.kernel_compilation import compile_kernels
from emberline.engine.gpu.planned_model import PlannedModel
from emberline.engine.gpu.portable_limits import reject_unsupported_settings
from emberline.engine.gpu.region import DeviceRegion
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.weight_format import check_packed_size, name_weight_format, open_device_weights
from emberline.engine.gpu.zero_weights import make_zero_weight_model
from emberline.engine.memory_plan import MemoryPlan
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.kv.cache import KVShape
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.draft_model import DraftModel
from emberline.models.loader import compute_fingerprint
from emberline.models.reader import FileReader
from emberline.models.sleep import iter_instances
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weight_dtype import choose_weight_dtype, stored_weight_format
from emberline.models.weight_matrices import is_head_large
from emberline.models.weights import Weights

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

__all__ = ["BootedGPUEngine", "SyncRunner", "boot_from_checkpoint", "boot_gpu"]

log = logging.getLogger("emberline.engine")
WARM_UP_TOKENS = 16
CAPTURE_BUDGET_S = 4.0  # for capturing steps before requests are accepted; the rest is captured in idle time
MakeTiers = Callable[[str, KVShape, int], TierStack]  # layout and shape of the cache, blocks of a snapshot of states
LoadDraftModel = Callable[[DecoderModel], DraftModel | None]  # called with the target model
MakeTransferEndpoint = Callable[[DeviceRegion], TransferEndpoint | None]
SWITCH_INTERVAL_S = 5e-4  # Python's thread switch interval while several threads load the weights


@dataclass(frozen=True, slots=True)
class BootedGPUEngine:
    engine: Engine
    runner: GPURunner
    plan: MemoryPlan
    seconds: Mapping[str, float]
    weights: str = "plain"  # format in GPU memory, as `name_weight_format` returns it
    stored_dtype: str = ""  # of the matrices in the checkpoint's files, or their format if they are quantised


class SyncRunner:
    """A GPURunner without pipelining, for comparisons: each plan ends before the next one starts."""

    def __init__(self, runner: GPURunner) -> None:
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.eos, self.layout, self.prepare = runner.eos, runner.layout, runner.prepare
        self.groups = runner.groups
        self.num_state_slots, self.pages_per_slot = runner.num_state_slots, runner.pages_per_slot
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)


def boot_gpu(
    config: ModelConfig,
    weights: Weights,
    *,
    context: int,
    settings: EngineConfig,
    compute_fingerprint: Callable[[], str] = lambda: "random",
    make_compiler: Callable[[], GrammarCompiler] | None = None,
    device: Device | None = None,
    build_tiers: MakeTiers | None = None,
    build_endpoint: MakeTransferEndpoint | None = None,
    load_draft: LoadDraftModel = lambda target: None,
) -> BootedGPUEngine:
    """Build the engine while the weights are being loaded.

    `weights`: tensors that are still being loaded; this function waits for them. `compute_fingerprint`: returns the
    checkpoint's fingerprint. `build_tiers`, `build_endpoint`: needed if the settings have KV tiers or transfers.
    `load_draft`: loads the draft model, if the settings name one."""
    assert (build_tiers is not None) == settings.tiers.has_tiers
    assert (build_endpoint is not None) == (settings.transfer is not None)
    began = time.perf_counter()
    device = device or CudaDevice(settings.gpu.kernels)
    packs_experts = weights.packed and config.experts is not None
    reject_unsupported_settings(settings, device.torch_device, has_packed_experts=packs_experts)
    model = load_model(config, weights, context)
    draft = load_draft(model)
    planned = PlannedModel.from_model(model, weights, settings, device, measure_memory(device), draft=draft)
    if settings.gpu.exact:
        require_fixed_order(model, planned.kv_shape)
    tuned, plan = planned.tune_matrix_products(), planned.plan  # before the cache fills the memory
    made = time.perf_counter()
    make_state = SamplingStateFactory(frozenset(config.eos), make_compiler)
    runner = planned.make_runner(make_state, plan.kv_blocks, plan.state_slots)
    seconds = {"plan": made - began - tuned, "tune": tuned, "runner": time.perf_counter() - made}
    weight_format, spent = fill_and_identify(weights, runner, settings, plan, compute_fingerprint)
    seconds |= spent
    scheduler = settings.scheduler.for_model(context)
    begun = time.perf_counter()
    below = make_tiers(runner, build_tiers) if build_tiers is not None else None
    seconds["tiers"] = time.perf_counter() - begun
    shared = build_endpoint(make_region(runner, device)) if build_endpoint is not None else None
    steps = runner if settings.gpu.overlap else SyncRunner(runner)
    continues = settings.gpu.overlap
    drafter = make_drafter(settings.speculation, find_library, scheduler.max_running, continues_on_device=continues)
    engine = Engine(scheduler, steps, tiers=below, transfer_endpoint=shared, drafter=drafter)
    seconds["capture"] = capture_first_shapes(runner, scheduler)
    gc.freeze()  # excludes half a million objects of imported libraries, which take 0.1 s in each collection
    return BootedGPUEngine(engine, runner, plan, seconds, weight_format)


def fill_and_identify(
    weights: Weights,
    runner: GPURunner,
    settings: EngineConfig,
    plan: MemoryPlan,
    compute_fingerprint: Callable[[], str],
) -> tuple[str, dict[str, float]]:
    """Wait for the weights, and set the fingerprint of the runner's model.

    Return the format of the weights, and the seconds of each phase, by name."""
    model, seconds = runner.model, _load_weights(weights, runner)
    copies_head = weights.quantised_sizes and not weights.packed and is_head_large(outline_of(model.config))
    copies_head = copies_head and model.head.weight.n > 0  # only the last stage of a pipeline has a head
    if settings.gpu.weights == "both" or copies_head:
        within = model if settings.gpu.weights == "both" else model.head.weight
        seconds["pack"] = _add_packed_copies(weights, runner, within)
    filled = time.perf_counter()
    if weights.packed or settings.gpu.weights == "both":
        check_packed_size(weights.loaded_bytes, plan)
    # Computing the identity reads a little of every tensor: not while the disk is busy.
    weight_format = name_weight_format(weights, settings)
    # The format is part of the fingerprint, since other kernels compute other keys and values.
    suffix = (f"-{weight_format}" if weight_format != "plain" else "") + "-exact" * settings.gpu.exact
    runner.model = replace(model, fingerprint=compute_fingerprint() + suffix, weight_bytes=weights.loaded_bytes)
    seconds["identity"] = time.perf_counter() - filled
    return weight_format, seconds


def boot_from_checkpoint(
    directory: Path,
    settings: EngineConfig,
    *,
    dtype: torch.dtype | None = None,
    reader: FileReader | None = None,
    make_compiler: Callable[[Path, ModelConfig], GrammarCompiler] | None = None,
    build_tiers: MakeTiers | None = None,
    build_endpoint: MakeTransferEndpoint | None = None,
) -> BootedGPUEngine:
    """Build the engine of a checkpoint.

    `reader`: a process that has been reading the checkpoint's files since before torch was imported."""
    began = time.perf_counter()
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_checkpoint(checkpoint)
    expert_limits.reject_unsupported_experts(config, settings)
    context = memory.choose_max_context(config, settings)
    used = choose_weight_dtype(checkpoint, "auto" if dtype is None else str(dtype).removeprefix("torch."), on_gpu=True)
    packed = memory.uses_packed_weights(checkpoint, settings, used, config)
    opened = time.perf_counter()
    with ThreadPoolExecutor(1, "codec") as other:
        codec = other.submit(load_codec, checkpoint)
        device = CudaDevice(settings.gpu.kernels)
        torch.cuda.synchronize(device.torch_device)
    codec.result()
    initialized = time.perf_counter()
    weights = open_device_weights(checkpoint, dtype, device.torch_device, reader, settings, packed=packed)
    grammars = None if make_compiler is None else partial(make_compiler, directory, config)
    booted = boot_gpu(
        config,
        weights,
        context=context,
        settings=settings,
        compute_fingerprint=partial(compute_fingerprint, checkpoint, config, used, context),
        make_compiler=grammars,
        device=device,
        build_tiers=build_tiers,
        build_endpoint=build_endpoint,
        load_draft=lambda target: load_on_device(settings.speculation, target, directory, device, packed=packed),
    )
    seconds = {"config": opened - began, "device": initialized - opened, **booted.seconds}
    return replace(booted, seconds=seconds, stored_dtype=stored_weight_format(checkpoint))


def make_tiers(runner: GPURunner, make_stack: MakeTiers) -> TierStack:
    """Build the KV tiers below the runner's cache.

    The memory of the first tier, which is main memory, stays pinned until the tier is closed."""
    assert runner.copier is not None
    tiers = make_stack(runner.layout, runner.cache.shape, runner.pages_per_slot)
    runner.copier.attach_host_memory(tiers.host.memory)
    tiers.host.on_close = runner.copier.detach_host_memory
    return tiers


def make_region(runner: GPURunner, device: Device) -> DeviceRegion:
    """Return the memory of the runner's KV cache as a Region, which KV transfers can read and write."""
    layout = runner.cache.shape.layout(runner.model.fingerprint, transposed_keys=False, groups=runner.groups.name)
    return DeviceRegion(layout, runner.cache, device)


def capture_first_shapes(runner: GPURunner, config: SchedulerConfig) -> float:
    """Capture CUDA graphs for the first requests, and run one test request; return the seconds spent."""
    began = time.perf_counter()
    if runner.graphs and runner.cache.keys.is_cuda:
        runner.run_uncaptured_once()
        until = time.perf_counter() + CAPTURE_BUDGET_S
        while time.perf_counter() < until and runner.prepare_next():
            pass
    if runner.cache.keys.is_cuda:
        run_test_request(runner, config)
    return time.perf_counter() - began


def run_test_request(runner: GPURunner, config: SchedulerConfig) -> None:
    """Serve one test request with a temporary engine, whose counters and cache are then discarded.

    The first use of each part of the engine takes up to 2 ms longer, which would delay the first real request. The
    KV cache must be empty."""
    engine = Engine(config, runner)
    length = min(WARM_UP_TOKENS, engine.max_context - 2)
    if length > 0:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        engine.add(Submission("rehearsal", [0] * length, params))
        while not engine.idle:
            engine.step()
        engine.step()  # its plan makes the runner drop the request


def _load_weights(weights: Weights, runner: GPURunner) -> dict[str, float]:
    """Wait until the weights are loaded, and meanwhile compile kernels and run a test request.

    Return the seconds of each of these phases, by name."""
    model, late = runner.model, isinstance(weights, DeviceWeights) and weights.allocates_in_finish
    ignorable = ignorable_tensors(model.config, runner.rank.stage)

    def compile_and_warm_up() -> float:
        try:
            # Packed and quantised weights are allocated only when they are loaded.
            runner.model = make_zero_weight_model(model) if late else model
            return compile_kernels(runner, weights.quantised_sizes, packed=weights.packed) + warm_up(runner)
        finally:
            runner.model = model

    began = time.perf_counter()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with ThreadPoolExecutor(1, "warm-up") as other:
            warmed = other.submit(compile_and_warm_up)
            weights.finish(ignorable)
            loaded = time.perf_counter()
            warm_seconds = warmed.result()
            if late:
                torch.cuda.empty_cache()  # the zero weights were as large as a layer and the output head
    finally:
        sys.setswitchinterval(interval)
    times = weights.load_times if isinstance(weights, DeviceWeights) else None
    if times is None:
        return {"weights": loaded - began, "warm_up": warm_seconds}
    parts = {"disk_wait": times.wait_seconds, "copy": times.copy_seconds, "pin": times.pin_seconds}
    decode = {"decode_threads": times.decode_seconds} if times.decoded_bytes else {}
    return {"weights": loaded - began, **parts, **decode, "warm_up": warm_seconds}


def _add_packed_copies(weights: Weights, runner: GPURunner, within: object) -> float:
    """Add a packed (12-bit) copy to each plain weight in `within`; return the seconds spent.

    `within`: a model or a single weight. The kernels that read the copies are loaded too."""
    began = time.perf_counter()
    weights.loaded_bytes += sum(
        ops.add_packed_copy(each) for each in iter_instances(ops.PackedWeight, within) if each.n
    )
    warm_up(runner)
    return time.perf_counter() - began


def load_codec(checkpoint: Checkpoint) -> None:
    """If the checkpoint has packed tensors, load the codec that unpacks them, compiling it if needed."""
    if any(tensor.packing is not None for tensor in checkpoint.tensors.values()):
        backend = ops.start_backend(threads=1)
        if backend.library is None:
            log.warning(
                "The codec is not available, decoding packed weights slowly with numpy: reason=%s", backend.reason
            )


def warm_up(runner: GPURunner) -> float:
    """Run a test request, so that the first real request is not slower; return the seconds spent.

    Its steps are not captured as graphs, since no other thread may use the device during a capture."""
    began = time.perf_counter()
    graphs, runner.graphs = runner.graphs, False
    keys, size = runner.cache.keys, runner.cache.shape.block_size
    wait = torch.cuda.default_stream(keys.device).synchronize if keys.is_cuda else lambda: None
    wait()  # until the cache and the inputs' memory are initialized with zeros
    tokens = [0] * min(WARM_UP_TOKENS, size * runner.num_blocks, runner.model.context)
    if len(tokens) > 1:
        blocks = range(-(-len(tokens) // size))
        # The result does not matter, so all groups of layers use the same blocks.
        windows = [blocks] * (len(runner.groups.windows) - 1)
        dp_rank = runner.rank.dp_rank
        make_item = partial(WorkItem, "warm-up", blocks=blocks, samples=True, window_blocks=windows, dp_rank=dp_rank)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        admission = Admission("warm-up", tokens, len(tokens), params, 0)
        runner.run(StepPlan(0, [admission], [make_item(0, tokens)], []))
        if blocks[-1] * size + size > len(tokens):  # the last block has a free slot
            runner.run(StepPlan(0, [], [make_item(len(tokens), [PENDING_TOKEN])], []))
        runner.run(StepPlan(0, [], [], ["warm-up"]))
        for part in (keys, runner.cache.values):
            part[:, : len(blocks)].zero_()  # no NaN may remain
    wait()
    runner.graphs = graphs
    return time.perf_counter() - began
