"""`emberline bench sim-day`: simulates a day of agent conversations on a fleet of workers, by routing policy.

The fleet is made of cells: a router with its workers, and its share of the conversations, which stay in their cell.
Cells do not affect one another, so each process simulates some of them. Workers are FastWorkers, a faster model of the
engine. Its error compared with the engine's own scheduler and KV manager is measured too, on one small cell."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

from emberline.bench.report import BenchReport
from emberline.core.step_costs import StepCostTable
from emberline.sim.choosers import (
    WorkerChooser,
    choose_worker_by_policy,
    choose_worker_with_fewest_requests,
    make_random_chooser,
    make_round_robin_chooser,
)
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.costs import find_cost_data
from emberline.sim.result import SimResult
from emberline.sim.workloads.agents import AgentWorkload
from emberline.sim.workloads.arrivals import ConstantRate, DiurnalRate

HOUR_S = 3600.0
TURNS = (4, 12)
MEAN_TURNS = sum(TURNS) / 2
CHECK_WORKERS, CHECK_SEEDS = 4, 2  # of the comparison with single steps


@dataclass(frozen=True, slots=True)
class DayPlan:
    workers: int = 1000
    cell_workers: int = 25  # behind one router
    compared_workers: int = 50  # with which the other policies are simulated
    requests_per_worker: float = 400.0
    hours: float = 24.0
    peak_factor: float = 1.7  # highest arrival rate of the day over the mean
    slowdown: float = 8.0  # factor on the measured step times of the 8B model, about a model of 70B
    kv_tokens: int = 360_000
    check_minutes: float = 4.0  # simulated step by step, to measure the error
    processes: int = 2

    def workload(self) -> AgentWorkload:
        """Return the conversations of one cell."""
        seconds = self.hours * HOUR_S
        sessions_per_s = self.cell_workers * self.requests_per_worker / MEAN_TURNS / seconds
        return AgentWorkload(
            systems=16,
            system_tokens=(4096, 12_288),
            turns=TURNS,
            user_tokens=800.0,
            reply_tokens=4000.0,
            think_seconds=30.0,
            over_seconds=seconds,
            arrivals=DiurnalRate(sessions_per_s, self.peak_factor, seconds),
        )

    def cluster(self) -> SimClusterConfig:
        return SimClusterConfig(
            workers=self.cell_workers,
            kv_tokens=self.kv_tokens,
            batch_tokens=8192,
            block_size=64,
            cost=self.step_costs(),
            detail="runs",
            heartbeat_s=10.0,
            sample_s=60.0,
        )

    def step_costs(self) -> StepCostTable:
        return StepCostTable.from_data(find_cost_data("h200", "llama-8b").scale(self.slowdown))


@dataclass(frozen=True, slots=True)
class DayPolicy:
    make_chooser: Callable[[int], WorkerChooser]
    sends_session_ids: bool = False


OWN_POLICY = "router"
POLICIES = {
    OWN_POLICY: DayPolicy(lambda seed: choose_worker_by_policy),
    "router, session header": DayPolicy(lambda seed: choose_worker_by_policy, sends_session_ids=True),
    "fewest requests": DayPolicy(lambda seed: choose_worker_with_fewest_requests),
    "in turn": DayPolicy(lambda seed: make_round_robin_chooser()),
    "random": DayPolicy(make_random_chooser),
}


def bench(plan: DayPlan) -> BenchReport:
    report = BenchReport("sim-day", {**asdict(plan), "cost_source": plan.step_costs().source})
    cells = plan.workers // plan.cell_workers
    began = time.perf_counter()
    day, usage = _simulate_cells(plan, OWN_POLICY, range(cells))
    seconds = time.perf_counter() - began
    report.add("workers", float(cells * plan.cell_workers), "")
    report.add("seconds", seconds, "s")
    report.add("cpu_seconds", usage.cpu_seconds, "s")
    report.add("memory_mb", usage.memory_bytes / 1e6, "MB")
    report.add("simulated_hours", day.seconds / HOUR_S, "h")
    report.add("requests", float(day.requests), "")
    report.add("output_tokens", float(day.output_tokens), "")
    _add_policy(report, "fleet", day)
    for name in POLICIES:
        part, _ = _simulate_cells(plan, name, range(plan.compared_workers // plan.cell_workers))
        _add_policy(report, name, part)
    _add_errors(report, plan)
    return report


def _add_policy(report: BenchReport, name: str, result: SimResult) -> None:
    report.add(f"{name}: cached share", 100 * result.cached_share, "%")
    report.add(f"{name}: most over mean tokens in flight", result.load_imbalance.mean, "x")
    report.add(f"{name}: first token p50", result.ttft_seconds.quantile(0.5), "s")
    report.add(f"{name}: first token p90", result.ttft_seconds.quantile(0.9), "s")
    report.add(f"{name}: inter-token p90", 1e3 * result.inter_token_seconds.quantile(0.9), "ms")
    computed = (result.prompt_tokens - result.cached_tokens) / result.requests
    report.add(f"{name}: computed prompt tokens per request", computed, "")
    busy_hours = result.busy_seconds / HOUR_S
    report.add(f"{name}: busy worker-hours per million output tokens", 1e6 * busy_hours / result.output_tokens, "h")
    report.add(f"{name}: busy share of workers", 100 * result.busy_seconds / result.worker_seconds, "%")
    report.add(f"{name}: refused or failed", float(result.refused + result.failed + result.too_long), "")


@dataclass(slots=True)
class SimulationUsage:
    cpu_seconds: float = 0.0
    memory_bytes: int = 0  # sum of the largest sizes of the processes


def _simulate_cells(plan: DayPlan, policy: str, cells: Sequence[int]) -> tuple[SimResult, SimulationUsage]:
    """Simulate these cells in several processes. Return the merged results, and the processes' CPU time and memory."""
    total, by_process = SimResult(), dict[int, SimulationUsage]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(plan.processes, len(cells)), mp_context=context) as pool:
        for result, process_id, usage in pool.map(partial(_simulate_cell, plan, policy), cells):
            total.merge(result)
            latest = by_process.setdefault(process_id, usage)
            latest.cpu_seconds = max(latest.cpu_seconds, usage.cpu_seconds)
            latest.memory_bytes = max(latest.memory_bytes, usage.memory_bytes)
    usages = [*by_process.values(), _own_usage()]
    return total, SimulationUsage(sum(each.cpu_seconds for each in usages), sum(each.memory_bytes for each in usages))


