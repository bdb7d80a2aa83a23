"""boot_device_ranks: builds an Engine whose model is divided among ranks with a GPU each."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed
from emberline.engine.boot_checks import check_host_memory
from emberline.engine.engine import Engine
from emberline.engine.engine_components import make_grammar_compiler, open_transfer_endpoint
from emberline.engine.gpu.boot import capture_first_shapes
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.loaded_engine import LoadedEngine, dtype_name, full_context, numerics_of
from emberline.engine.rank_summary import RankSummary
from emberline.engine.ranks.boot import closing_on_error, load_rank_models, wait_for_start
from emberline.engine.ranks.control import GPUMemoryBudget, RankLoaded, RankReady
from emberline.engine.ranks.device_experts import describe_expert_forms
from emberline.engine.ranks.device_leader import DeviceLeaderRunner, PipelineDeviceLeaderRunner
from emberline.engine.ranks.device_rank_model import DeviceRankModel
from emberline.engine.ranks.device_region import allocate_transfer_slots, make_group_region
from emberline.engine.ranks.device_settings import check_device_drafts, check_device_settings
from emberline.engine.ranks.device_tiers import DeviceHostTier, describe_caches
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader import FollowerGroup
from emberline.engine.ranks.node_listener import NodeLauncher
from emberline.engine.ranks.settings import check_divisible, check_transfer, transfer_obstacle
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.models.config import ModelConfig
from emberline.models.weight_dtype import check_requested_dtype, stored_weight_format
from emberline.models.weight_form import check_requested_weights


def boot_device_ranks_on_ray(config: EngineConfig) -> LoadedEngine:
    """Reserve GPUs of this node with Ray, and load the model. Settings are checked before anything is reserved."""
    from emberline.engine.ranks.ray_boot import boot_on_ray

    granted = replace(config.parallel, launcher="processes", ray_address=None)
    check_device_settings(replace(config, parallel=granted), torch.cuda.device_count())
    return boot_on_ray(config, "GPU", boot_device_ranks, max_nodes=1)


def boot_device_ranks(config: EngineConfig, launcher: NodeLauncher | None = None) -> LoadedEngine:
    """Start the other ranks and load the model. Raises EmberlineError if settings, model or a rank are not usable.

    `config`: the result of `EngineConfig.with_gpu_defaults`. `launcher`: what has started the other nodes; it is closed
    with the engine."""
    began = time.perf_counter()
    division = DeviceDivision.from_config(config)
    group = RankGroup(division.config, division.layout, launcher=launcher)
    with closing_on_error(group):
        wait_for_start(group, division.config)
        started = time.perf_counter()
        loaded = division.load(group).engine
    return replace(loaded, seconds={"ranks": started - began, **loaded.seconds})


@dataclass(frozen=True, slots=True)
class LoadedDeviceRanks:
    engine: LoadedEngine
    nbytes: int  # that the model takes on the GPU where it takes the most, if it does not sleep

    @property
    def leader(self) -> DeviceLeaderRunner:
        runner = self.engine.engine.runner
        assert isinstance(runner, DeviceLeaderRunner)
        return runner


@dataclass(frozen=True, slots=True)
class DeviceDivision:
    """A model that will be divided among ranks with a GPU each, and checked settings for these ranks."""

    config: EngineConfig
    layout: Layout
    model: ModelConfig  # of the undivided model

    @staticmethod
    def from_config(config: EngineConfig) -> DeviceDivision:
        """Return the division that the settings ask for. Raises EmberlineError if settings or model are not usable.

        `config`: see `boot_device_ranks`."""
        config = config.with_settings(device="cuda")  # not auto: all ranks compute on the same kind of device
        check_device_settings(config, torch.cuda.device_count())
        check_requested_dtype(config.dtype, on_gpu=True)
        check_requested_weights(config.gpu.weights, on_gpu=True)
        check_host_memory(config)
        layout = Layout.of_gpus(config.parallel)
        model = ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
        check_device_drafts(config, model)
        check_transfer(config, model)
        if transfer_obstacle(config, model):
            config = replace(config, transfer=None)  # KV transfers are optional here
        check_divisible(layout, model)
        return DeviceDivision(config, layout, model)

    def load(self, group: RankGroup, memory: GPUMemoryBudget | None = None) -> LoadedDeviceRanks:
        """Load the model on the ranks of a group, which have started with these settings.

        `memory`: budget of each GPU; None: no other model uses the GPUs. If this raises, the caller must close the
        group."""
        config, layout, model = self.config, self.layout, self.model
        began = time.perf_counter()

        def load_own() -> DeviceRankModel:
            rank_model = DeviceRankModel.load(config, layout, layout.leader, group.connect, memory)
            for each in rank_model.connections.all:
                group.watch(each.group)
            return rank_model

        rank_model, reports = load_rank_models(group, load_own, memory)
        check_same_devices(reports, layout)
        planned = time.perf_counter()
        num_blocks, num_slots = plan_device_caches(reports.values())
        rank_model.planned.tune_matrix_products()
        host = DeviceHostTier.make(config, group.memory, layout, model.kv_heads, reports)
        whole = rank_model.describe_whole_blocks(model, "")
        slots = allocate_transfer_slots(config, group.memory, layout, whole)
        group.send(describe_caches(num_blocks, num_slots, host, slots, rank_model.planned.draft_summary))
        seconds = allocate_leader(config, layout.leader, rank_model, num_blocks, num_slots, host)
        ready = group.wait_for(RankReady)
        check_same_forms(describe_expert_forms(rank_model.runner.model), ready, layout)
        group.is_ready = True
        loaded = time.perf_counter()
        engine = make_device_engine(config, group, rank_model, model, host, slots)
        seconds["capture"] = capture_first_shapes(
            rank_model.runner, config.scheduler.for_model(rank_model.runner.model.context)
        )
        gc.freeze()  # as on one GPU: objects of the start are permanent
        seconds = {"plan": planned - began, "load": loaded - planned, **seconds}
        weights = {rank: report.weight_bytes for rank, report in ready.items()}
        draft = rank_model.planned.draft
        weights[layout.leader] = rank_model.runner.model.weight_bytes + (0 if draft is None else draft.weight_bytes)
        ranks = tuple(
            _summarise_rank(layout, rank, reports[rank], weights[rank], rank_model.runner) for rank in sorted(reports)
        )
        blocks = {rank: num_blocks * (each.block_bytes + each.draft_block_bytes) for rank, each in reports.items()}
        nbytes = max(each.fixed_bytes + blocks[rank] for rank, each in reports.items())
        return LoadedDeviceRanks(_describe_engine(config, engine, rank_model, ranks, seconds), nbytes)


def check_same_devices(reports: dict[int, RankLoaded], layout: Layout) -> None:
    """Raise EngineFailed if a rank has another kind of GPU than the leader.

    Kernels of another GPU may round differently, so that ranks choose different experts for a token, for example."""
    ours = reports[layout.leader].device_name
    for rank, report in reports.items():
        if report.device_name != ours:
            message = f"{layout.describe(rank)} has the GPU {report.device_name}, and the leader has {ours}"
            raise EngineFailed(message, hint="choose GPUs of one kind with CUDA_VISIBLE_DEVICES")


def check_same_forms(ours: str, ready: Mapping[int, RankReady], layout: Layout) -> None:
    """Raise EngineFailed if a rank stores movable experts in another form than the leader.

    `ours`: the result of `describe_expert_forms` on the leader."""
    for rank, report in ready.items():
        if report.expert_forms != ours:
            message = f"{layout.describe(rank)} stores experts with other dtypes, shapes or factors than the leader"
            raise EngineFailed(f"{message}, so they cannot move between GPUs", hint="drop --redundant-experts")


def plan_device_caches(reports: Iterable[RankLoaded]) -> tuple[int, int]:
    """Return the number of KV blocks and of slots for recurrent states, which fit on all ranks."""
    reports = list(reports)
    num_slots = min((report.max_slots for report in reports if report.slot_bytes), default=0)
    return min(report.max_blocks for report in reports), num_slots


def allocate_leader(
    config: EngineConfig,
    rank: int,
    rank_model: DeviceRankModel,
    num_blocks: int,
    num_slots: int,
    host: DeviceHostTier | None = None,
) -> dict[str, float]:
    """Build the runner of the leader, whose number is `rank`; return the seconds of each phase, by name."""
    model = rank_model.planned.model.config
    make_compiler = partial(make_grammar_compiler, Path(config.model), model)
    runner_class = PipelineDeviceLeaderRunner if config.parallel.pp > 1 else DeviceLeaderRunner
    make_state = SamplingStateFactory(frozenset(model.eos), make_compiler)
    if host is None:
        return rank_model.allocate(num_blocks, num_slots, make_state, runner_class)
    seconds = rank_model.allocate(num_blocks, num_slots, make_state, runner_class, host.buffer_layout.pages_per_slot)
    rank_model.attach_buffers(host.buffers, host.buffer_layout, rank)
    return seconds


def make_device_engine(
    config: EngineConfig,
    group: FollowerGroup,
    rank_model: DeviceRankModel,
    model: ModelConfig,
    host: DeviceHostTier | None = None,
    slots: HostBuffers | None = None,
) -> Engine:
    """Return the engine of a group whose ranks are all ready.

    `rank_model`: the leader's. `model`: config of the undivided model. `host`: the first KV tier. `slots`:
    buffers for the exchange of blocks with other engines."""
    runner = rank_model.runner
    assert isinstance(runner, DeviceLeaderRunner)
    runner.lead_group(group, rank_model, host)
    tiers = None if host is None else host.make_tiers(config, runner, runner.cache.shape.dtype)
    scheduler = config.scheduler.for_model(runner.model.context)
    drafter = make_drafter(config.speculation, find_library, scheduler.max_running, continues_on_device=True)
    endpoint = None
    if config.transfer is not None and slots is not None:
        region, library = make_group_region(group, model, rank_model, slots), ops.start_backend(threads=1).library
        endpoint = open_transfer_endpoint(config, config.transfer, region, None, library)
    return Engine(scheduler, runner, tiers=tiers, transfer_endpoint=endpoint, drafter=drafter)


def _summarise_rank(layout: Layout, rank: int, report: RankLoaded, weight_bytes: int, leader: GPURunner) -> RankSummary:
    block_bytes = report.block_bytes + report.draft_block_bytes
    kv_bytes = leader.num_blocks * block_bytes + leader.num_state_slots * report.slot_bytes
    return RankSummary(rank, rank // layout.tp, rank % layout.tp, report.layers, weight_bytes, kv_bytes)


def _describe_engine(
    config: EngineConfig,
    engine: Engine,
    rank_model: DeviceRankModel,
    ranks: tuple[RankSummary, ...],
    seconds: dict[str, float],
) -> LoadedEngine:
    runner, kernels, checkpoint = (
        rank_model.runner,
        ops.selected_gpu_kernels().name,
        Checkpoint.open(Path(config.model)),
    )
    device = "cuda-portable" if kernels == "portable" else "cuda"  # their kernels round differently
    layout = Layout.of_gpus(config.parallel)
    return LoadedEngine(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=layout.num_caches * (runner.num_blocks // len(runner.groups.windows)) * config.scheduler.block_size,
        weight_bytes=sum(each.weight_bytes for each in ranks),
        kv_bytes=sum(each.kv_bytes for each in ranks),
        kernels=f"{kernels} ({torch.cuda.get_device_name()})",
        seconds=seconds,
        device="cuda",
        kv_dtype=dtype_name(runner.cache.shape.dtype),
        numerics=numerics_of(runner.model, runner.cache, rank_model.weight_format, device, layout.numerics_name),
        stored_dtype=stored_weight_format(checkpoint),
        full_context=full_context(runner.model),
        ranks=ranks,
    )
