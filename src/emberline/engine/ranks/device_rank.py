"""What the process of a rank with a GPU does: it loads its part of the model, then computes its part of every plan."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from emberline.core.environment import visible_gpus
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.engine.gpu.boot import make_region
from emberline.engine.messages import Rejection
from emberline.engine.ranks.control import (
    AllocateCaches,
    ConnectRanks,
    ControlSocket,
    MeasureDevice,
    RankReady,
    StartRank,
)
from emberline.engine.ranks.device_experts import describe_expert_forms
from emberline.engine.ranks.device_follower import DeviceFollower, StepWaiter
from emberline.engine.ranks.device_rank_model import DeviceRankModel, measure_device
from emberline.engine.ranks.device_settings import check_gpu_count, order_visible_gpus
from emberline.engine.ranks.group_memory import NUM_COPIED, GroupMemory
from emberline.engine.ranks.heartbeat import LOST_PEER_STATUS
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.plan_ring import PlanReader
from emberline.engine.ranks.rank_model import ConnectRanksFunction
from emberline.engine.ranks.rank_transfers import RankTransfers
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import tuning
from emberline.kernels.comm.communicator import RankLost


def run_device_rank(
    start: StartRank, leader: ControlSocket, connect: ConnectRanksFunction, reader: PlanReader, memory: GroupMemory
) -> int:
    """Take part in the group until it ends, and return the exit status of the process.

    Raises RankLost, or EmberlineError if the rank cannot go on."""
    message = leader.receive()  # when all ranks have started
    if start.layout.node_of(start.rank):  # the leader has counted only the GPUs of node 0
        check_gpu_count(start.config.parallel, torch.cuda.device_count())
    gpus = order_visible_gpus(start.layout, start.rank, start.config.parallel.ranks_per_gpu)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # CUDA reads it at its first use, which comes now
    with naming_gpu():
        if isinstance(message, MeasureDevice):
            leader.send(measure_device(start.config))
            message = leader.receive()
        if not isinstance(message, ConnectRanks):
            return 1
        rank_model = DeviceRankModel.load(start.config, start.layout, start.rank, connect, message.memory)
        leader.send(rank_model.describe())
        if not isinstance(sizes := leader.receive(), AllocateCaches):
            return 1
        tuning.use_choices(sizes.products)
        buffers = allocate_rank_caches(rank_model, sizes, start.rank, memory)
        gc.freeze()  # objects of the start are permanent
        gc.enable()
        model = rank_model.runner.model
        leader.send(RankReady(model.weight_bytes, describe_expert_forms(model)))

        def count_copies() -> None:
            memory.set(start.rank, NUM_COPIED, memory.get(start.rank, NUM_COPIED) + 1)

        def end_process(error: BaseException) -> None:
            _end_process(leader, error)

        transfers = make_rank_transfers(rank_model, sizes, start.rank, start.layout.num_ranks, memory, end_process)
        follower = DeviceFollower(rank_model.runner, start.layout.pp, buffers, count_copies, transfers, leader.send)
        waiter = StepWaiter(rank_model.check_connections, end_process)
        while (plan := reader.receive()) is not None:
            if (finish := follower.handle(plan)) is not None:
                waiter.add(finish)
    return 0


def allocate_rank_caches(
    rank_model: DeviceRankModel, sizes: AllocateCaches, rank: int, memory: GroupMemory
) -> HostBuffers | None:
    """Allocate the caches of a rank other than the leader; return the buffers of the host tier, if there is one."""
    make_state, layout = SamplingStateFactory(frozenset(), None), sizes.buffer_parts
    pages = 0 if layout is None else layout.pages_per_slot
    rank_model.allocate(
        sizes.num_blocks, sizes.num_slots, make_state, pages_per_slot=pages, draft_model=sizes.draft_model
    )
    if sizes.host_buffers is None or layout is None:
        return None
    buffers = HostBuffers(memory, sizes.host_buffers)
    rank_model.attach_buffers(buffers, layout, rank)
    return buffers


def make_rank_transfers(
    rank_model: DeviceRankModel,
    sizes: AllocateCaches,
    rank: int,
    num_ranks: int,
    memory: GroupMemory,
    on_error: Callable[[BaseException], None],
) -> RankTransfers | None:
    """Return the object that copies this rank's part of KV blocks for other engines; None: no blocks are exchanged."""
    if sizes.transfer_slots is None:
        return None
    device, slots = rank_model.planned.device, HostBuffers(memory, sizes.transfer_slots)
    region = make_region(rank_model.runner, device)
    return RankTransfers(region, device, rank, num_ranks, slots, on_error)


@contextmanager
def naming_gpu() -> Iterator[None]:
    """Raise errors of torch and CUDA as EngineFailed, with the name of this process's GPU."""
    try:
        yield
    except RuntimeError as error:  # includes CUDA errors and torch.OutOfMemoryError
        raise explain_gpu_error(error) from error


def explain_gpu_error(error: RuntimeError) -> EngineFailed:
    reason = str(error).strip().partition("\n")[0]
    hint = "see the server's log"
    if isinstance(error, torch.OutOfMemoryError):
        hint = "lower --gpu-memory-utilization, or end other processes that use the GPU"
    return EngineFailed(f"GPU {name_current_gpu()} failed: {type(error).__name__}: {reason}", hint=hint)


def name_current_gpu() -> str:
    """Return the first entry of CUDA_VISIBLE_DEVICES, which names the GPU that this process uses."""
    return next(iter(visible_gpus() or ["0"]))


def _end_process(leader: ControlSocket, error: BaseException) -> None:
    """Report an error of a step to the leader, and end this process, whose main thread may be waiting for a plan."""
    if isinstance(error, RankLost):
        os._exit(LOST_PEER_STATUS)  # the leader finds out which rank was lost
    traceback.print_exception(error)
    if isinstance(error, RuntimeError):
        error = explain_gpu_error(error)
    elif not isinstance(error, EmberlineError):
        error = EngineFailed(f"{type(error).__name__}: {error}")
    leader.send(Rejection.from_error("", error))
    os._exit(1)
