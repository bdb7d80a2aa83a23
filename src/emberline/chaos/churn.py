"""`emberline bench churn`: restarts workers at random while a cluster serves a share of its maximum.

Every request has one right answer, which a reference server gave before. The rate that the cluster sustains is measured
first, with enough open requests to fill it; then requests arrive at random at the given share of that rate. About every
half minute a worker, or only its engine, is killed or terminated, and restarts. One decode worker is never restarted:
its memory is measured over the whole time, like the router's. A client's error is reported together with the restart
during which it happened, if there was one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from emberline.bench.cluster import Cluster
from emberline.bench.growth import WARM_UP, Growth
from emberline.bench.launch import Launch
from emberline.bench.processes import family, idle_seconds
from emberline.bench.report import Report
from emberline.chaos.case import Cases
from emberline.chaos.client import Client, Ending, Verdict
from emberline.chaos.sight import Sights
from emberline.cluster.supervisor import Child
from emberline.core.errors import EmberlineError

SERVED = "bench"
SERVER = ("--served-name", SERVED, "--device", "cpu", "--embedder", "none")
FILLING = 16
NOTICED = 2.0  # until the router's status shows a stopped worker
UNKNOWN = 0.5  # these requests get a unique cache salt, because otherwise all prompts would soon be cached
LOOKS = 2.0
ENDED = 150.0  # includes the end of the worker's open requests
ENGINE = "engine.process"
ENGINE_DEATH = "death of the engine"
HOW = ("death", ENGINE_DEATH, "end")


@dataclass(frozen=True, slots=True)
class Plan:
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
class Restart:
    at: float  # seconds since the start of the run
    worker: str
    how: str
    back: float | None = None  # seconds since the start of the run until the cluster was healthy; None: not yet

    def as_dict(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 1),
            "worker": self.worker,
            "how": self.how,
            "back": self.back and round(self.back, 1),
        }


@dataclass(slots=True)
class Churn:
    plan: Plan
    cluster: Cluster
    cases: Cases
    session: aiohttp.ClientSession
    say: Callable[[str], None]
    dice: random.Random
    growth: Growth = field(init=False)
    restarts: list[Restart] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    unrecovered: str = ""  # what kept the cluster from recovering
    _sights: Sights = field(default_factory=Sights)
    _began: float = 0.0

    def __post_init__(self) -> None:
        self.growth = Growth(settled=WARM_UP * self.plan.seconds)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    async def sustained(self) -> float:
        """Return the requests per second that the cluster serves when it is full.

        The rate counts from the end of the first requests."""
        loop = asyncio.get_running_loop()
        end, finished_at = loop.time() + self.plan.calibration, list[float]()

        async def send_repeatedly() -> None:
            while loop.time() < end or len(finished_at) < 2 * FILLING:
                if (ending := await self._ask()).verdict is not Verdict.ANSWERED:
                    raise EmberlineError(
                        f"a request failed before any restart: {ending.verdict}, {ending.why}", hint="see the log files"
                    )
                finished_at.append(loop.time())

        await asyncio.gather(*(send_repeatedly() for _ in range(FILLING)))
        first_full, end = (
            finished_at[FILLING - 1],
            max(end, finished_at[2 * FILLING - 1]),
        )  # after `end` fewer requests are open
        return sum(first_full < at <= end for at in finished_at) / (end - first_full)

    async def run(self, rate: float) -> None:
        self._began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(work) for work in (self._restart(), self._watch())]
            await self._arrive(rate)
            for task in background:
                task.cancel()
        if (
            self.restarts and self.restarts[-1].back is None and not self.unrecovered
        ):  # the last restart is not complete
            self.unrecovered = await self.cluster.recovers()
            self.restarts[-1].back = None if self.unrecovered else self.now

    async def _arrive(self, rate: float) -> None:
        """Send requests at this rate until the time is over, then wait until all have ended."""
        async with asyncio.TaskGroup() as group:
            at = 0.0
            while (at := at + self.dice.expovariate(rate)) < self.plan.seconds and not self.unrecovered:
                await asyncio.sleep(max(0.0, at - self.now))
                group.create_task(self._one())

    async def _one(self) -> None:
        ending = await self._ask()
        self.endings.append(ending)
        if ending.verdict is not Verdict.ANSWERED:
            self.say(f"{self.now:.0f} s: {ending.verdict}, {ending.why}, {self.during(ending)}")

    async def _ask(self) -> Ending:
        client, case = Client(self.session, self.cluster.url, self._sights, self.plan.deadline), self.cases.old()
        if case.path != "/v1/messages" and self.dice.random() < UNKNOWN:
            case = replace(case, body={**case.body, "cache_salt": f"{self.dice.getrandbits(64):x}"})
        return await client.run(case, self._sights.new())

    def during(self, ending: Ending) -> str:
        """Return the restart during which the request ran, or ""."""
        started_at = ending.began - self._began
        for restart in self.restarts:
            if restart.at <= started_at + ending.seconds and (restart.back is None or started_at <= restart.back):
                return f"{restart.how} of {restart.worker} at {restart.at:.0f} s"
        return ""

    # -- restarts ------------------------------------------------------------------------------------------------------

    async def _restart(self) -> None:
        kept = next(child for child in self.cluster.workers if not child.name.startswith("prefill"))
        others = [child for child in self.cluster.workers if child is not kept]
        rng = random.Random(self.plan.seed)
        while self.now + (pause := rng.uniform(*self.plan.pause)) < self.plan.seconds:
            await asyncio.sleep(pause)
            child, how = rng.choice(others), rng.choice(HOW)
            self.restarts.append(restart := Restart(self.now, child.name, how))
            self.unrecovered = await self._struck(child, how)
            if self.unrecovered:
                return
            restart.back = self.now
            self.say(f"{restart.at:.0f} s: {how} of {child.name}, recovered after {restart.back - restart.at:.1f} s")

    async def _struck(self, child: Child, how: str) -> str:
        """Restart a worker and wait until the cluster is healthy; return what is missing, or ""."""
        restarts = child.restarts + (how != ENGINE_DEATH)
        await asyncio.to_thread(_strike, child, how)
        try:
            async with asyncio.timeout(ENDED):
                while child.restarts < restarts:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return f"{child.name} did not end within {ENDED:g} s"
        await asyncio.sleep(NOTICED)
        return await self.cluster.recovers()

    async def _watch(self) -> None:
        while True:
            self.growth.look(await asyncio.to_thread(self._pids), self.now)
            await asyncio.sleep(LOOKS)

    def _pids(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for child in (self.cluster.router, *self.cluster.workers):
            if child.process is not None and child.process.returncode is None:
                own = family(child.process.pid)
                found[child.name] = own["server"]
                found |= {f"{child.name}_{ENGINE}": own[ENGINE]} if ENGINE in own else {}
        return found


def _strike(child: Child, how: str) -> None:
    assert child.process is not None
    child.pause = 0.5  # an intended death must not lengthen the pause
    pid: int | None = child.process.pid
    if how == ENGINE_DEATH:
        pid = family(child.process.pid).get(ENGINE)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if how == "end" else signal.SIGKILL)


# -- the whole benchmark -----------------------------------------------------------------------------------------------


def bench(model: str, plan: Plan, logs: Path, say: Callable[[str], None]) -> Report:
    report = Report("churn", {"model": model, **{name: getattr(plan, name) for name in plan.__slots__}})
    rng = random.Random(plan.seed)
    with Launch([model, *SERVER], logs / "reference.log") as reference:
        say(f"recording the answers of {plan.cases} requests")
        cases = asyncio.run(_answered(reference.url.removesuffix("/v1"), plan.cases, rng))
    asyncio.run(_whole(report, model, plan, cases, logs, say, rng))
    return report


async def _answered(url: str, count: int, dice: random.Random) -> Cases:
    cases = Cases(url, SERVED, dice)
    async with aiohttp.ClientSession() as session:
        await cases.measure(session)
        for i in range(count):
            await cases.new(session, long=i % 2 == 0, stream=i % 4 != 0)
    return cases


async def _whole(
    report: Report, model: str, plan: Plan, cases: Cases, logs: Path, say: Callable[[str], None], dice: random.Random
) -> None:
    worker = [model, *SERVER, "--threads", "1", "--kv-memory", plan.kv_memory]
    router = ["--split-tokens", "64", "--request-timeout", str(plan.deadline)]
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Cluster({"prefill": plan.prefill, "decode": plan.decode}, worker, logs, router=router) as cluster,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        churn = Churn(plan, cluster, cases, session, say, dice)
        rate = await churn.sustained()
        say(f"the cluster sustains {rate:.2f} requests/s")
        report.add("sustained", rate, "requests/s")
        idle, began = idle_seconds(), time.perf_counter()
        await churn.run(plan.load * rate)
        idle = (idle_seconds() - idle) / (time.perf_counter() - began)
        report.add("cores_busy", (os.cpu_count() or 1) - idle, "cores, all processes together")
        tell(report, churn, await cluster.quiet(), await cluster.status() or {})


def tell(report: Report, churn: Churn, held: str, status: dict[str, Any]) -> None:
    endings, restarts = churn.endings, churn.restarts
    verdict_counts = Counter(ending.verdict for ending in endings)
    failures = [(ending, churn.during(ending)) for ending in endings if ending.verdict in (Verdict.ERROR, Verdict.CUT)]
    report.add("requests", len(endings), "requests")
    report.add("arrived", len(endings) / max(churn.plan.seconds, 1.0), "requests/s")
    report.add("answered", verdict_counts[Verdict.ANSWERED], "requests")
    report.add("errors_during_a_restart", sum(bool(why) for _, why in failures), "requests")
    report.add("errors_unexplained", sum(not why for _, why in failures), "requests")
    for verdict in (Verdict.WRONG, Verdict.HUNG):
        report.add(verdict.value, verdict_counts[verdict], "requests")
    report.add("restarts", len(restarts), "times")
    outages = [restart.back - restart.at for restart in restarts if restart.back is not None]
    if outages:
        report.add("back_after", outages, "s")
    report.add("unrecovered", int(bool(churn.unrecovered)), "times")
    report.add("leaked", int(bool(held)), "times")
    moved = sum(row["count"] for row in status.get("migrations", ()) if row["outcome"] == "went on")
    report.add("moved", moved, "requests")
    report.add("tried_again", sum(status.get("retries", {}).values()), "requests")
    for label, percent in (("p50", 50), ("p99", 99), ("most", 100)):
        if endings:
            report.add(f"seconds_{label}", float(np.percentile([e.seconds for e in endings], percent)), "s")
    churn.growth.tell(report)
    report.config |= {
        "restarts": [each.as_dict() for each in restarts],
        "errors": [f"{ending.why}, {why or 'no restart'}" for ending, why in failures][:50],
        "held": held,
        "missing": churn.unrecovered,
    }
