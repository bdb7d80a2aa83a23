"""`emberline bench parallel`: what it costs to send the plan of each step to the ranks of an engine.

The readers are processes, as in an engine, and decode every plan. Times are CPU times of one thread, because a machine
may have fewer cores than readers, and an engine's ranks have cores of their own.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from emberline.bench.report import BenchReport
from emberline.core.errors import EngineFailed
from emberline.core.plan import WorkItem
from emberline.engine.ranks.group_memory import READ_POSITION, GroupMemory
from emberline.engine.ranks.plan_ring import PlanReader, PlanWriter
from emberline.engine.ranks.work_codec import WorkDecoder, WorkEncoder

READER_COMMAND = (sys.executable, "-m", "emberline.bench.parallel_reader")
READER_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.0001
BLOCK_SIZE, MAX_BLOCK, VOCAB = 16, 100_000, 128_256
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class PlanBenchSettings:
    ranks: int = 8  # that read plans
    requests: int = 256  # each with one token in each step
    context: int = 4096  # tokens of each request at the start
    steps: int = 300


def bench(settings: PlanBenchSettings) -> BenchReport:
    report = BenchReport("parallel", {"requests": settings.requests, "context": settings.context})
    work, pick = _make_decode_work(settings), random.Random(0)
    encoder, publish_us, plan_bytes, latency_us = WorkEncoder(), list[float](), list[int](), list[float]()
    with _start_readers(settings) as readers:
        for step in range(settings.steps):
            _advance(work, step, pick)
            began, cpu = time.perf_counter(), time.thread_time()
            plan = encoder.encode(work)
            readers.writer.publish(plan)
            publish_us.append((time.thread_time() - cpu) * 1e6)
            readers.wait()
            latency_us.append((time.perf_counter() - began) * 1e6)
            plan_bytes.append(len(plan))
        read_us = readers.finish()
    kept = slice(min(WARM_UP_STEPS, settings.steps // 2), None)
    publish, read, name = median(publish_us[kept]), median(read_us), f"{settings.ranks}_ranks"
    report.add(f"plan_publish_{name}_us", publish, "us")
    report.add("plan_read_us", read_us, "us")
    peer = _measure_pickle(work, settings.ranks)
    report.add(f"plan_cost_{name}_us", publish / settings.ranks + read, "us", peer=peer)
    report.add(f"plan_latency_{name}_us", median(latency_us[kept]), "us")
    report.add("plan_bytes", float(median(plan_bytes[kept])), "B")
    return report


class PlanReaders:
    """The processes that read the plans, one for each rank."""

    def __init__(self, memory: GroupMemory, ranks: int) -> None:
        self._memory, self._processes = memory, list[subprocess.Popen[str]]()
        notice_fds: dict[int, int] = {}
        for rank in range(ranks):
            read_fd, notice_fds[rank] = os.pipe2(os.O_CLOEXEC)
            args = [str(each) for each in (ranks, rank, memory.fd, read_fd)]
            self._processes.append(
                subprocess.Popen(
                    [*READER_COMMAND, *args], stdout=subprocess.PIPE, pass_fds=(memory.fd, read_fd), text=True
                )
            )
            os.close(read_fd)
        self.writer = PlanWriter(memory, notice_fds, timeout_s=READER_TIMEOUT_S)
        self._ranks = ranks

    def wait(self) -> None:
        """Wait until all readers have read the latest plan."""
        deadline = time.monotonic() + READER_TIMEOUT_S
        while min(self._memory.get(rank, READ_POSITION) for rank in range(self._ranks)) < self.writer.position:
            if time.monotonic() > deadline:
                raise EngineFailed(f"a reader did not read a plan within {READER_TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)

    def finish(self) -> list[float]:
        """End the readers. Return for each of them the median microseconds that it took to read and decode a plan."""
        self.writer.close()
        return [float(process.communicate(timeout=READER_TIMEOUT_S)[0]) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def _start_readers(settings: PlanBenchSettings) -> Iterator[PlanReaders]:
    memory = GroupMemory.create(settings.ranks)
    readers = PlanReaders(memory, settings.ranks)
    try:
        yield readers
    finally:
        readers.kill()
        memory.close()


def read_plans(reader: PlanReader) -> float:
    """Read and decode plans until there are no more; return the median CPU time of a plan in microseconds."""
    decoder, times = WorkDecoder(), list[float]()
    began = time.thread_time()
    while (plan := reader.receive()) is not None:
        decoder.decode(plan)
        now = time.thread_time()
        times.append((now - began) * 1e6)
        began = now
    return median(times[min(WARM_UP_STEPS, len(times) // 2) :])


def _make_decode_work(settings: PlanBenchSettings) -> list[WorkItem]:
    pick = random.Random(1)
    return [
        WorkItem(
            f"cmpl-{pick.getrandbits(128):032x}#0",
            settings.context + i,
            (0,),
            [pick.randrange(MAX_BLOCK) for _ in range((settings.context + i) // BLOCK_SIZE + 1)],
            samples=True,
        )
        for i in range(settings.requests)
    ]


def _advance(work: list[WorkItem], step: int, pick: random.Random) -> None:
    """Give each request its next token and, if needed, a new block. In some steps, a new request replaces an old one.

    As in the scheduler, each step gets new items, and blocks are appended to the existing block tables."""
    for i, w in enumerate(work):
        name, blocks = w.id, w.blocks
        assert isinstance(blocks, list)
        if step % 16 == 0 and i == step % len(work):
            name, blocks = f"cmpl-{pick.getrandbits(128):032x}#0", list(blocks)
        if (w.start + 1) % BLOCK_SIZE == 0:
            blocks.append(pick.randrange(MAX_BLOCK))
        work[i] = WorkItem(name, w.start + 1, (pick.randrange(VOCAB),), blocks, samples=True)


def _measure_pickle(work: list[WorkItem], ranks: int) -> float:
    """Return the microseconds that pickling a whole plan costs each rank, without the time to send it."""
    dump_us, load_us = list[float](), list[float]()
    for _ in range(30):
        began = time.thread_time()
        plan = pickle.dumps(work)
        dumped = time.thread_time()
        pickle.loads(plan)
        dump_us.append((dumped - began) * 1e6)
        load_us.append((time.thread_time() - dumped) * 1e6)
    return median(dump_us) / ranks + median(load_us)
