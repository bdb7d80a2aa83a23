"""`emberline bench soak`: sends many streams for minutes.

It checks that no request fails, that no KV block leaks, and that the memory of the server does not grow.
"""

from __future__ import annotations

import asyncio
import random
import time
from urllib.parse import urlsplit

import msgspec
import numpy as np

from emberline.bench import workload
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.bench.memory_growth import WARM_UP, MemoryGrowth
from emberline.bench.report import BenchReport
from emberline.bench.serve import add_latencies, find_local_processes

SETTLE_S = 60.0  # seconds for the last requests to end
LENGTHS = (workload.LogNormal(4.0, 0.8, 512), workload.LogNormal(3.5, 0.6, 96))  # prompts, outputs


async def run_soak(
    client: CompletionClient, url: str, streams: int, duration_s: float, disconnect_fraction: float, vocab_size: int
) -> BenchReport:
    report = BenchReport("soak", {"streams": streams, "seconds": duration_s, "abandon": disconnect_fraction})
    end = time.perf_counter() + duration_s
    growth = MemoryGrowth(settled=WARM_UP * duration_s)
    watcher = asyncio.create_task(_sample_memory(url, growth, interval_s=min(2.0, duration_s / 20)))
    began = time.perf_counter()
    workers = [_run_client(client, end, seed, disconnect_fraction, vocab_size) for seed in range(streams)]
    traces = [trace for done in await asyncio.gather(*workers) for trace in done]
    wall = time.perf_counter() - began
    watcher.cancel()
    client.close()
    good = [trace for trace in traces if trace.error is None]
    report.add("completed", sum(not trace.abandoned for trace in good), "requests")
    report.add("abandoned", sum(trace.abandoned for trace in good), "requests")
    report.add("errors", len(traces) - len(good), "requests")
    report.config["first_errors"] = sorted({trace.error for trace in traces if trace.error})[:5]
    report.add("output", sum(trace.tokens or len(trace.event_times) for trace in good) / wall, "tok/s")
    add_latencies(report, good)
    growth.add_results(report)
    await _add_idle_stats(report, url)
    return report


async def _run_client(
    client: CompletionClient, end_time: float, seed: int, disconnect_fraction: float, vocab_size: int
) -> list[RequestTrace]:
    dice = random.Random(seed)
    rng = np.random.default_rng(seed)
    sizes = workload.draw_lognormal_lengths(1000, *LENGTHS, seed=seed)
    traces: list[RequestTrace] = []
    while time.perf_counter() < end_time:
        prompt, output = sizes[len(traces) % len(sizes)]
        leave = dice.randint(1, max(1, output // 2)) if dice.random() < disconnect_fraction else None
        trace = await client.complete(workload.draw_random_tokens(prompt, rng, vocab_size), output, leave)
        traces.append(trace)
        if trace.error:
            await asyncio.sleep(0.5)  # do not flood a dead server
    return traces


async def _sample_memory(url: str, growth: MemoryGrowth, interval_s: float) -> None:
    while True:
        pids = await asyncio.to_thread(find_local_processes, url)  # each time anew, since the engine may have restarted
        growth.record_samples(pids, time.perf_counter())
        await asyncio.sleep(interval_s)


async def _add_idle_stats(report: BenchReport, url: str) -> None:
    """Wait until no request is open, and add the number of KV blocks that are then neither free nor cached (leaked).

    Servers other than Emberline do not report their blocks; nothing is added for them.
    """
    at = urlsplit(url)
    connection = MinimalHTTPConnection(f"{at.scheme}://{at.netloc}")
    deadline = time.perf_counter() + SETTLE_S
    stats: dict[str, float] = {}
    try:
        while time.perf_counter() < deadline:
            stats = msgspec.json.decode(await connection.fetch("/stats"))
            if not stats["running"] and not stats["waiting"]:
                break
            await asyncio.sleep(1.0)
    except (HTTPRequestFailed, ValueError, KeyError) as e:
        report.config["stats"] = str(e)
        return
    finally:
        connection.close()
    report.add("unended", stats["running"] + stats["waiting"], "requests")
    report.add("leaked", stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"], "blocks")
    report.add("engine_restarts", stats["engine_restarts"], "times")
    report.add("preemptions", stats["preemptions"], "times")
