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
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.heartbeat import HeartbeatThread
from emberline.engine.ranks.plan_ring import PlanReader
from emberline.engine.ranks.rank_part import RankPart, connect_processes
from emberline.engine.ranks.rank_processes import LOST_PEER_STATUS
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
        leader.send(RankStarted(__version__, digest_settings(start.config, start.layout)))
        if not isinstance(leader.receive(), ConnectRanks):
            return 1
        part = RankPart.load(start.config, start.layout, start.rank, partial(connect_processes, start.rendezvous))
        leader.send(part.describe())
        if not isinstance(sizes := leader.receive(), AllocateCaches):
            return 1
        part.allocate(sizes.num_blocks, sizes.num_slots)
        gc.freeze()  # objects of the start are permanent
        gc.enable()
        leader.send(RankReady())
        reader, decoder = PlanReader(memory, start.rank, notice_fd), WorkDecoder(start.layout.pp)
        while (message := reader.receive()) is not None:
            compute_step(part, decoder, message)
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


def compute_step(part: RankPart, decoder: WorkDecoder, message: bytes) -> None:
    """Compute this rank's part of a step. `message`: from the leader's WorkEncoder."""
    step = decoder.decode(message)
    part.executor.clear(step.cleared)
    capture = HiddenCapture.allocate(step.captured_layers, len(step.columns.tokens), part.model.config.hidden)
    part.executor.compute(step.requests, capture, step.columns)
