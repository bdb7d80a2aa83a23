"""`emberline bench overhead`: how much slower a job is over HTTP than in the engine alone.

The same job runs alternately in an engine without a server, and over HTTP in a server with the same settings on the
same cores. The wall time runs from submission to the last token. The overhead is the server's wall time divided by the
engine's, minus one. It contains HTTP, detokenization, JSON, the socket between server and engine, and the measuring
client, whose CPU time is reported too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from emberline.bench import processes, workload
from emberline.bench.client import CompletionClient
from emberline.bench.contender import ContenderProcess
from emberline.bench.contenders import BenchEnvironment, make_emberline_spec
from emberline.bench.job import BenchJob
from emberline.bench.report import BenchReport
from emberline.bench.serve import find_local_processes, run_closed_loop
from emberline.bench.server_launch import EmberlineServer
from emberline.core.cpus import core_count
from emberline.core.errors import EmberlineError
from emberline.core.jsonfile import read_object
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class OverheadRun:
    """One job over HTTP: the wall time and the CPU time of server and client, in seconds."""

    wall: float
    api: float
    client: float


def bench(model: str, batch_sizes: list[int], threads: int, rounds: int, peers_dir: Path) -> BenchReport:
    ground = BenchEnvironment(resolve_model(model), None, threads or core_count(), peers_dir)
    vocab = ModelConfig.from_hf(read_object(ground.model / "config.json")).vocab
    jobs = {batch: workload.make_decode_job(batch, vocab) for batch in batch_sizes}
    report = BenchReport("overhead", {"model": model, "threads": ground.threads, "rounds": rounds, "target_percent": 5})
    engine = ContenderProcess(make_emberline_spec(ground), peers_dir / "logs" / "overhead-engine.log")
    try:
        settings = ["--no-prefix-cache", "--embedder", "none", "--threads", str(ground.threads)]
        with EmberlineServer([model, *settings], peers_dir / "logs" / "overhead-server.log") as server:
            report.add("ready", server.ready_seconds, "s")
            for batch, job in jobs.items():
                _measure_batch_size(report, batch, job, engine, server, model, rounds)
    finally:
        engine.stop()
    return report


def _measure_batch_size(
    report: BenchReport,
    batch_size: int,
    job: BenchJob,
    engine: ContenderProcess,
    server: EmberlineServer,
    model: str,
    rounds: int,
) -> None:
    alone: list[float] = []
    turns: list[OverheadRun] = []
    for turn in range(rounds + 1):  # the first is a warm-up
        wall = engine.run_job(job, 600.0).timeline.wall_seconds
        through = asyncio.run(_run_over_http(server, model, job))
        if turn:
            alone.append(wall)
            turns.append(through)
    tokens = sum(job.outputs)
    report.add(f"engine_{batch_size}", alone, "s")
    report.add(f"api_{batch_size}", [t.wall for t in turns], "s")
    # Neighbouring runs are compared, since a disturbance affects both.
    ratios = [100 * (t.wall / wall - 1) for t, wall in zip(turns, alone, strict=True)]
    report.add(f"overhead_{batch_size}", ratios, "%")
    report.add(f"api_cpu_{batch_size}", [t.api / tokens * 1e6 for t in turns], "us/token")
    report.add(f"client_cpu_{batch_size}", [t.client / tokens * 1e6 for t in turns], "us/token")


async def _run_over_http(server: EmberlineServer, model: str, job: BenchJob) -> OverheadRun:
    client = CompletionClient(server.url, model)
    pid = find_local_processes(server.url)["server"]
    before = processes.read_usage(pid)
    began, cpu = time.perf_counter(), time.process_time()
    traces = await run_closed_loop(client, job, len(job.prompts))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    after = processes.read_usage(pid)
    if failed := [trace.error for trace in traces if trace.error]:
        raise EmberlineError(f"{len(failed)} of {len(traces)} requests failed, the first with: {failed[0]}")
    assert before is not None and after is not None
    assert [trace.tokens for trace in traces] == job.outputs
    return OverheadRun(wall, after.cpu - before.cpu, cpu)
