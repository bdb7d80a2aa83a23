"""Arguments and run of `emberline bench autoscaler`."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from emberline.cli.bench_options import add_logs_option, choose_log_dir
from emberline.core.slo import LatencyTargets

if TYPE_CHECKING:
    from emberline.bench.autoscaler import AutoscalerBenchPlan, LoadTrace

MAX_SIMULATED_WORKERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=100.0, help="Length of each simulated trace.")
    parser.add_argument(
        "--workers", type=float, default=7.0, help="Workers needed: mean of the diurnal trace, and between bursts."
    )
    parser.add_argument("--slo", default="ttft_p90=3s,itl_p90=100ms", help="Latencies to keep.")
    parser.add_argument("--prompt", type=int, default=16_000, help="Prompt tokens of a request, median.")
    parser.add_argument("--output", type=int, default=300, help="Generated tokens of a request, median.")
    parser.add_argument("--start-seconds", type=float, default=15.0, help="Seconds from a worker's start to ready.")
    parser.add_argument("--burst-s", type=float, default=20.0, help="Seconds of the burst on a real cluster.")
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import autoscaler
    from emberline.bench.autoscaler_crash import CrashPlan, run_crash
    from emberline.bench.autoscaler_wake import add_wake_results, run_wake

    logs = choose_log_dir(args)
    logs.mkdir(parents=True, exist_ok=True)
    crash = asyncio.run(run_crash(CrashPlan(burst_s=args.burst_s), logs))
    wake = asyncio.run(run_wake(logs))
    plan = _build_plan(args)
    report = autoscaler.bench(plan, lambda capacity: _build_traces(args, capacity), crash)
    add_wake_results(report, wake)
    report.print_and_save(args.json, args.commit)
    return 1 if crash.lost or crash.left_processes else 0


def _build_plan(args: argparse.Namespace) -> AutoscalerBenchPlan:
    from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings
    from emberline.bench.autoscaler import AutoscalerBenchPlan
    from emberline.sim.cluster import SimClusterConfig
    from emberline.sim.costs import find_cost_table

    costs = find_cost_table("h200", "llama-8b", "plain")
    slo, pool = LatencyTargets.parse(args.slo), PoolSettings("both", 1, MAX_SIMULATED_WORKERS)
    settings = AutoscalerSettings(slo, (pool,), start_seconds=args.start_seconds, period=0.0)
    cluster = SimClusterConfig(
        workers=1, kv_tokens=costs.kv_tokens // 16 * 16, max_running=256, batch_tokens=2048, cost=costs, detail="runs"
    )
    return AutoscalerBenchPlan(settings, cluster, args.start_seconds, args.prompt, args.output)


def _build_traces(args: argparse.Namespace, capacity: float) -> list[LoadTrace]:
    """Return the traces, whose rates fit a worker's capacity in requests per second."""
    from emberline.bench.autoscaler import LoadTrace
    from emberline.sim.workloads.arrivals import DiurnalRate
    from emberline.sim.workloads.ramped_bursts import RampedBurstRate

    seconds, rate = 60 * args.minutes, args.workers * capacity
    bursts = RampedBurstRate(rate, seconds, max(1, round(seconds / 3000)), (1.5, 2.0), (900.0, 1200.0), 300.0)
    return [LoadTrace("diurnal", DiurnalRate(rate, 1.7, seconds), seconds), LoadTrace("bursts", bursts, seconds)]
