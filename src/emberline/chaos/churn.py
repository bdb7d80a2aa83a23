"""`emberline bench churn`: restarts random workers while a cluster serves requests at part of its maximum rate.

Before the run, a reference server answers every request once, and each later reply is compared with that answer. The
benchmark first measures the highest request rate that the cluster can serve. Then requests arrive at random times, at a
configured share of that rate. About every 30 s one worker, or only its engine process, is killed or terminated, and
restarts. One decode worker is never restarted, so that its memory, like the router's, can be measured over the whole
run. When a client gets an error during a restart, the report names that restart."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from emberline.bench.cluster import LocalCluster
from emberline.bench.memory_growth import WARM_UP, MemoryGrowth
from emberline.bench.processes import find_process_tree, total_idle_seconds
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer
from emberline.chaos.client import ChaosClient, RequestOutcome, Verdict
from emberline.chaos.reference_case import ReferenceCases
from emberline.chaos.request_progress import RequestObserver
from emberline.cluster.supervisor import SupervisedProcess
from emberline.core.config import Role
from emberline.core.errors import EmberlineError
from emberline.net.connection_pool import HTTPConnectionPool

SERVED_MODEL_NAME = "bench"
SERVER_ARGUMENTS = ("--served-name", SERVED_MODEL_NAME, "--device", "cpu", "--embedder", "none")
CALIBRATION_REQUESTS = 16
DETECTION_WAIT_S = 2.0  # until the router's status shows a stopped worker
UNCACHED_SHARE = 0.5  # these requests get a unique cache salt, because otherwise all prompts would soon be cached
MEMORY_POLL_INTERVAL_S = 2.0
CONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 4.0  # of a client's connection; servers close idle connections after 5 s
STOP_TIMEOUT_S = 150.0  # includes the end of the worker's open requests
ENGINE_PROCESS = "engine.process"
ENGINE_DEATH = "death of the engine"
RESTART_KINDS = ("death", ENGINE_DEATH, "end")


@dataclass(frozen=True, slots=True)
class ChurnPlan:
    seconds: float
    load: float  # share of the sustained rate
    calibration: float  # seconds
    pause: tuple[float, float]  # minimum and maximum seconds between two restarts
    cases: int  # number of requests with a known answer
    prefill: int
    decode: int
    deadline: float  # seconds per request
    kv_memory: str
    seed: int


@dataclass(slots=True)
class WorkerRestart:
    started_at: float  # seconds since the start of the run
    worker: str
    kind: str
    recovered_at: float | None = None  # seconds since the start of the run until the cluster was healthy; None: not yet

    def as_dict(self) -> dict[str, Any]:
        return {
            "at": round(self.started_at, 1),
            "worker": self.worker,
            "how": self.kind,
            "back": self.recovered_at and round(self.recovered_at, 1),
        }


@dataclass(slots=True)
class ChurnRun:
    plan: ChurnPlan
    cluster: LocalCluster
    cases: ReferenceCases
    pool: HTTPConnectionPool
    report_line: Callable[[str], None]
    rng: random.Random
    growth: MemoryGrowth = field(init=False)
    restarts: list[WorkerRestart] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    recovery_problem: str = ""  # what kept the cluster from recovering
    _observer: RequestObserver = field(default_factory=RequestObserver)
    _started_at: float = 0.0

    def __post_init__(self) -> None:
        self.growth = MemoryGrowth(settled=WARM_UP * self.plan.seconds)

    @property
    def seconds_since_start(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at

    async def measure_sustained_rate(self) -> float:
        """Return the requests per second that the cluster completes under full load.

        The measurement starts when the first requests have ended, because the cluster is not fully loaded before."""
        loop = asyncio.get_running_loop()
        end, finished_at = loop.time() + self.plan.calibration, list[float]()

        async def send_requests_until_end() -> None:
            while loop.time() < end or len(finished_at) < 2 * CALIBRATION_REQUESTS:
                if (ending := await self._send_random_request()).verdict is not Verdict.ANSWERED:
                    raise EmberlineError(
                        "a request failed during calibration, before any worker was restarted:"
                        f" {ending.verdict}, {ending.detail}",
                        hint="see the log files",
                    )
                finished_at.append(loop.time())

        await asyncio.gather(*(send_requests_until_end() for _ in range(CALIBRATION_REQUESTS)))
        # After `end`, fewer requests are open, so the cluster is no longer fully loaded.
        first_full, end = (
            finished_at[CALIBRATION_REQUESTS - 1],
            max(end, finished_at[2 * CALIBRATION_REQUESTS - 1]),
        )
        return sum(first_full < at <= end for at in finished_at) / (end - first_full)

    async def run(self, requests_per_s: float) -> None:
        self._started_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(work) for work in (self._restart_workers(), self._watch_memory())]
            await self._send_requests_at_rate(requests_per_s)
            for task in background:
                task.cancel()
        # If the run has ended during the last restart, wait until that restart is complete.
        if self.restarts and self.restarts[-1].recovered_at is None and not self.recovery_problem:
            self.recovery_problem = await self.cluster.wait_until_ready()
            self.restarts[-1].recovered_at = None if self.recovery_problem else self.seconds_since_start

    async def _send_requests_at_rate(self, requests_per_s: float) -> None:
        """Send requests at this mean rate for the planned duration, then wait until all requests have ended."""
        async with asyncio.TaskGroup() as group:
            at = 0.0
            while (at := at + self.rng.expovariate(requests_per_s)) < self.plan.seconds and not self.recovery_problem:
                await asyncio.sleep(max(0.0, at - self.seconds_since_start))
                group.create_task(self._send_and_record_request())

    async def _send_and_record_request(self) -> None:
        ending = await self._send_random_request()
        self.outcomes.append(ending)
        if ending.verdict is not Verdict.ANSWERED:
            self.report_line(
                f"{self.seconds_since_start:.0f} s: {ending.verdict}, {ending.detail},"
                f" {self.describe_restart_during(ending)}"
            )

    async def _send_random_request(self) -> RequestOutcome:
        client, case = (
            ChaosClient(self.pool, self.cluster.url, self._observer, self.plan.deadline),
            self.cases.pick_case(),
        )
        if case.path != "/v1/messages" and self.rng.random() < UNCACHED_SHARE:
            case = replace(case, body={**case.body, "cache_salt": f"{self.rng.getrandbits(64):x}"})
        return await client.run(case, self._observer.track_request())

    def describe_restart_during(self, outcome: RequestOutcome) -> str:
        """Return a description of the restart during which the request was open, or "" if there was none."""
        started_at = outcome.started_at - self._started_at
        for restart in self.restarts:
            if restart.started_at <= started_at + outcome.duration_s and (
                restart.recovered_at is None or started_at <= restart.recovered_at
            ):
                return f"{restart.kind} of {restart.worker} at {restart.started_at:.0f} s"
        return ""

    # -- restarts ------------------------------------------------------------------------------------------------------

    async def _restart_workers(self) -> None:
        never_restarted = next(child for child in self.cluster.workers if not child.name.startswith("prefill"))
        others = [child for child in self.cluster.workers if child is not never_restarted]
        rng = random.Random(self.plan.seed)
        while self.seconds_since_start + (pause := rng.uniform(*self.plan.pause)) < self.plan.seconds:
            await asyncio.sleep(pause)
            child, kind = rng.choice(others), rng.choice(RESTART_KINDS)
            self.restarts.append(restart := WorkerRestart(self.seconds_since_start, child.name, kind))
            self.recovery_problem = await self._restart_and_wait(child, kind)
            if self.recovery_problem:
                return
            restart.recovered_at = self.seconds_since_start
            outage_s = restart.recovered_at - restart.started_at
            self.report_line(f"{restart.started_at:.0f} s: {kind} of {child.name}, recovered after {outage_s:.1f} s")

    async def _restart_and_wait(self, worker: SupervisedProcess, restart_kind: str) -> str:
        """Restart a worker and wait until the cluster is healthy. Return "", or the problem if it does not recover."""
        restarts = worker.restarts + (restart_kind != ENGINE_DEATH)
        await asyncio.to_thread(_stop_worker, worker, restart_kind)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while worker.restarts < restarts:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return f"{worker.name} did not end within {STOP_TIMEOUT_S:g} s"
        await asyncio.sleep(DETECTION_WAIT_S)
        return await self.cluster.wait_until_ready()

    async def _watch_memory(self) -> None:
        while True:
            self.growth.record_samples(await asyncio.to_thread(self._pids_by_name), self.seconds_since_start)
            await asyncio.sleep(MEMORY_POLL_INTERVAL_S)

    def _pids_by_name(self) -> dict[str, int]:
        pid_by_name: dict[str, int] = {}
        for child in (self.cluster.router, *self.cluster.workers):
            if child.process is not None and child.process.returncode is None:
                pids = find_process_tree(child.process.pid)
                pid_by_name[child.name] = pids["server"]
                pid_by_name |= (
                    {f"{child.name}_{ENGINE_PROCESS}": pids[ENGINE_PROCESS]} if ENGINE_PROCESS in pids else {}
                )
        return pid_by_name


def _stop_worker(worker: SupervisedProcess, restart_kind: str) -> None:
    assert worker.process is not None
    worker.restart_pause_s = 0.5  # an intended death must not lengthen the pause
    pid: int | None = worker.process.pid
    if restart_kind == ENGINE_DEATH:
        pid = find_process_tree(worker.process.pid).get(ENGINE_PROCESS)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if restart_kind == "end" else signal.SIGKILL)


# -- the whole benchmark -----------------------------------------------------------------------------------------------


def run_churn_bench(model: str, plan: ChurnPlan, log_dir: Path, print_line: Callable[[str], None]) -> BenchReport:
    report = BenchReport("churn", {"model": model, **{name: getattr(plan, name) for name in plan.__slots__}})
    rng = random.Random(plan.seed)
    with EmberlineServer([model, *SERVER_ARGUMENTS], log_dir / "reference.log") as reference:
        print_line(f"recording the answers of {plan.cases} requests")
        cases = asyncio.run(_create_reference_cases(reference.url.removesuffix("/v1"), plan.cases, rng))
    asyncio.run(_run_churn_on_cluster(report, model, plan, cases, log_dir, print_line, rng))
    return report


async def _create_reference_cases(url: str, case_count: int, rng: random.Random) -> ReferenceCases:
    cases = ReferenceCases(url, SERVED_MODEL_NAME, rng)
    with closing(_new_pool()) as pool:
        await cases.measure_token_length(pool)
        for i in range(case_count):
            await cases.create_case(pool, is_long=i % 2 == 0, is_stream=i % 4 != 0)
    return cases


def _new_pool() -> HTTPConnectionPool:
    return HTTPConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, idle_timeout_s=IDLE_TIMEOUT_S, retries_stale=True)


async def _run_churn_on_cluster(
    report: BenchReport,
    model: str,
    plan: ChurnPlan,
    cases: ReferenceCases,
    log_dir: Path,
    print_line: Callable[[str], None],
    rng: random.Random,
) -> None:
    worker = [model, *SERVER_ARGUMENTS, "--threads", "1", "--kv-memory", plan.kv_memory]
    router = ["--split-tokens", "64", "--request-timeout", str(plan.deadline)]
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(closing(_new_pool()))
        roles: dict[Role, int] = {"prefill": plan.prefill, "decode": plan.decode}
        cluster = await stack.enter_async_context(LocalCluster(roles, worker, log_dir, router_arguments=router))
        churn = ChurnRun(plan, cluster, cases, pool, print_line, rng)
        rate = await churn.measure_sustained_rate()
        print_line(f"the cluster sustains {rate:.2f} requests/s")
        report.add("sustained", rate, "requests/s")
        idle, started_at = total_idle_seconds(), time.perf_counter()
        await churn.run(plan.load * rate)
        idle = (total_idle_seconds() - idle) / (time.perf_counter() - started_at)
        report.add("cores_busy", (os.cpu_count() or 1) - idle, "cores, all processes together")
        add_results(report, churn, await cluster.wait_until_idle(), await cluster.fetch_router_status() or {})


def add_results(report: BenchReport, churn: ChurnRun, held_resources: str, router_status: dict[str, Any]) -> None:
    endings, restarts = churn.outcomes, churn.restarts
    verdict_counts = Counter(ending.verdict for ending in endings)
    failures = [
        (ending, churn.describe_restart_during(ending))
        for ending in endings
        if ending.verdict in (Verdict.ERROR, Verdict.CUT)
    ]
    report.add("requests", len(endings), "requests")
    report.add("arrived", len(endings) / max(churn.plan.seconds, 1.0), "requests/s")
    report.add("answered", verdict_counts[Verdict.ANSWERED], "requests")
    report.add("errors_during_a_restart", sum(bool(why) for _, why in failures), "requests")
    report.add("errors_unexplained", sum(not why for _, why in failures), "requests")
    for verdict in (Verdict.WRONG, Verdict.HUNG):
        report.add(verdict.value, verdict_counts[verdict], "requests")
    report.add("restarts", len(restarts), "times")
    outages = [restart.recovered_at - restart.started_at for restart in restarts if restart.recovered_at is not None]
    if outages:
        report.add("back_after", outages, "s")
    report.add("unrecovered", int(bool(churn.recovery_problem)), "times")
    report.add("leaked", int(bool(held_resources)), "times")
    moved = sum(row["count"] for row in router_status.get("migrations", ()) if row["outcome"] == "went on")
    report.add("moved", moved, "requests")
    report.add("tried_again", sum(router_status.get("retries", {}).values()), "requests")
    for label, percent in (("p50", 50), ("p99", 99), ("most", 100)):
        if endings:
            report.add(f"seconds_{label}", float(np.percentile([e.duration_s for e in endings], percent)), "s")
    churn.growth.add_results(report)
    report.config |= {
        "restarts": [each.as_dict() for each in restarts],
        "errors": [f"{ending.detail}, {why or 'no restart'}" for ending, why in failures][:50],
        "held": held_resources,
        "missing": churn.recovery_problem,
    }
