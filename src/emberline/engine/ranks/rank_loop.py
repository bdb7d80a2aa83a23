"""What a rank's process does: it loads its part of the model, then computes its part of every plan.

The process ends when the leader ends or closes the ring of plans."""

from __future__ import annotations

import gc
import socket
import traceback
from functools import partial

from emberline import __version__
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.engine.messages import Rejection
from emberline.engine.ranks.control import (
    AllocateCaches,
    ConnectRanks,
    ControlSocket,
    RankReady,
    RankStarted,
    StartRank,
    digest_settings,
)
from emberline.engine.ranks.copy_codec import decode_copies, is_copies
from emberline.engine.ranks.expert_moves import decode_moves
from emberline.engine.ranks.group_memory import NUM_COPIED, GroupMemory
from emberline.engine.ranks.heartbeat import LOST_PEER_STATUS, HeartbeatThread
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.plan_ring import PlanReader
from emberline.engine.ranks.rank_model import RankModel, connect_processes
from emberline.engine.ranks.shared_caches import map_cache
from emberline.engine.ranks.work_codec import WorkDecoder
from emberline.kernels import ops
from emberline.kernels.comm.communicator import RankLost
from emberline.models.forward import HiddenCapture


def run_rank_process(memory: GroupMemory, heartbeat: HeartbeatThread, control_fd: int, notice_fd: int) -> int:
    """Take part in the group until it ends, and return the exit status of the process."""
    heartbeat.progress_counter = ops.progress_count
    leader = ControlSocket(socket.socket(fileno=control_fd))
    try:
        if not isinstance(start := leader.receive(), StartRank):
            return 1
        if start.layout.node_of(start.rank):
            heartbeat.end_with_supervisor(start.layout.leader, start.config.parallel.rank_timeout)
        leader.send(RankStarted(__version__, digest_settings(start.config, start.layout)))
        connect, reader = partial(connect_processes, start.rendezvous), PlanReader(memory, start.rank, notice_fd)
        if start.config.device == "cuda":
            from emberline.engine.ranks.device_rank import run_device_rank  # imported if needed, to start sooner

            return run_device_rank(start, leader, connect, reader, memory)
        if not isinstance(leader.receive(), ConnectRanks):
            return 1
        rank_model = RankModel.load(start.config, start.layout, start.rank, connect)
        leader.send(rank_model.describe())
        if not isinstance(sizes := leader.receive(), AllocateCaches):
            return 1
        region = None
        if (offset := sizes.cache_offsets.get(start.rank)) is not None:
            region = map_cache(memory, offset, rank_model.kv_layout, sizes.num_blocks)
        rank_model.allocate(sizes.num_blocks, sizes.num_slots, region)
        buffers = None if sizes.host_buffers is None else HostBuffers(memory, sizes.host_buffers)
        gc.freeze()  # objects of the start are permanent
        gc.enable()
        leader.send(RankReady())
        decoder = WorkDecoder(start.layout.pp)
        num_copied = 0
        while (message := reader.receive()) is not None:
            if is_copies(message):
                make_copies(rank_model, buffers, message)
                num_copied += 1
                memory.set(start.rank, NUM_COPIED, num_copied)
            else:
                compute_step(rank_model, decoder, message)
    except RankLost:
        return LOST_PEER_STATUS  # the leader finds out which rank was lost
    except EmberlineError as error:
        leader.send(Rejection.from_error("", error))
        return 1
    except Exception as error:
        traceback.print_exc()
        leader.send(Rejection.from_error("", EngineFailed(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def make_copies(rank_model: RankModel, buffers: HostBuffers | None, message: bytes) -> None:
    """Copy this rank's part of KV blocks to and from host buffers. `message`: the result of `encode_copies`."""
    assert buffers is not None
    rank_model.executor.copy(*decode_copies(message, buffers.find))


def compute_step(rank_model: RankModel, decoder: WorkDecoder, message: bytes) -> None:
    """Compute this rank's part of a step, or load other experts. `message`: from WorkEncoder or `encode_moves`."""
    if (moves := decode_moves(message)) is not None:
        rank_model.move_experts(moves)
        return
    step = decoder.decode(message)
    rank_model.executor.clear(step.cleared)
    capture = HiddenCapture.allocate(step.captured_layers, len(step.columns.tokens), rank_model.model.config.hidden)
    rank_model.executor.compute(step.requests, capture, step.columns)
