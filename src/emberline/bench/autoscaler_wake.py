"""Measures the time to first token when the autoscaler must start a worker, and when that worker is awake or asleep.

The worker computes SmolLM2 on the CPU. On a CPU, the weights of a sleeping worker stay in place, so that nothing is
copied when it wakes. On a GPU, the weights would be copied from host memory.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.bench.autoscaler_crash import POLL_INTERVAL_S, WAIT_TIMEOUT_S, start_command, stop_process
from emberline.bench.report import BenchReport
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port
from emberline.net.connection_pool import HTTPConnectionPool

MODEL = "smollm2"
WAKES = 5


@dataclass(slots=True)
class WakeOutcome:
    """Seconds from sending a short request to its first token."""

    start_s: float = 0.0  # there is no worker: one is started
    awake_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)  # the worker sleeps


async def run_wake(log_dir: Path) -> WakeOutcome:
    """Start a cluster without workers, send a request, and send others when the worker is awake and when it sleeps."""
    outcome = WakeOutcome()
    url = f"http://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        router_options = ["--port", url.rpartition(":")[2], "--migration-wait", f"{WAIT_TIMEOUT_S}"]
        stack.callback(stop_process, start_command("router", router_options, log_dir / "wake-router.log"))
        client = RouterClient(url, None)
        stack.callback(client.close)
        pool = HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=4.0)
        stack.callback(pool.close)
        await _wait_until_asleep(client, 0)
        options = ["--router", url, "--slo", "ttft_p90=1s,itl_p90=100ms", "--pool", "both:min=0,max=1,sleep=1",
                   "--interval", "0.3", "--cool-down", "1", "--idle-time", "1", "--logs", str(log_dir), MODEL,
                   "--embedder", "none"]  # fmt: skip
        stack.callback(stop_process, start_command("autoscale", options, log_dir / "wake-autoscaler.log"))
        outcome.start_s = await _time_first_token(pool, url, "start")
        for i in range(WAKES):
            outcome.awake_s.append(await _time_first_token(pool, url, f"awake {i}"))
            await _wait_until_asleep(client, 1)
            outcome.wake_s.append(await _time_first_token(pool, url, f"wake {i}"))
    return outcome


def add_wake_results(report: BenchReport, outcome: WakeOutcome) -> None:
    report.add("real worker: first token after a start from zero", outcome.start_s, "s")
    report.add("real worker: first token of a sleeping worker", median(outcome.wake_s), "s")
    report.add("real worker: first token of an awake worker", median(outcome.awake_s), "s")


async def _wait_until_asleep(client: RouterClient, count: int) -> None:
    """Wait until the router answers and has this number of sleeping workers."""
    end = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < end:
        try:
            rows = (await client.fetch_status())["workers"]
            if sum(row["asleep"] and row["health"] == "ready" for row in rows) == count:
                return
        except RouterUnavailable:
            pass  # it starts
        await asyncio.sleep(POLL_INTERVAL_S)
    raise EmberlineError(f"the cluster did not have {count} sleeping workers within {WAIT_TIMEOUT_S:g} s")


async def _time_first_token(pool: HTTPConnectionPool, url: str, prompt: str) -> float:
    body = {"model": MODEL, "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}
    began = time.monotonic()
    headers = {"content-type": "application/json"}
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        reply = await pool.request(url, "POST", "/v1/chat/completions", headers, msgspec.json.encode(body))
        try:
            received = await reply.read()
            first_token_s = time.monotonic() - began
            while part := await reply.read():
                received += part
        finally:
            reply.close()
    if reply.status != 200 or not received.endswith(b"data: [DONE]\n\n"):
        raise EmberlineError(f"the request failed with status {reply.status}: {received[-200:]!r}")
    return first_token_s
