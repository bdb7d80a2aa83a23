"""`emberline bench serve`: latencies of any OpenAI-compatible server at a fixed concurrency or request rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from emberline.bench import processes, workload
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.job import BenchJob
from emberline.bench.report import BenchReport
from emberline.core.errors import InvalidRequest

SHARES = {"p50": 50, "p90": 90, "p99": 99}


async def run_closed_loop(client: CompletionClient, job: BenchJob, concurrency: int) -> list[RequestTrace]:
    """Send all requests of the job, with `concurrency` requests open at any time."""
    todo = iter(list(zip(job.prompts, job.outputs, strict=True)))

    async def run_client() -> list[RequestTrace]:
        return [await client.complete(prompt, output) for prompt, output in todo]

    done = await asyncio.gather(*(run_client() for _ in range(concurrency)))
    client.close()
    return [trace for traces in done for trace in traces]


async def run_open_loop(client: CompletionClient, job: BenchJob, rate: float) -> list[RequestTrace]:
    """Send the requests of the job at random times (a Poisson process), whether or not the server keeps up."""
    waits = np.random.default_rng(0).exponential(1 / rate, len(job.prompts))

    async def send_at(at: float, prompt: list[int], output: int) -> RequestTrace:
        await asyncio.sleep(at)
        return await client.complete(prompt, output)

    arrivals = zip(np.cumsum(waits) - waits[0], job.prompts, job.outputs, strict=True)
    done = await asyncio.gather(*(send_at(float(at), prompt, output) for at, prompt, output in arrivals))
    client.close()
    return list(done)


def bench(
    client: CompletionClient,
    url: str,
    job: BenchJob,
    concurrency: int | None,
    rate: float | None,
    config: dict[str, object],
) -> BenchReport:
    if (concurrency is None) == (rate is None):
        raise InvalidRequest("exactly one of --concurrency and --rate must be given", param="--concurrency")
    pids = find_local_processes(url)
    before = {name: processes.read_usage(pid) for name, pid in pids.items()}
    began, cpu = time.perf_counter(), time.process_time()
    run = (
        run_closed_loop(client, job, concurrency)
        if concurrency is not None
        else run_open_loop(client, job, rate or 1.0)
    )
    traces = asyncio.run(run)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    report = BenchReport("serve", config)
    add_latencies(report, traces)
    good = [trace for trace in traces if trace.error is None]
    tokens = sum(trace.tokens for trace in good)
    report.add("output", tokens / wall, "tok/s")
    report.add("input", sum(trace.prompt_tokens for trace in good) / wall, "tok/s")
    report.add("completed", len(good) / wall, "requests/s")
    report.add("errors", len(traces) - len(good), "requests")
    report.config["first_errors"] = sorted({t.error for t in traces if t.error})[:5]
    report.add("client_cpu", cpu / max(tokens, 1) * 1e6, "us/token")
    for name, pid in pids.items():
        after, was = processes.read_usage(pid), before[name]
        if after is not None and was is not None:
            report.add(f"{name}_cpu", (after.cpu - was.cpu) / max(tokens, 1) * 1e6, "us/token")
    return report


def add_latencies(report: BenchReport, traces: Sequence[RequestTrace]) -> None:
    """Add percentiles of TTFT, ITL and end-to-end latency to the report.

    TTFT and end-to-end latency are defined in core/events.py. ITL is the time between two events of a stream.
    """
    timings = [trace.timing for trace in traces if trace.error is None and not trace.abandoned]
    families = {
        "ttft": [t.ttft for t in timings if t.ttft is not None],
        "itl": [gap for trace in traces for gap in trace.inter_token_seconds],
        "e2e": [t.e2e for t in timings if t.e2e is not None],
    }
    for name, seconds in families.items():
        for label, share in SHARES.items():
            if seconds:
                report.add(f"{name}_{label}", float(np.percentile(seconds, share)) * 1e3, "ms")


def find_local_processes(url: str) -> dict[str, int]:
    """Return the pids of the server's processes by name, or {} if the server runs on a different machine."""
    at = urlsplit(url)
    if at.hostname not in ("127.0.0.1", "localhost", "::1") or at.port is None:
        return {}
    pid = processes.find_listener_pid(at.port)
    return processes.find_process_tree(pid) if pid is not None else {}


def make_uniform_job(count: int, input_len: int, output_len: int, vocab_size: int) -> BenchJob:
    return workload.make_job([(input_len, output_len)] * count, vocab_size)
