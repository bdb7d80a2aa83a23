"""`emberline bench router`: the router's overhead.

Fake workers stream events as fast as the client reads them, or with a fixed time between events. The same requests are
sent to a worker directly and through the router. CPU time is that of the router's process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles

import msgspec

from emberline.bench import processes
from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import running_process
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

READY_TIMEOUT_S = 30.0
PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RouterBenchPlan:
    workers: int
    streams: int  # open at the same time
    requests: int
    events: int  # of one reply
    pace: float  # seconds between two events
    prompt: int  # bytes


@dataclass(frozen=True, slots=True)
class RouterBenchRun:
    wall: float
    cpu: float  # CPU seconds of the router
    first: list[float]  # seconds to the first byte
    rss: int
    waited: float  # seconds in which the router was ready to run but had no core


def bench(plan: RouterBenchPlan, rounds: int) -> BenchReport:
    config = {name: getattr(plan, name) for name in plan.__slots__}
    report = BenchReport("router", {**config, "rounds": rounds})
    python = (sys.executable, "-m")
    with ExitStack() as stack:
        port = free_port()
        command = (*python, "emberline.cli", "router", "--port", str(port), "--queue", "100")
        router = stack.enter_context(running_process(*command))
        url = f"http://127.0.0.1:{port}"
        ports = [free_port() for _ in range(plan.workers)]
        for own in ports:
            fake = (*python, "emberline.cluster.fake", "--router", url, "--name", f"fake-{own}", "--port", str(own))
            stack.enter_context(running_process(*fake, "--pace", str(plan.pace), "--max-running", str(plan.streams)))
        asyncio.run(_wait_until_ready(url, plan.workers))
        turns: list[RouterBenchRun] = []
        direct: list[RouterBenchRun] = []
        short: list[RouterBenchRun] = []
        for turn in range(rounds + 1):  # the first is a warm-up
            through = asyncio.run(_run_clients(url, router.pid, plan, plan.events))
            straight = asyncio.run(_run_clients(f"http://127.0.0.1:{ports[0]}", router.pid, plan, plan.events))
            single = asyncio.run(_run_clients(url, router.pid, plan, 1))
            if turn:
                turns.append(through)
                direct.append(straight)
                short.append(single)
        _add_results(report, plan, turns, direct, short)
    return report


def _add_results(
    report: BenchReport,
    plan: RouterBenchPlan,
    routed_runs: list[RouterBenchRun],
    direct_runs: list[RouterBenchRun],
    single_event_runs: list[RouterBenchRun],
) -> None:
    requests, sent = plan.requests, plan.events + 3  # finish, usage and [DONE] follow the tokens, in one write
    report.add("cpu_per_request", [1e6 * turn.cpu / requests for turn in single_event_runs], "us")
    more = [
        (long.cpu - one.cpu) / requests / (plan.events - 1)
        for long, one in zip(routed_runs, single_event_runs, strict=True)
    ]
    report.add("cpu_per_event", [1e6 * each for each in more], "us")
    report.add("cores_busy", [turn.cpu / turn.wall for turn in routed_runs], "cores")
    report.add("waited_for_a_core", [turn.waited / turn.wall for turn in routed_runs], "of the time")
    report.add("events", [requests * sent / turn.wall for turn in routed_runs], "events/s")
    report.add("events/direct", [requests * sent / turn.wall for turn in direct_runs], "events/s")
    for name, share in (("p50", 49), ("p99", 98)):
        with_, without = ([quantiles(t.first, n=100)[share] for t in each] for each in (routed_runs, direct_runs))
        report.add(f"first_byte_{name}", [1e3 * each for each in with_], "ms", peer=1e3 * median(without))
    report.add("rss", max(turn.rss for turn in routed_runs) / 1e6, "MB")


async def _run_clients(url: str, router_pid: int, plan: RouterBenchPlan, events: int) -> RouterBenchRun:
    """Send requests from `plan.streams` clients at once. Each client sends its next request after a reply."""
    left = iter(range(plan.requests))
    first: list[float] = []
    before = processes.read_usage(router_pid)
    began = time.perf_counter()
    await asyncio.gather(*(_run_client(url, left, plan, events, first, i / plan.streams) for i in range(plan.streams)))
    wall, after = time.perf_counter() - began, processes.read_usage(router_pid)
    assert before is not None and after is not None and len(first) == plan.requests
    return RouterBenchRun(wall, after.cpu - before.cpu, first, after.rss, after.waited - before.waited)


async def _run_client(
    url: str,
    request_numbers: Iterator[int],
    plan: RouterBenchPlan,
    events: int,
    first_byte_seconds: list[float],
    start_delay_share: float,
) -> None:
    connection = MinimalHTTPConnection(url)
    await asyncio.sleep(start_delay_share * events * plan.pace)  # streams with a pace start evenly spread
    for number in request_numbers:
        content = f"{number} ".ljust(plan.prompt, "x")
        asked = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": events}
        body = msgspec.json.encode({**asked, "stream": True})
        began, got, last = time.perf_counter(), 0, b""
        async for part in connection.stream_reply(PATH, body):
            if not got:
                first_byte_seconds.append(time.perf_counter() - began)
            got += part.count(b"\n\n")
            last = part
        if got != events + 3 or not last.endswith(b"[DONE]\n\n"):
            raise EmberlineError(f"a stream ended after {got} of {events + 3} events: {last[-200:]!r}")
    connection.close()


async def _wait_until_ready(url: str, workers: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    connection = MinimalHTTPConnection(url)
    while time.monotonic() < deadline:
        try:
            status = msgspec.json.decode(await connection.fetch("/cluster/status"))
            if sum(worker["health"] == "ready" for worker in status["workers"]) == workers:
                connection.close()
                return
        except HTTPRequestFailed:
            pass
        await asyncio.sleep(0.1)
    raise EmberlineError(f"the {workers} fake workers did not become ready in {READY_TIMEOUT_S:.0f} s")
