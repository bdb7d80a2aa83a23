"""`emberline bench router`: the router's overhead.

Fake workers stream events as fast as the client reads them, or with a fixed time between events. The same requests are
sent to a worker directly and through the router. CPU time is that of the router's process. With `--tls`, a router with
mutual TLS is compared with one without.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import msgspec

from emberline.bench import processes
from emberline.bench.certificates import LocalCA
from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import running_process
from emberline.bench.transfer import measure_tls
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port
from emberline.core.tls import TLSIdentity
from emberline.core.tls_config import TLSConfig
from emberline.kv.transfer.piece import MAX_PIECE_BYTES

READY_TIMEOUT_S = 30.0
PATH = "/v1/chat/completions"
KV_TRANSFER_BYTES = 64 << 20  # of each KV transfer with and without TLS


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


@dataclass(frozen=True, slots=True)
class BenchmarkRouter:
    """A router process with fake workers."""

    url: str
    pid: int
    worker_urls: list[str]
    tls: ssl.SSLContext | None = None  # of clients

    @staticmethod
    def start(
        stack: ExitStack, plan: RouterBenchPlan, tls_options: Sequence[str] = (), tls: ssl.SSLContext | None = None
    ) -> BenchmarkRouter:
        """Start the processes, and wait until the workers are ready. Closing `stack` ends them.

        `tls_options`: options of the router and of the workers."""
        python = (sys.executable, "-m")
        port = free_port()
        command = (*python, "emberline.cli", "router", "--port", str(port), "--queue", "100", *tls_options)
        router = stack.enter_context(running_process(*command))
        scheme = "https" if tls_options else "http"
        url = f"{scheme}://127.0.0.1:{port}"
        ports = [free_port() for _ in range(plan.workers)]
        for own in ports:
            fake = (*python, "emberline.cluster.fake", "--router", url, "--name", f"fake-{own}", "--port", str(own))
            options = ("--pace", str(plan.pace), "--max-running", str(plan.streams), *tls_options)
            stack.enter_context(running_process(*fake, *options))
        made = BenchmarkRouter(url, router.pid, [f"{scheme}://127.0.0.1:{own}" for own in ports], tls)
        asyncio.run(made._wait_until_ready(plan.workers))
        return made

    async def _wait_until_ready(self, workers: int) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        connection = MinimalHTTPConnection(self.url, tls=self.tls)
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

    def run_clients(
        self, plan: RouterBenchPlan, events: int, *, url: str = "", reconnects: bool = False
    ) -> RouterBenchRun:
        """Send requests from `plan.streams` clients at once. Each client sends its next request after a reply.

        `url`: a worker to call instead of the router. `reconnects`: each request has a connection of its own."""
        return asyncio.run(self._run_clients(plan, events, url or self.url, reconnects))

    async def _run_clients(self, plan: RouterBenchPlan, events: int, url: str, reconnects: bool) -> RouterBenchRun:
        left = iter(range(plan.requests))
        first: list[float] = []
        clients = [_RouterClient(url, self.tls, plan, events, reconnects) for _ in range(plan.streams)]
        if url == self.url and not reconnects:
            await asyncio.gather(*(each.connection.fetch("/health/live") for each in clients))
        before = processes.read_usage(self.pid)
        began = time.perf_counter()
        await asyncio.gather(*(each.send_requests(left, first, i / plan.streams) for i, each in enumerate(clients)))
        wall, after = time.perf_counter() - began, processes.read_usage(self.pid)
        assert before is not None and after is not None and len(first) == plan.requests
        return RouterBenchRun(wall, after.cpu - before.cpu, first, after.rss, after.waited - before.waited)


def bench(plan: RouterBenchPlan, rounds: int) -> BenchReport:
    config = {name: getattr(plan, name) for name in plan.__slots__}
    report = BenchReport("router", {**config, "rounds": rounds})
    with ExitStack() as stack:
        router = BenchmarkRouter.start(stack, plan)
        turns: list[RouterBenchRun] = []
        direct: list[RouterBenchRun] = []
        short: list[RouterBenchRun] = []
        for turn in range(rounds + 1):  # the first is a warm-up
            through = router.run_clients(plan, plan.events)
            straight = router.run_clients(plan, plan.events, url=router.worker_urls[0])
            single = router.run_clients(plan, 1)
            if turn:
                turns.append(through)
                direct.append(straight)
                short.append(single)
        _add_results(report, plan, turns, direct, short)
    return report


def bench_tls(plan: RouterBenchPlan, rounds: int) -> BenchReport:
    """Measure a router with mutual TLS to clients and workers, and KV transfers with TLS, and both without TLS."""
    config = {name: getattr(plan, name) for name in plan.__slots__}
    # The load average shows if other processes ran when the benchmark started, which makes all figures too low.
    report = BenchReport("tls", {**config, "rounds": rounds, "load_average": round(os.getloadavg()[0], 1)})
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emberline-tls-")))
        ca = LocalCA(home)
        files = ca.issue("cluster")
        tls = TLSConfig(str(files.cert), str(files.key), str(ca.file))
        measure_tls(report, tls, KV_TRANSFER_BYTES, rounds, MAX_PIECE_BYTES)
        options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(ca.file))
        secure = BenchmarkRouter.start(stack, plan, options, TLSIdentity(tls).peer_client_context())
        routers = (secure, BenchmarkRouter.start(stack, plan))
        for name, events, reconnects in (
            ("", 1, False),
            ("_streams", plan.events, False),
            ("_new_connections", 1, True),
        ):
            runs: tuple[list[RouterBenchRun], ...] = ([], [])
            for turn in range(rounds + 1):  # the first is a warm-up
                for router, kept in zip(routers, runs, strict=True):
                    found = router.run_clients(plan, events, reconnects=reconnects)
                    kept.extend([found] if turn else [])
            _add_tls_results(report, name, plan.requests, *runs)
    return report


def _add_tls_results(
    report: BenchReport, name: str, requests: int, secure: list[RouterBenchRun], plain: list[RouterBenchRun]
) -> None:
    def add(what: str, unit: str, measure: Callable[[RouterBenchRun], float]) -> None:
        report.add(f"{what}{name}", [*map(measure, secure)], unit, peer=median(map(measure, plain)))

    add("requests", "requests/s", lambda run: requests / run.wall)
    add("first_byte_p50", "ms", lambda run: 1e3 * quantiles(run.first, n=100)[49])
    add("first_byte_p99", "ms", lambda run: 1e3 * quantiles(run.first, n=100)[98])
    add("cpu_per_request", "us", lambda run: 1e6 * run.cpu / requests)


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


class _RouterClient:
    def __init__(
        self, url: str, tls: ssl.SSLContext | None, plan: RouterBenchPlan, events: int, reconnects: bool
    ) -> None:
        """`reconnects`: each request has a connection of its own."""
        self.connection = MinimalHTTPConnection(url, tls=tls)
        self._plan, self._events, self._reconnects = plan, events, reconnects

    async def send_requests(
        self, request_numbers: Iterator[int], first_byte_seconds: list[float], start_delay_share: float
    ) -> None:
        connection, events = self.connection, self._events
        await asyncio.sleep(start_delay_share * events * self._plan.pace)  # streams with a pace start evenly spread
        for number in request_numbers:
            content = f"{number} ".ljust(self._plan.prompt, "x")
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
            if self._reconnects:
                connection.close()
        connection.close()
