"""boot_ranks: builds an Engine whose model is divided among the ranks of a group, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from emberline import __version__
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed, ModelError
from emberline.core.freememory import free_memory
from emberline.engine.boot_checks import check_cpu_settings, check_host_memory
from emberline.engine.engine import Engine
from emberline.engine.engine_components import (
    make_grammar_compiler,
    make_host_tier,
    make_tiers,
    max_kv_tokens,
    open_transfer_endpoint,
)
from emberline.engine.loaded_engine import LoadedEngine, dtype_name, full_context, numerics_of
from emberline.engine.rank_summary import RankSummary
from emberline.engine.ranks.control import (
    AllocateCaches,
    ConnectRanks,
    GPUMemoryBudget,
    RankLoaded,
    RankReady,
    RankStarted,
    digest_settings,
)
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader import FollowerGroup, LeaderRunner, PipelineLeaderRunner
from emberline.engine.ranks.node_listener import NodeLauncher
from emberline.engine.ranks.rank_model import RankModel
from emberline.engine.ranks.settings import (
    check_divisible,
    check_rank_settings,
    check_transfer,
    transfer_obstacle,
)
from emberline.engine.ranks.shared_caches import SharedCaches
from emberline.engine.ranks.stage_costs import choose_stages
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.engine.state_plan import count_state_slots
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.comm.communicator import RankLost
from emberline.kv.tiers.host import HostTier
from emberline.kv.transfer.group_region import StepCounter
from emberline.models.config import ModelConfig
from emberline.models.weight_dtype import stored_weight_format
from emberline.models.weight_form import choose_weight_form


class LoadedRankModel(Protocol):
    """A rank's part of a model: RankModel or DeviceRankModel."""

    def describe(self) -> RankLoaded: ...


RankModelT = TypeVar("RankModelT", bound=LoadedRankModel)


