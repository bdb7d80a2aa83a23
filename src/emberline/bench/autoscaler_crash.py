"""A real cluster on this machine under a burst of requests, while its autoscaler is killed with kill -9 and restarted.

The router and the autoscaler are real processes. The workers are processes that register and stream like real workers
but compute nothing (`emberline.cluster.fake`). The seed determines their replies, so every reply can be checked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.cluster.fake_completion import FakeCompletion, FakeRequest
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed

POLL_INTERVAL_S = 0.1
WAIT_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 0.2  # of a client that the router refused because all workers are full
MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class CrashPlan:
    clients: int = 14  # streams that are open at the same time during the burst
    burst_s: float = 20.0
    tokens: int = 60  # of each stream
    token_interval_s: float = 0.02
    slots: int = 4  # streams of a worker


@dataclass(slots=True)
class CrashOutcome:
    answered: int = 0  # streams that were complete and correct
    lost: int = 0  # streams that broke, were wrong or got an error
    refused: int = 0  # attempts that were refused because all workers were full; the client tried again
    adopted: int = 0  # workers of the killed autoscaler that the new one has
    workers_in_burst: int = 0
    workers_at_end: int = 0
    left_processes: int = 0  # workers that run although the autoscaler was stopped


async def run_crash(plan: CrashPlan, log_dir: Path) -> CrashOutcome:
    """Start a cluster without workers, send the burst, kill and restart the autoscaler, and let the cluster shrink."""
    outcome = CrashOutcome()
    url = f"http://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        router_options = ["--port", url.rpartition(":")[2], "--migration-wait", "30"]
        stack.callback(stop_process, start_command("router", router_options, log_dir / "router.log"))
        client = RouterClient(url, None)
        stack.callback(client.close)
        pool = HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=4.0)
        stack.callback(pool.close)
        options = _autoscaler_options(plan, url, log_dir)
        autoscaler = start_command("autoscale", options, log_dir / "autoscaler-1.log")
        stack.callback(stop_process, autoscaler)
        await _wait_for_workers(client, 0)
        burst_end = time.monotonic() + plan.burst_s
        streams = [asyncio.create_task(_stream(pool, url, plan, i, burst_end, outcome)) for i in range(plan.clients)]
        await _wait_for_workers(client, 2)
        autoscaler.send_signal(signal.SIGKILL)
        autoscaler.wait()
        before = set(await _fetch_worker_names(client))
        await asyncio.sleep(plan.burst_s / 10)  # the cluster serves without an autoscaler
        second = start_command("autoscale", options, log_dir / "autoscaler-2.log")
        stack.callback(stop_process, second)
        await _wait_for_workers(client, 3)
        now = set(await _fetch_worker_names(client))
        outcome.adopted, outcome.workers_in_burst = len(before & now), len(now)
        await asyncio.gather(*streams)
        await _wait_for_workers(client, 0, at_most=True)
        outcome.workers_at_end = len(await _fetch_worker_names(client))
        stop_process(second)
    outcome.left_processes = _count_processes(url)
    return outcome


def _autoscaler_options(plan: CrashPlan, url: str, log_dir: Path) -> list[str]:
    worker = [sys.executable, "-m", "emberline.cluster.fake", "--router", "{router}", "--role", "{role}", "--name",
              "{name}", "--pace", f"{plan.token_interval_s}", "--max-running", f"{plan.slots}"]  # fmt: skip
    return ["--router", url, "--slo", "ttft_p90=1s,itl_p90=100ms", "--pool", f"both:min=0,max={MAX_WORKERS}",
            "--interval", "0.3", "--start-seconds", "1", "--cool-down", "2", "--idle-time", "2",
            "--logs", str(log_dir), "--worker-command", " ".join(worker)]  # fmt: skip


def start_command(command: str, options: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("ab") as output:
        arguments = [sys.executable, "-m", "emberline.cli", command, *options]
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(WAIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _fetch_worker_names(client: RouterClient) -> list[str]:
    status = await client.fetch_status()
    return [row["name"] for row in status["workers"] if row["health"] == "ready"]


async def _wait_for_workers(client: RouterClient, count: int, *, at_most: bool = False) -> None:
    """Wait until the router has at least, or at most, `count` ready workers."""
    end = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < end:
        try:
            ready = len(await _fetch_worker_names(client))
            if ready <= count if at_most else ready >= count:
                return
        except RouterUnavailable:
            pass  # it starts
        await asyncio.sleep(POLL_INTERVAL_S)
    raise EmberlineError(f"the cluster did not reach {count} workers within {WAIT_TIMEOUT_S:g} s")


async def _stream(
    pool: HTTPConnectionPool, url: str, plan: CrashPlan, number: int, end: float, outcome: CrashOutcome
) -> None:
    """Send one streamed request after the other until `end`, and compare each reply with the expected one."""
    seed = number << 20
    while time.monotonic() < end:
        seed += 1
        status, text = await _complete(pool, url, plan, seed)
        if status == 429:
            outcome.refused += 1
            await asyncio.sleep(RETRY_PAUSE_S)
        elif status == 200 and text == _expected_text(plan, seed):
            outcome.answered += 1
        else:
            outcome.lost += 1


async def _complete(pool: HTTPConnectionPool, url: str, plan: CrashPlan, seed: int) -> tuple[int, str]:
    body = {"model": "fake", "stream": True, "seed": seed, "max_tokens": plan.tokens, "messages": [{"role": "user",
            "content": f"request {seed}"}]}  # fmt: skip
    headers = {"content-type": "application/json"}
    try:
        reply = await pool.fetch(
            "POST", f"{url}/v1/chat/completions", headers, msgspec.json.encode(body), timeout_s=WAIT_TIMEOUT_S
        )
    except UpstreamFailed:
        return 0, ""
    is_complete = reply.body.endswith(b"data: [DONE]\n\n")
    return reply.status if is_complete or reply.status != 200 else 0, _join_text(reply.body)


def _join_text(body: bytes) -> str:
    parts = []
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            event: Any = msgspec.json.decode(line.removeprefix(b"data: "))
            parts += [choice["delta"].get("content", "") for choice in event.get("choices", ()) if "delta" in choice]
    return "".join(parts)


def _expected_text(plan: CrashPlan, seed: int) -> str:
    completion = FakeCompletion(seed, FakeRequest(seed, plan.tokens, True))
    return "".join(completion.text_at(position) for position in range(plan.tokens))


def _count_processes(router_url: str) -> int:
    """Return the number of processes, besides this one, with this router's URL in their command line."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                count += router_url.encode() in (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
    return count
