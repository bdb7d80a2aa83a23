"""`emberline bench autoscaler`: the autoscaler in control of a simulated cluster of H200 GPUs, against an oracle.

The production policy, scheduler, KV manager and router run on a virtual clock, with measured step costs. A minute meets
the SLO if 90 % of the requests that arrived in that minute got their first token in time, and 90 % of the inter-token
times in that minute were within the target. The oracle knows the trace in advance. Repeated simulation finds for each
minute the fewest workers that meet the SLO, and the oracle starts these early enough to be ready.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from emberline.autoscaler.settings import AutoscalerSettings
from emberline.bench.autoscaler_crash import CrashOutcome
from emberline.bench.report import BenchReport
from emberline.sim.autoscaled import AutoscaledCluster
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.costmodel import CostModel
from emberline.sim.minute_log import MINUTE_S, MinuteLog
from emberline.sim.sim_fleet import SimStart
from emberline.sim.workloads.arrivals import ArrivalRate, ConstantRate
from emberline.sim.workloads.requests import RequestWorkload

PROCESSES = 2
CAPACITY_PRECISION = 0.04
CAPACITY_WORKERS = 8  # with a single one, requests would wait longer behind long prompts
CAPACITY_SECONDS = 240.0  # of each simulated load when a worker's capacity is measured
MAX_ORACLE_ROUNDS = 5
ORACLE_FIRST_GUESS = 1.1  # load of the oracle's workers, as a share of their capacity, in its first round
ORACLE_MET_SHARE = 0.99  # of minutes; the same as the autoscaler must reach


@dataclass(frozen=True, slots=True)
class LoadTrace:
    name: str
    arrivals: ArrivalRate
    seconds: float


@dataclass(frozen=True, slots=True)
class AutoscalerBenchPlan:
    settings: AutoscalerSettings  # its pool has no capacity: the benchmark measures it
    cluster: SimClusterConfig
    start_s: float  # from a worker's start until it is ready
    prompt_tokens: int = 2000  # median
    output_tokens: int = 200  # median
    spread: float = 0.5  # sigma of both
    seed: int = 1

    def workload(self, arrivals: ArrivalRate, seconds: float) -> RequestWorkload:
        return RequestWorkload(arrivals, seconds, self.prompt_tokens, self.output_tokens, self.spread)

    @property
    def work_per_request(self) -> float:
        mean = math.exp(self.spread**2 / 2)  # over the median of a log-normal distribution
        return mean * (self.prompt_tokens + self.settings.decode_weight * self.output_tokens)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    missed: list[int]  # minutes that did not meet the SLO
    unanswered: int  # requests that were refused or failed
    requests: int
    worker_s: float  # from the start of each worker to its end
    direction_changes: int


def measure_capacity(plan: AutoscalerBenchPlan, workers: int = CAPACITY_WORKERS) -> float:
    """Return the capacity of one worker: the highest constant rate, in requests per second, that meets the SLO."""
    low, high = 0.0, 1.0
    while _meets_slo_at(plan, workers, high):
        low, high = high, 2 * high
    while high - low > CAPACITY_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _meets_slo_at(plan, workers, middle) else (low, middle)
    return low


def _meets_slo_at(plan: AutoscalerBenchPlan, workers: int, rate: float) -> bool:
    cluster = SimCluster(replace(plan.cluster, workers=workers))
    log = MinuteLog(plan.settings.slo)
    log.watch(cluster)
    workload = plan.workload(ConstantRate(rate * workers), CAPACITY_SECONDS)
    cluster.run(workload.sessions(plan.seed), CAPACITY_SECONDS)
    return not [minute for minute in log.find_missed(CAPACITY_SECONDS) if minute]  # the first one is not steady yet


def run_autoscaler(plan: AutoscalerBenchPlan, trace: LoadTrace, capacity: float | None) -> RunOutcome:
    """Simulate the trace with the autoscaler in control.

    `capacity`: requests per second that a worker serves; None: the autoscaler learns it."""
    work = None if capacity is None else capacity * plan.work_per_request
    settings = replace(plan.settings, pools=(replace(plan.settings.pools[0], capacity=work),))
    first = math.ceil(trace.arrivals.at(0.0) / (capacity or 1.0) / settings.utilisation)
    cluster = SimCluster(replace(plan.cluster, workers=max(first, settings.pools[0].min_workers)))
    log = MinuteLog(settings.slo)
    log.watch(cluster)
    scaled = AutoscaledCluster(cluster, settings, lambda: SimStart(plan.start_s))
    result = scaled.run(plan.workload(trace.arrivals, trace.seconds).sessions(plan.seed), trace.seconds)
    changes = scaled.trace.count_direction_changes()
    missed = log.find_missed(trace.seconds)
    return RunOutcome(missed, log.unanswered, result.requests, result.worker_seconds, changes)


def run_schedule(plan: AutoscalerBenchPlan, trace: LoadTrace, counts: list[int]) -> RunOutcome:
    """Simulate the trace with `counts[i]` ready workers in minute i. They are started early enough to be ready."""
    cluster = SimCluster(replace(plan.cluster, workers=counts[0]))
    log = MinuteLog(plan.settings.slo)
    log.watch(cluster)
    names = list(cluster.workers)

    def add_workers(count: int) -> None:
        names.extend(cluster.add_worker("both", start_seconds=plan.start_s) for _ in range(count))

    def remove_workers(count: int) -> None:
        for name in [names.pop(0) for _ in range(count)]:
            cluster.drain_worker(name, move=True)

    for minute in range(1, len(counts)):
        change = counts[minute] - counts[minute - 1]
        if change > 0:
            cluster.call_at(max(minute * MINUTE_S - plan.start_s, 0.0), partial(add_workers, change))
        elif change < 0:
            cluster.call_at(minute * MINUTE_S, partial(remove_workers, -change))
    result = cluster.run(plan.workload(trace.arrivals, trace.seconds).sessions(plan.seed), trace.seconds)
    missed = log.find_missed(trace.seconds)
    return RunOutcome(missed, log.unanswered, result.requests, result.worker_seconds, 0)


def find_oracle(plan: AutoscalerBenchPlan, trace: LoadTrace, capacity: float) -> RunOutcome:
    """Return the outcome of the oracle, which is found in several simulations of the trace.

    The first simulation has few workers. Each further simulation has one more worker in each minute that missed the
    SLO."""
    requests = Counter(
        int(session.starts_at / MINUTE_S)
        for session in plan.workload(trace.arrivals, trace.seconds).sessions(plan.seed)
    )
    minutes = round(trace.seconds / MINUTE_S)
    counts = [max(1, round(requests[i] / MINUTE_S / capacity / ORACLE_FIRST_GUESS)) for i in range(minutes)]
    for _ in range(MAX_ORACLE_ROUNDS):
        outcome = run_schedule(plan, trace, counts)
        if len(outcome.missed) <= (1 - ORACLE_MET_SHARE) * minutes:
            return outcome
        for minute in outcome.missed:
            counts[minute] += 1
    return outcome


def bench(
    plan: AutoscalerBenchPlan, build_traces: Callable[[float], list[LoadTrace]], crash: CrashOutcome
) -> BenchReport:
    """Measure a worker's capacity, and simulate each trace with the autoscaler and with the oracle.

    `build_traces` returns the traces for this capacity. `crash`: the outcome of the run on a real cluster."""
    capacity = measure_capacity(plan)
    traces = build_traces(capacity)
    report = BenchReport("autoscaler", {"plan": _describe(plan), "traces": [asdict(trace) for trace in traces]})
    report.add("requests per second of a worker within the SLO", capacity, "requests/s")
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as executor:
        outcomes = list(executor.map(partial(_simulate, plan, capacity), traces))
    compared = [_add_results(report, trace, *each) for trace, each in zip(traces, outcomes, strict=True)]
    report.add("slo_minutes_share", min(share for share, _ in compared), "share")
    report.add("extra_worker_hours_share", max(extra for _, extra in compared), "share")
    for name, count, unit in (
        ("answered", crash.answered, "requests"),
        ("lost", crash.lost, "requests"),
        ("refused, and sent again", crash.refused, "requests"),
        ("workers found again after kill -9", crash.adopted, "workers"),
        ("workers in the burst", crash.workers_in_burst, "workers"),
        ("workers after it", crash.workers_at_end, "workers"),
        ("processes left behind", crash.left_processes, "processes"),
    ):
        report.add(f"real cluster: {name}", count, unit)
    return report


def _simulate(plan: AutoscalerBenchPlan, capacity: float, trace: LoadTrace) -> tuple[RunOutcome, RunOutcome]:
    """Return the outcome of the autoscaler, then that of the oracle."""
    logging.getLogger("emberline.router").setLevel(logging.ERROR)  # it reports every simulated drain
    return run_autoscaler(plan, trace, capacity), find_oracle(plan, trace, capacity)


def _add_results(report: BenchReport, trace: LoadTrace, outcome: RunOutcome, oracle: RunOutcome) -> tuple[float, float]:
    """Add the results of one trace. Return the share of minutes that met the SLO, and the share of extra worker-hours.

    Extra worker-hours are those that the autoscaler used in addition to the oracle's."""
    minutes = round(trace.seconds / MINUTE_S)
    share, extra = 1 - len(outcome.missed) / minutes, outcome.worker_s / oracle.worker_s - 1
    report.add(f"{trace.name}: slo_minutes_share", share, "share")
    report.add(f"{trace.name}: extra_worker_hours_share", extra, "share")
    report.add(f"{trace.name}: direction changes", outcome.direction_changes, "changes")
    report.add(f"{trace.name}: requests", outcome.requests, "requests")
    report.add(f"{trace.name}: requests refused or failed", outcome.unanswered, "requests")
    report.add(f"{trace.name}: worker-hours", outcome.worker_s / 3600, "h", peer=oracle.worker_s / 3600)
    report.add(f"{trace.name}: oracle's slo_minutes_share", 1 - len(oracle.missed) / minutes, "share")
    return share, extra


def _describe(plan: AutoscalerBenchPlan) -> dict[str, Any]:
    """Return the plan as a dict for the report. It names the source of the step costs, and omits the costs."""
    described = asdict(replace(plan, cluster=replace(plan.cluster, cost=CostModel())))
    described["cluster"]["cost"] = getattr(plan.cluster.cost, "source", type(plan.cluster.cost).__name__)
    return described
