"""`emberline bench gateway-crash`: how many rows of the request log are lost when a gateway is killed (`kill -9`).

Requests arrive at a steady rate at a gateway in front of a fake provider. Then the gateway's process is killed. The
rows in its store are compared with the requests that it had answered. The oldest missing row must not be older than the
setting `flush`, the longest time for which the gateway keeps rows in memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import running_process
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed

READY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
BODY = b'{"model": "fake/bench", "messages": [{"role": "user", "content": "hi"}]}'
HEADERS = {"content-type": "application/json"}
CONFIG = """
store = "sqlite:{home}/store"
master_key = "{home}/master"
flush = {flush}

[gateways.default.providers.fake]
base_url = "{provider}"
"""


@dataclass(frozen=True, slots=True)
class CrashBenchPlan:
    flushes: Sequence[float]  # seconds
    rate: float  # requests a second
    seconds: float  # until the kill, plus up to one at random
    rounds: int


@dataclass(frozen=True, slots=True)
class CrashLoss:
    answered: int  # requests answered before the kill
    lost: int  # missing rows of these requests
    oldest: float  # seconds from the first reply whose row is missing to the kill


def bench(plan: CrashBenchPlan) -> BenchReport:
    report = BenchReport("gateway-crash", {name: getattr(plan, name) for name in plan.__slots__})
    port = free_port()
    with running_process(sys.executable, "-m", "emberline.gateway.fakes.provider", "--port", str(port)):
        for flush in plan.flushes:
            crashes = [
                asyncio.run(_crash_gateway(plan, flush, f"http://127.0.0.1:{port}", n)) for n in range(plan.rounds)
            ]
            report.add(f"answered_flush_{flush:g}", [float(each.answered) for each in crashes], "requests")
            report.add(f"lost_flush_{flush:g}", [float(each.lost) for each in crashes], "rows")
            oldest = [each.oldest for each in crashes]
            report.add(f"oldest_lost_flush_{flush:g}", oldest, "s", limit=flush)
    return report


def is_loss_within_flush_interval(report: BenchReport) -> bool:
    """Return whether every lost row was at most as old as the setting `flush` allows."""
    figures = [result for name, result in report.results.items() if name.startswith("oldest_lost")]
    return all(r.spread is not None and r.limit is not None and r.spread[1] <= r.limit for r in figures)


async def _crash_gateway(plan: CrashBenchPlan, flush_s: float, provider_url: str, seed: int) -> CrashLoss:
    with tempfile.TemporaryDirectory() as folder:
        home, port = Path(folder), free_port()
        file = home / "gateway.toml"
        file.write_text(CONFIG.format(home=home, flush=flush_s, provider=provider_url))
        command = (sys.executable, "-m", "emberline.cli", "gateway", "--config", str(file), "--port", str(port))
        with running_process(*command) as process:
            url = f"http://127.0.0.1:{port}"
            await _wait_until_ready(url)
            replies = await _send_until_kill(plan, url, random.Random(seed), process.pid)
        killed, answered = replies.pop(""), replies
        rows = _read_record_ids(home / "store")
    lost = [at for name, at in answered.items() if name not in rows]
    return CrashLoss(len(answered), len(lost), max((killed - at for at in lost), default=0.0))


async def _send_until_kill(plan: CrashBenchPlan, url: str, rng: random.Random, gateway_pid: int) -> dict[str, float]:
    """Send requests, kill the gateway, and return the time of each reply by the id of its log row.

    The key "" holds the time of the kill.
    """
    arrived: dict[str, float] = {}
    begun, until = time.perf_counter(), plan.seconds + rng.random()
    pool = HTTPConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, idle_timeout_s=CONNECT_TIMEOUT_S)
    async with asyncio.TaskGroup() as group:

        async def send_request() -> None:
            try:
                reply = await pool.fetch("POST", f"{url}/v1/chat/completions", HEADERS, BODY)
                if reply.status != 200:
                    raise EmberlineError(f"the gateway replied with status {reply.status}: {reply.body.decode()}")
                arrived[reply.headers["cf-aig-log-id"].upper()] = time.perf_counter()
            except UpstreamFailed:
                if "" not in arrived:
                    raise

        number = 0
        while (now := time.perf_counter() - begun) < until:
            while number < now * plan.rate:
                group.create_task(send_request())
                number += 1
            await asyncio.sleep(0.002)
        arrived[""] = time.perf_counter()
        os.kill(gateway_pid, signal.SIGKILL)
    pool.close()
    killed = arrived[""]
    return {name: at for name, at in arrived.items() if at <= killed}


async def _wait_until_ready(url: str) -> None:
    until = time.perf_counter() + READY_TIMEOUT_S
    while time.perf_counter() < until:
        try:
            await MinimalHTTPConnection(url).fetch("/health")
            return
        except HTTPRequestFailed:
            await asyncio.sleep(0.1)
    raise EmberlineError(f"the gateway at {url} did not become ready in {READY_TIMEOUT_S:.0f} s")


def _read_record_ids(store_dir: Path) -> set[str]:
    found: set[str] = set()
    for file in store_dir.glob("logs-*.db"):
        with closing(sqlite3.connect(file)) as db:
            found |= {row[0] for row in db.execute("SELECT hex(id) FROM logs")}
    return found