def _simulate_cell(plan: DayPlan, policy_name: str, cell: int) -> tuple[SimResult, int, SimulationUsage]:
    policy = POLICIES[policy_name]
    cluster = SimCluster(plan.cluster(), policy.make_chooser(cell), sends_session_ids=policy.sends_session_ids)
    result = cluster.run(plan.workload().sessions(cell))
    return result, os.getpid(), _own_usage()


def _own_usage() -> SimulationUsage:
    return SimulationUsage(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _add_errors(report: BenchReport, plan: DayPlan) -> None:
    """Simulate the busiest minutes with real engines and with FastWorkers; report the differences.

    Both simulate one small cell. With the router's policy, a small difference in time can send a request to another
    worker, which changes all later decisions. The policy "in turn" does not depend on times, so it shows the
    differences without this effect."""
    cases = [(OWN_POLICY, 1.0), (OWN_POLICY, 4.0), ("in turn", 4.0)]
    tasks = [(*case, seed, detail) for case in cases for seed in range(CHECK_SEEDS) for detail in ("steps", "runs")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.processes, mp_context=context) as pool:
        results = dict(zip(tasks, pool.map(partial(_simulate_check, plan), tasks), strict=True))
    for policy, factor in cases:
        totals = {"steps": SimResult(), "runs": SimResult()}
        for detail, total in totals.items():
            for seed in range(CHECK_SEEDS):
                total.merge(results[policy, factor, seed, detail])
        name = f"error, {policy}, {factor:g} x the peak"
        for label, value in _relative_errors(totals["steps"], totals["runs"]).items():
            report.add(f"{name}: {label}", value, "")
        report.add(f"{name}: requests compared", float(totals["steps"].requests), "")


def _simulate_check(plan: DayPlan, task: tuple[str, float, int, SimDetail]) -> SimResult:
    policy, factor, seed, detail = task
    peak = CHECK_WORKERS * plan.requests_per_worker / MEAN_TURNS / (plan.hours * HOUR_S) * plan.peak_factor
    workload = replace(plan.workload(), over_seconds=60 * plan.check_minutes, arrivals=ConstantRate(factor * peak))
    config = replace(plan.cluster(), workers=CHECK_WORKERS, heartbeat_s=1.0, sample_s=1.0, detail=detail)
    return SimCluster(config, POLICIES[policy].make_chooser(seed)).run(workload.sessions(seed))


def _relative_errors(exact: SimResult, fast: SimResult) -> dict[str, float]:
    def error(ours: float, reference: float) -> float:
        return abs(ours - reference) / reference if reference else 0.0

    return {
        **{
            f"first token p{round(100 * q)}": error(fast.ttft_seconds.quantile(q), exact.ttft_seconds.quantile(q))
            for q in (0.5, 0.9)
        },
        **{
            f"inter-token p{round(100 * q)}": error(
                fast.inter_token_seconds.quantile(q), exact.inter_token_seconds.quantile(q)
            )
            for q in (0.5, 0.9)
        },
        "cached share": error(fast.cached_share, exact.cached_share),
        "busy seconds": error(fast.busy_seconds, exact.busy_seconds),
        "output tokens": error(fast.output_tokens, exact.output_tokens),
    }
