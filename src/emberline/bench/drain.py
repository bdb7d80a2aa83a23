"""`emberline bench drain`: how long streams pause while `emberline drain --move` moves them to another worker.

The benchmark starts a router and two workers, each worker on its own core. It opens streams, which the router spreads
over both workers. When every stream has some tokens, it drains one worker, and the streams of that worker move to the
other. The pause of a stream is its longest time without a token after the drain has begun. The streams of the second
worker count too, because the arriving streams may delay them. The next round drains the other worker.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from emberline.bench import workload
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.cluster import LocalCluster
from emberline.bench.connection import MinimalHTTPConnection
from emberline.bench.report import BenchReport
from emberline.bench.split import SERVED_NAME, WORKER_OPTIONS
from emberline.core.errors import EmberlineError

ROUND_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.02  # seconds between two checks of the streams


@dataclass(frozen=True, slots=True)
class DrainBenchPlan:
    streams: int
    prompt: int  # tokens of each prompt
    output: int
    after: int  # tokens of each stream before the drain
    rounds: int


@dataclass(slots=True)
class StreamPauses:
    """The longest times without a token, in seconds, one value per round."""

    worst: list[float] = field(default_factory=list)  # longest pause of any stream, by round
    median: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)  # longest pause before the drain
    drain: list[float] = field(default_factory=list)  # seconds of the drain call
    moved: list[float] = field(default_factory=list)  # streams that moved, by round
    errors: int = 0


def bench(model: str, vocab_size: int, plan: DrainBenchPlan, log_dir: Path) -> BenchReport:
    report = BenchReport("drain", {"model": model, **{name: getattr(plan, name) for name in plan.__slots__}})
    pauses = asyncio.run(_run_rounds(model, vocab_size, plan, log_dir))
    report.add("pause_worst", pauses.worst, "s")
    report.add("pause_worst_of_all_rounds", max(pauses.worst), "s")
    report.add("pause_median", pauses.median, "s")
    report.add("pause_worst_before_the_drain", pauses.before, "s")
    report.add("drain_call", pauses.drain, "s")
    report.add("streams_moved", pauses.moved, "streams")
    report.add("errors", pauses.errors, "streams")
    return report


async def _run_rounds(model: str, vocab_size: int, plan: DrainBenchPlan, log_dir: Path) -> StreamPauses:
    rng, pauses = np.random.default_rng(0), StreamPauses()
    async with LocalCluster({"both": 2}, [model, *WORKER_OPTIONS], log_dir, pin_workers_to_cores=True) as cluster:
        client = CompletionClient(f"{cluster.url}/v1", SERVED_NAME)
        await asyncio.gather(
            *(client.complete(workload.draw_random_tokens(plan.prompt, rng, vocab_size), 8) for _ in range(4))
        )
        for number in range(plan.rounds):
            prompts = [workload.draw_random_tokens(plan.prompt, rng, vocab_size) for _ in range(plan.streams)]
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await _run_round(cluster, client, plan, prompts, cluster.workers[number % 2].name, pauses)
            print(f"round {number + 1}: worst pause {pauses.worst[-1]:.2f} s", flush=True)
        client.close()
    return pauses


async def _run_round(
    cluster: LocalCluster,
    client: CompletionClient,
    plan: DrainBenchPlan,
    prompts: list[list[int]],
    worker_name: str,
    pauses: StreamPauses,
) -> None:
    traces = [RequestTrace(time.perf_counter()) for _ in prompts]
    async with asyncio.TaskGroup() as group:
        for prompt, trace in zip(prompts, traces, strict=True):
            group.create_task(client.complete(prompt, plan.output, trace_to_fill=trace))
        while any(len(trace.event_times) < plan.after and trace.error is None for trace in traces):
            await asyncio.sleep(POLL_INTERVAL_S)
        moved, began = await _count_migrations(cluster), time.perf_counter()
        await _request_drain(cluster, worker_name, on=True, move=True)
        pauses.drain.append(time.perf_counter() - began)
    await _request_drain(cluster, worker_name, on=False)
    pauses.moved.append(await _count_migrations(cluster) - moved)
    pauses.errors += sum(trace.error is not None for trace in traces)
    longest = [max((b - a for a, b in pairwise(trace.event_times) if b > began), default=0.0) for trace in traces]
    pauses.worst.append(max(longest))
    pauses.median.append(float(np.median(longest)))
    pauses.before.append(max(b - a for trace in traces for a, b in pairwise(trace.event_times) if b <= began))
    if not any(trace.ended and trace.ended > began for trace in traces):
        raise EmberlineError(
            "all streams ended before the worker was drained", hint="raise --output, the tokens of a stream"
        )


async def _count_migrations(cluster: LocalCluster) -> int:
    status = await cluster.fetch_router_status() or {}
    return sum(row["count"] for row in status.get("migrations", ()) if row["outcome"] == "went on")


async def _request_drain(cluster: LocalCluster, worker_name: str, **options: Any) -> None:
    connection = MinimalHTTPConnection(cluster.url, cluster.key)
    try:
        await connection.fetch("/cluster/drain", msgspec.json.encode({"name": worker_name, **options}))
    finally:
        connection.close()
