"""Engines on several ranks that are threads of this process."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from engine_runs import run_engine

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.core.request import FinishReason, Submission
from emberline.engine.engine import Engine
from emberline.engine.ranks.boot import (
    check_same_model,
    make_engine,
    make_shared_host_tier,
    plan_caches,
    share_caches,
)
from emberline.engine.ranks.copy_codec import is_copies
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_loop import compute_step, make_copies
from emberline.engine.ranks.rank_model import RankModel
from emberline.engine.ranks.work_codec import WorkDecoder
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.rendezvous import Rendezvous
from emberline.kernels.comm.thread_group import ThreadGroup
from emberline.models.config import ModelConfig


class ThreadRanks:
    """The other ranks of an engine, as threads."""

    def __init__(
        self, config: EngineConfig, *, over_gloo: bool = False, max_blocks: tuple[int, int] | None = None
    ) -> None:
        """`over_gloo`: whether the threads exchange tensors as processes do.

        `max_blocks`: of the KV cache, for the first group of layers, and for each other group; None: no limit but that
        of the settings."""
        self._store_fd = os.memfd_create("rendezvous") if over_gloo else None
        self.layout = Layout.from_config(config.parallel)
        self._groups: dict[str, ThreadGroup] = {}
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[bytes | None]] = {rank: SimpleQueue() for rank in self.layout.followers}
        self._pool = ThreadPoolExecutor(self.layout.num_ranks)
        ranks = range(self.layout.num_ranks)
        parts = list(self._pool.map(lambda rank: RankModel.load(config, self.layout, rank, self._connect), ranks))
        described = {rank: part.describe() for rank, part in enumerate(parts)}
        check_same_model(described, self.layout)
        self.parts = parts
        self.leader = parts[self.layout.leader]
        num_blocks, num_slots = plan_caches(config, self.leader, described.values(), None)
        if max_blocks is not None:
            num_blocks = min(num_blocks, max_blocks[0] + max_blocks[1] * (len(self.leader.groups.windows) - 1))
        self.sizes = num_blocks, num_slots
        model = ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
        self.memory = GroupMemory.create(self.layout.num_ranks)
        self.caches = share_caches(config, self.memory, self.layout, model, self.leader, self.sizes[0])
        for rank, part in enumerate(parts):
            part.allocate(*self.sizes, None if self.caches is None else self.caches.regions[rank])
        share = self.leader.share
        sizes = share.whole.block_bytes, share.pages_per_slot
        self.host, self.buffers = make_shared_host_tier(config, self.memory, *sizes)
        self._num_copied = dict.fromkeys(self.layout.followers, 0)
        self._num_finished = 0
        self._runs: list[Future[None]] = [
            self._pool.submit(self._run, queue, parts[rank], rank) for rank, queue in self._queues.items()
        ]

    def _connect(self, name: str, rank: int, size: int) -> Communicator:
        if self._store_fd is not None:
            return GlooGroup(Rendezvous(self._store_fd), name, rank, size, connect_timeout_s=20.0, timeout_s=20.0)
        with self._lock:
            group = self._groups.setdefault(name, ThreadGroup(size))
        return group.communicators[rank]

    def _run(self, queue: SimpleQueue[bytes | None], part: RankModel, rank: int) -> None:
        decoder = WorkDecoder(self.layout.pp)
        try:
            while (message := queue.get()) is not None:
                if is_copies(message):
                    make_copies(part, self.buffers, message)
                    self._num_copied[rank] += 1
                else:
                    compute_step(part, decoder, message)
        except BaseException:
            for group in self._groups.values():
                group.abort()
            raise

    def publish(self, plan: bytes) -> None:
        for queue in self._queues.values():
            queue.put(plan)

    def publish_copies(self, copies: bytes) -> None:
        self.publish(copies)

    def publish_beside_steps(self, message: bytes) -> None:
        self.publish(message)

    def finish_copies(self) -> None:
        self._num_finished += 1
        while min(self._num_copied.values()) < self._num_finished:
            assert not any(run.done() for run in self._runs), "a rank has ended"
            time.sleep(0.0001)

    def wait_for(self, kind: type[Any], timeout_s: float) -> dict[int, Any]:
        raise AssertionError(f"these ranks send no {kind.__name__}")

    def finish_step(self) -> None:
        """Nothing measures the time of a step."""

    def check(self) -> None:
        """Nothing can be lost between steps."""

    def end_with_error(self, reason: BaseException) -> EmberlineError:
        self.close()
        return reason if isinstance(reason, EngineFailed) else EngineFailed(f"a step failed: {reason!r}")

    def progress_count(self) -> int:
        return 0

    def close(self) -> None:
        """Let the threads end, and raise the error of one that failed."""
        for queue in self._queues.values():
            queue.put(None)
        for run in self._runs:
            run.result()
        self._pool.shutdown()
        self.memory.close()
        if self._store_fd is not None:
            os.close(self._store_fd)


def make_thread_engine(config: EngineConfig, **options: Any) -> Engine:
    """`options`: of ThreadRanks."""
    ranks = ThreadRanks(config, **options)
    return make_engine(config, ranks, ranks.leader, ranks.sizes[1], ranks.caches, ranks.host, ranks.buffers)


def run_threads(config: EngineConfig, pending: list[Submission], **layout: int) -> dict[str, list[int]]:
    """Return the tokens of an engine in this layout, by id."""
    engine = make_thread_engine(config.with_settings(**layout))
    tokens = run_engine(engine, pending, steps_between=1)
    engine.close()
    return tokens


def run_with_aborts(
    engine: Engine, pending: list[Submission], aborted: Sequence[str], pick: random.Random
) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    """Add submissions at random times, abort some, and close the engine; return tokens and ends of requests by id."""
    tokens: dict[str, list[int]] = {each.id: [] for each in pending}
    ends: dict[str, FinishReason] = {}
    while pending or not engine.idle:
        if pending and pick.random() < 0.7:
            engine.add(pending.pop(0))
        for name in aborted:
            if tokens[name] and pick.random() < 0.2:
                engine.abort(name)
        for output in engine.step():
            tokens[output.id] += output.tokens
            if output.finish is not None:
                assert output.id not in ends
                ends[output.id] = output.finish
    engine.kv.check_invariants()
    engine.close()
    return tokens, ends