def boot_ranks(
    config: EngineConfig, default_kv_bytes: int | None, launcher: NodeLauncher | None = None
) -> LoadedEngine:
    """Start the other ranks and load the model. Raises EmberlineError if settings, model or a rank are not usable.

    `default_kv_bytes`: size of the KV caches of all ranks on this node, if the config sets none; None: half of the free
    memory.
    `launcher`: what has started the other nodes; it is closed with the engine.
    """
    check_cpu_settings(config)
    check_host_memory(config)
    check_rank_settings(config)
    if config.parallel.nodes > 1:
        config = replace(config, transfer=None)  # KV transfers are optional here, and need memory that ranks share
    began = time.perf_counter()
    layout = Layout.from_config(config.parallel)
    model = ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
    check_transfer(config, model)
    check_divisible(layout, model)
    ops.start_backend(threads=1)  # compiles the kernels once, if this is their first use: the ranks find them
    layout, cost_shares = choose_stages(config, layout, model)
    measured = time.perf_counter()
    group = RankGroup(config, layout, launcher=launcher)
    with closing_on_error(group):
        wait_for_start(group, config)
        started = time.perf_counter()
        rank_model, reports = load_rank_models(
            group, lambda: RankModel.load(config, layout, layout.leader, group.connect)
        )
        loaded = time.perf_counter()
        kv_bytes = default_kv_bytes or (free_memory() - config.tiers.kv_host_memory) // 2
        kv_bytes = group.limit_kv_bytes(kv_bytes, reports)
        num_blocks, num_slots = plan_caches(config, rank_model, reports.values(), kv_bytes)
        engine = _allocate_caches(config, group, model, rank_model, num_blocks, num_slots)
    seconds = {
        "stages": measured - began,
        "ranks": started - measured,
        "weights": loaded - started,
        "cache": time.perf_counter() - loaded,
    }
    sizes = num_blocks, num_slots, config.scheduler.max_running
    summaries = tuple(
        _summarise_rank(layout, rank, reports[rank], *sizes, cost_shares[rank // layout.tp]) for rank in sorted(reports)
    )
    return _describe_engine(config, engine, rank_model, summaries, seconds)


def _allocate_caches(
    config: EngineConfig, group: RankGroup, model: ModelConfig, rank_model: RankModel, num_blocks: int, num_slots: int
) -> Engine:
    """Let all ranks allocate their caches, and return the engine.

    `model`: config of the undivided model. `rank_model`: the leader's part of it."""
    layout = group.layout
    caches = share_caches(config, group.memory, layout, model, rank_model, num_blocks)
    host, buffers = make_shared_host_tier(
        config, group.memory, rank_model.share.whole.block_bytes, rank_model.share.pages_per_slot
    )
    offsets, area = {} if caches is None else caches.offsets, None if buffers is None else buffers.area
    group.send(AllocateCaches(num_blocks, num_slots, cache_offsets=offsets, host_buffers=area))
    rank_model.allocate(num_blocks, num_slots, None if caches is None else caches.regions[layout.leader])
    group.wait_for(RankReady)
    group.is_ready = True
    return make_engine(config, group, rank_model, num_slots, caches, host, buffers)


@contextmanager
def closing_on_error(group: RankGroup) -> Iterator[None]:
    """End the group if the `with` block fails."""
    try:
        yield
    except EmberlineError as error:
        group.close(error)
        raise
    except BaseException:
        group.close()
        raise


def wait_for_start(group: RankGroup, config: EngineConfig) -> None:
    """Wait until the processes of all ranks have started, and check that they can belong to one group."""
    layout = group.layout
    check_started(group.wait_for(RankStarted), digest_settings(config, layout), layout)


def load_rank_models(
    group: RankGroup, load: Callable[[], RankModelT], memory: GPUMemoryBudget | None = None
) -> tuple[RankModelT, dict[int, RankLoaded]]:
    """Let all ranks load their parts of the model; return the leader's part, and the report of every rank.

    `load`: loads the leader's part. `memory`: budget of each GPU; None: no other model uses the GPUs."""
    layout = group.layout
    group.send(ConnectRanks(memory))
    try:
        rank_model = load()
    except RankLost as error:
        raise group.end_with_error(error) from error
    reports = {**group.wait_for(RankLoaded), layout.leader: rank_model.describe()}
    check_same_model(reports, layout)
    return rank_model, reports


def check_started(reports: dict[int, RankStarted], settings: str, layout: Layout) -> None:
    """Raise EngineFailed if a rank has another version or other settings than the leader."""
    for rank, report in reports.items():
        for name, theirs, ours in (("version", report.version, __version__), ("settings", report.settings, settings)):
            if theirs != ours:
                raise EngineFailed(
                    f"{layout.describe(rank)} has the {name} {theirs}, and the leader has {ours}",
                    hint="install the same version of Emberline for all ranks, and give them the same settings",
                )


def check_same_model(reports: dict[int, RankLoaded], layout: Layout) -> None:
    """Raise ModelError if a rank has loaded a part of another model than the leader."""
    ours = reports[layout.leader].fingerprint
    for rank, report in reports.items():
        if report.fingerprint != ours:
            raise ModelError(
                f"{layout.describe(rank)} has a checkpoint with the fingerprint {report.fingerprint}, "
                f"and the leader one with {ours}",
                hint="use the same checkpoint on all nodes, and do not change it while the ranks start",
            )


def plan_caches(
    config: EngineConfig, leader: RankModel, reports: Iterable[RankLoaded], default_kv_bytes: int | None
) -> tuple[int, int]:
    """Return the number of KV blocks and of slots for recurrent states, which are the same on all ranks.

    The setting kv_memory is the memory of each rank. Without it, the ranks of a node share `default_kv_bytes`, or half
    of the free memory if that is None. Raises ModelError if the memory is too small for a rank's part of the cache."""
    reports = list(reports)
    num_local = config.parallel.num_ranks // config.parallel.nodes
    memory_bytes = config.kv_cache.kv_memory or (default_kv_bytes or free_memory() // 2) // num_local
    max_running = config.scheduler.max_running
    num_slots = min(
        (
            count_state_slots(p.slot_bytes, memory_bytes, max_running, draft_bytes=p.draft_bytes)
            for p in reports
            if p.slot_bytes
        ),
        default=0,
    )
    num_groups, block_size = len(leader.groups.windows), config.scheduler.block_size
    most = -(-max_kv_tokens(config, leader.model.context) // block_size) * num_groups
    fitting = min(
        (memory_bytes - _state_bytes(p, num_slots, max_running)) // p.block_bytes for p in reports if p.block_bytes
    )
    if fitting < (least := 2 * num_groups):
        raise ModelError(
            f"the KV cache of a rank has {memory_bytes} bytes, enough for {max(0, fitting)} blocks of "
            f"{max(p.block_bytes for p in reports)} bytes; at least {least} blocks are needed",
            hint="raise --kv-memory",
        )
    return min(fitting, most), num_slots


def _state_bytes(report: RankLoaded, num_slots: int, max_running: int) -> int:
    """Return the memory of a rank's recurrent states."""
    return num_slots * report.slot_bytes + min(num_slots, max_running) * report.draft_bytes


def share_caches(
    config: EngineConfig,
    memory: GroupMemory,
    layout: Layout,
    model: ModelConfig,
    rank_model: RankModel,
    num_blocks: int,
) -> SharedCaches | None:
    """Return shared memory for the ranks' KV caches; None: the engine exchanges no blocks with other engines.

    `model`: config of the undivided model. `rank_model`: the leader's part of it."""
    if config.transfer is None or transfer_obstacle(config, model):
        return None
    shape = replace(rank_model.kv_shape, layers=rank_model.groups.block_layers, kv_heads=model.kv_heads)
    whole = shape.layout(rank_model.model.fingerprint, groups=rank_model.groups.name)
    return SharedCaches.allocate(memory, layout, model, rank_model.groups, whole, num_blocks)


def make_shared_host_tier(
    config: EngineConfig, memory: GroupMemory, block_bytes: int, pages_per_slot: int
) -> tuple[HostTier | None, HostBuffers | None]:
    """Return the host tier and its buffers, which are in the group's memory; both are None if there are no tiers.

    `block_bytes`: size of a block with the parts of all ranks. `pages_per_slot`: number of pages, of the size of a
    block, that hold the recurrent states of a sequence."""
    if not config.tiers.has_tiers:
        return None, None
    made: list[HostBuffers] = []

    def allocate(buffer_bytes: int, count: int) -> memoryview:
        made.append(HostBuffers.allocate(memory, buffer_bytes, count))
        return made[0].memory

    host = make_host_tier(config, block_bytes, pages_per_slot, allocate)
    return host, made[0]


def make_engine(
    config: EngineConfig,
    group: FollowerGroup,
    rank_model: RankModel,
    num_slots: int,
    caches: SharedCaches | None = None,
    host: HostTier | None = None,
    buffers: HostBuffers | None = None,
) -> Engine:
    """Return the engine of a group. `rank_model`: the leader's part of the model.

    `num_slots`: slots for recurrent states on every rank. `caches`: the caches of all ranks; None: no blocks are
    exchanged with other engines. `host`, `buffers`: the results of `make_shared_host_tier`."""
    model, steps, share = rank_model.model.config, StepCounter(), rank_model.share
    make_compiler = partial(make_grammar_compiler, Path(config.model), model)
    runner_class = PipelineLeaderRunner if group.layout.pp > 1 else LeaderRunner
    runner = runner_class(group, rank_model, frozenset(model.eos), make_compiler, num_slots, steps, buffers)
    library, endpoint, tiers = ops.current_backend().library, None, None
    if host is not None:
        whole = share.whole.block_bytes, share.whole.dtype
        tiers = make_tiers(config, runner.layout, *whole, library, host, share.pages_per_slot)
    if config.transfer is not None and caches is not None:
        region = caches.make_region(rank_model.groups, steps)
        endpoint = open_transfer_endpoint(config, config.transfer, region, None, library)
    drafter = make_drafter(config.speculation, lambda: library)
    scheduler = config.scheduler.for_model(rank_model.model.context)
    return Engine(scheduler, runner, tiers=tiers, transfer_endpoint=endpoint, drafter=drafter)


def _summarise_rank(
    layout: Layout, rank: int, report: RankLoaded, num_blocks: int, num_slots: int, max_running: int, cost_share: float
) -> RankSummary:
    kv_bytes = num_blocks * report.block_bytes + _state_bytes(report, num_slots, max_running)
    return RankSummary(
        rank, rank // layout.tp, rank % layout.tp, report.layers, report.weight_bytes, kv_bytes, cost_share
    )


def _describe_engine(
    config: EngineConfig,
    engine: Engine,
    rank_model: RankModel,
    ranks: tuple[RankSummary, ...],
    seconds: dict[str, float],
) -> LoadedEngine:
    cache, checkpoint, layout = (
        rank_model.cache,
        Checkpoint.open(Path(config.model)),
        Layout.from_config(config.parallel),
    )
    form = choose_weight_form(checkpoint, config.dtype, config.gpu.weights)
    return LoadedEngine(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=layout.num_caches
        * (cache.num_blocks // len(rank_model.groups.windows))
        * config.scheduler.block_size,
        weight_bytes=sum(each.weight_bytes for each in ranks),
        kv_bytes=sum(each.kv_bytes for each in ranks),
        kernels=str(ops.current_backend()),
        seconds=seconds,
        device="cpu",
        kv_dtype=dtype_name(cache.shape.dtype),
        numerics=numerics_of(rank_model.model, cache, form, "cpu", layout.numerics_name),
        stored_dtype=stored_weight_format(checkpoint),
        full_context=full_context(rank_model.model),
        ranks=ranks,
    )
