"""Engines of the GPU runner on several ranks that are threads of this process, with the CPU as their device."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rank_engines import ThreadRanks

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.planned_model import PlannedModel
from emberline.engine.ranks.boot import check_same_model
from emberline.engine.ranks.control import AllocateCaches
from emberline.engine.ranks.device_boot import allocate_leader, make_device_engine, plan_device_caches
from emberline.engine.ranks.device_follower import DeviceFollower
from emberline.engine.ranks.device_rank import allocate_rank_caches, make_rank_transfers
from emberline.engine.ranks.device_rank_model import DeviceConnections, DeviceRankModel
from emberline.engine.ranks.device_region import allocate_transfer_slots
from emberline.engine.ranks.device_tiers import DeviceHostTier, describe_caches
from emberline.engine.ranks.draft_model import load_draft_model_of_ranks
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_model import ConnectRanksFunction
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.thread_group import ThreadGroup
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.loader import DTYPES, compute_fingerprint, load_checkpoint
from emberline.models.shard import Shard
from emberline.models.stage import Stage
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weights import Weights

DEVICE_BYTES = 16 << 30  # memory of a simulated GPU


def load_host_rank_model(
    config: EngineConfig,
    layout: Layout,
    rank: int,
    connect: ConnectRanksFunction,
    device_memory: tuple[int, int] = (DEVICE_BYTES, 0),
) -> DeviceRankModel:
    """Return a rank's part of a model on the CPU. Its weights are loaded, unlike those of DeviceRankModel.load.

    The experts of a layer are stacked, as on a GPU, if they may move."""
    connections = DeviceConnections.connect(layout, rank, connect)
    checkpoint = Checkpoint.open(Path(config.model))
    stage, shard = layout.stage(rank, ModelConfig.from_checkpoint(checkpoint)), layout.shard(rank)
    shards: Any = connections.shards
    if config.parallel.redundant_experts:
        model = load_stacked(checkpoint, config, stage, shard, shards)
    else:
        model = load_checkpoint(checkpoint, config.dtype, config.requested_context, None, stage, shard, shards)
    draft = None
    if rank == layout.leader:
        draft = load_draft_model_of_ranks(config, checkpoint, model, lambda source: Weights(source, model.dtype))
    args = model, Weights(checkpoint), config, HostDevice(), device_memory
    planned = PlannedModel.from_model(*args, draft=draft, stage=stage)
    return DeviceRankModel(planned, None, stage, connections, model.fingerprint)


class StackingWeights(Weights):
    stacks_experts = True


def load_stacked(checkpoint: Checkpoint, config: EngineConfig, stage: Stage, shard: Shard, comm: Any) -> DecoderModel:
    whole = ModelConfig.from_checkpoint(checkpoint)
    weights = StackingWeights(checkpoint, DTYPES[config.dtype], shard=shard, comm=comm)
    context = config.requested_context or whole.max_context
    model = load_model(shard.shard_config(whole), weights, context, stage)
    weights.finish(ignorable_tensors(whole, stage))
    return replace(model, fingerprint=compute_fingerprint(checkpoint, whole, config.dtype, context))


class DeviceThreadRanks(ThreadRanks):
    def __init__(self, config: EngineConfig, *, max_blocks: int | None = None) -> None:
        """`max_blocks`: of the KV cache; None: as many as the settings allow."""
        self._store_fd, self.memory = None, GroupMemory.create(config.parallel.num_ranks)
        self.layout = layout = Layout.of_gpus(config.parallel)
        self._groups: dict[str, ThreadGroup] = {}
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[bytes | None]] = {rank: SimpleQueue() for rank in layout.followers}
        self._pool = ThreadPoolExecutor(layout.num_ranks)
        self.parts = parts = list(
            self._pool.map(
                lambda rank: load_host_rank_model(config, layout, rank, self._connect), range(layout.num_ranks)
            )
        )
        described = {rank: part.describe() for rank, part in enumerate(parts)}
        check_same_model(described, layout)
        num_blocks, num_slots = plan_device_caches(described.values())
        num_blocks = min(num_blocks, max_blocks or num_blocks)
        self.device_leader = parts[layout.leader]
        self.model = model = ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
        self.device_host = DeviceHostTier.make(config, self.memory, layout, model.kv_heads, described)
        whole = self.device_leader.describe_whole_blocks(model, "")
        self.slots = allocate_transfer_slots(config, self.memory, layout, whole)
        draft = self.device_leader.planned.draft_summary
        message = describe_caches(num_blocks, num_slots, self.device_host, self.slots, draft)
        allocate_leader(config, layout.leader, self.device_leader, num_blocks, num_slots, self.device_host)
        self._num_copied, self._num_finished = dict.fromkeys(layout.followers, 0), 0
        self._reports: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in layout.followers}
        self._runs: list[Future[None]] = [
            self._pool.submit(
                self._follow, rank, message, allocate_rank_caches(parts[rank], message, rank, self.memory)
            )
            for rank in layout.followers
        ]

    def _follow(self, rank: int, sizes: AllocateCaches, buffers: HostBuffers | None) -> None:
        def count_copies() -> None:
            self._num_copied[rank] += 1

        part, queue = self.parts[rank], self._queues[rank]
        transfers = make_rank_transfers(part, sizes, rank, self.layout.num_ranks, self.memory, self._abort)
        report = self._reports[rank].put
        follower = DeviceFollower(part.runner, self.layout.pp, buffers, count_copies, transfers, report)
        try:
            while (message := queue.get()) is not None:
                if (finish := follower.handle(message)) is not None:
                    finish()
        except BaseException as error:
            self._reports[rank].put(error)
            self._abort(error)
            raise
        finally:
            if transfers is not None:
                transfers.close()

    def wait_for(self, kind: type[Any], timeout_s: float) -> dict[int, Any]:
        reports = {rank: inbox.get(timeout=timeout_s) for rank, inbox in self._reports.items()}
        for rank, report in reports.items():
            if not isinstance(report, kind):
                raise EngineFailed(f"{self.layout.describe(rank)}: {report}")
        return reports

    def _abort(self, error: BaseException) -> None:
        for group in self._groups.values():
            group.abort()

    def make_engine(self, config: EngineConfig) -> Engine:
        return make_device_engine(config, self, self.device_leader, self.model, self.device_host, self.slots)


def make_device_thread_engine(config: EngineConfig, **options: Any) -> Engine:
    """`options`: of DeviceThreadRanks."""
    return DeviceThreadRanks(config, **options).make_engine(config)
