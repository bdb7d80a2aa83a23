"""`emberline bench soak`: many streams for minutes. Nothing may fail, leak a block or grow."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import numpy as np

from emberline.bench import processes, workload
from emberline.bench.client import Client, Trace
from emberline.bench.connection import Connection, HTTPFailed
from emberline.bench.report import Report
from emberline.bench.serve import latencies, local

WARM_UP = 0.25  # of the time, until memory is expected to be flat
SETTLE = 60.0  # seconds that the last requests may take to end
LENGTHS = ((4.0, 0.8, 512), (3.5, 0.6, 96))  # log-normal, prompts and outputs


@dataclass(slots=True)
class Samples:
    times: list[float] = field(default_factory=list)
    rss: dict[str, list[float]] = field(default_factory=dict)  # MB, by process


async def soak(client: Client, url: str, streams: int, seconds: float, abandon: float, vocab: int) -> Report:
    report = Report("soak", {"streams": streams, "seconds": seconds, "abandon": abandon})
    end = time.perf_counter() + seconds
    samples = Samples()
    watcher = asyncio.create_task(_watch(url, samples, interval=min(2.0, seconds / 20)))
    began = time.perf_counter()
    workers = [_worker(client, end, seed, abandon, vocab) for seed in range(streams)]
    traces = [trace for done in await asyncio.gather(*workers) for trace in done]
    wall = time.perf_counter() - began
    watcher.cancel()
    client.close()
    good = [trace for trace in traces if trace.error is None]
    report.add("completed", sum(not trace.abandoned for trace in good), "requests")
    report.add("abandoned", sum(trace.abandoned for trace in good), "requests")
    report.add("errors", len(traces) - len(good), "requests")
    report.config["first_errors"] = sorted({trace.error for trace in traces if trace.error})[:5]
    report.add("output", sum(trace.tokens or len(trace.marks) for trace in good) / wall, "tok/s")
    latencies(report, good)
    _memory(report, samples)
    await _idle(report, url)
    return report


async def _worker(client: Client, end: float, seed: int, abandon: float, vocab: int) -> list[Trace]:
    dice = random.Random(seed)
    rng = np.random.default_rng(seed)
    sizes = workload.lengths(1000, *LENGTHS, seed=seed)
    traces: list[Trace] = []
    while time.perf_counter() < end:
        prompt, output = sizes[len(traces) % len(sizes)]
        leave = dice.randint(1, max(1, output // 2)) if dice.random() < abandon else None
        trace = await client.complete(workload.tokens(prompt, rng, vocab), output, leave)
        traces.append(trace)
        if trace.error:
            await asyncio.sleep(0.5)  # a dead server is not asked a thousand times a second
    return traces


async def _watch(url: str, samples: Samples, interval: float) -> None:
    began = time.perf_counter()
    while True:
        pids = await asyncio.to_thread(local, url)  # again each time: an engine may have been restarted
        used = {name: processes.usage(pid) for name, pid in pids.items()}
        samples.times.append(time.perf_counter() - began)
        for name, usage in used.items():
            if usage is not None:
                missed = len(samples.times) - 1 - len(samples.rss.setdefault(name, []))
                samples.rss[name] += [float("nan")] * missed + [usage.rss / 1e6]
        await asyncio.sleep(interval)


def _memory(report: Report, samples: Samples) -> None:
    """Slope of a line through what came after the warm-up, and the most over the least of it."""
    for name, rss in samples.rss.items():
        start = int(len(rss) * WARM_UP)
        x, y = np.array(samples.times[start : len(rss)]) / 60, np.array(rss[start:])
        known = ~np.isnan(y)
        if known.sum() >= 3:
            x, y = x[known], y[known]
            report.add(f"{name}_rss", float(y[-1]), "MB", spread=(float(y.min()), float(y.max())))
            report.add(f"{name}_rss_slope", float(np.polyfit(x, y, 1)[0]), "MB/minute")
            report.add(f"{name}_rss_max_over_min", float(y.max() / y.min()), "x")


async def _idle(report: Report, url: str) -> None:
    """With nothing to do every block must be free or cached. Only our own server tells."""
    at = urlsplit(url)
    connection = Connection(f"{at.scheme}://{at.netloc}")
    deadline = time.perf_counter() + SETTLE
    stats: dict[str, float] = {}
    try:
        while time.perf_counter() < deadline:
            stats = msgspec.json.decode(await connection.fetch("/stats"))
            if not stats["running"] and not stats["waiting"]:
                break
            await asyncio.sleep(1.0)
    except (HTTPFailed, ValueError, KeyError) as e:
        report.config["stats"] = str(e)
        return
    finally:
        connection.close()
    report.add("unended", stats["running"] + stats["waiting"], "requests")
    report.add("leaked", stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"], "blocks")
    report.add("engine_restarts", stats["engine_restarts"], "times")
    report.add("preemptions", stats["preemptions"], "times")
