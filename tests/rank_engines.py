"""Engines on several ranks that are threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.engine.engine import Engine
from emberline.engine.ranks.boot import check_same_model, make_engine, plan_caches, share_caches
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_loop import compute_step
from emberline.engine.ranks.rank_part import RankPart
from emberline.engine.ranks.work_codec import WorkDecoder
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.thread_group import ThreadCommunicator, ThreadGroup
from emberline.models.config import ModelConfig


class ThreadRanks:
    """The other ranks of an engine, as threads."""

    def __init__(self, config: EngineConfig) -> None:
        self.layout = Layout.of(config.parallel)
        self._groups: dict[str, ThreadGroup] = {}
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[bytes | None]] = {rank: SimpleQueue() for rank in self.layout.followers}
        self._pool = ThreadPoolExecutor(self.layout.num_ranks)
        ranks = range(self.layout.num_ranks)
        parts = list(self._pool.map(lambda rank: RankPart.load(config, self.layout, rank, self._connect), ranks))
        described = {rank: part.describe() for rank, part in enumerate(parts)}
        check_same_model(described, self.layout)
        self.leader = parts[self.layout.leader]
        self.sizes = plan_caches(config, self.leader, described.values(), None)
        model = ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
        self.memory = GroupMemory.create(self.layout.num_ranks)
        self.caches = share_caches(config, self.memory, self.layout, model, self.leader, self.sizes[0])
        for rank, part in enumerate(parts):
            part.allocate(*self.sizes, None if self.caches is None else self.caches.regions[rank])
        self._runs: list[Future[None]] = [
            self._pool.submit(self._run, queue, parts[rank]) for rank, queue in self._queues.items()
        ]

    def _connect(self, name: str, rank: int, size: int) -> ThreadCommunicator:
        with self._lock:
            group = self._groups.setdefault(name, ThreadGroup(size))
        return group.communicators[rank]

    def _run(self, queue: SimpleQueue[bytes | None], part: RankPart) -> None:
        decoder = WorkDecoder()
        try:
            while (message := queue.get()) is not None:
                compute_step(part, decoder, message)
        except BaseException:
            for group in self._groups.values():
                group.abort()
            raise

    def publish(self, plan: bytes) -> None:
        for queue in self._queues.values():
            queue.put(plan)

    def finish_step(self) -> None:
        """Nothing measures the time of a step."""

    def check(self) -> None:
        """Nothing can be lost between steps."""

    def explain(self, reason: BaseException) -> EmberlineError:
        self.close()
        return EngineFailed(f"a step failed: {reason!r}")

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


def make_thread_engine(config: EngineConfig) -> Engine:
    ranks = ThreadRanks(config)
    return make_engine(config, ranks, ranks.leader, ranks.sizes[1], ranks.caches)
