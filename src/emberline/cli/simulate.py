"""`emberline simulate`: runs a workload on a simulated cluster, and prints latencies, throughput and worker-hours."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from emberline.cli.options import parse_comma_list
from emberline.core.errors import InvalidRequest
from emberline.core.step_costs import StepCostTable
from emberline.sim.choosers import (
    WorkerChooser,
    choose_worker_by_policy,
    choose_worker_with_fewest_requests,
    make_random_chooser,
    make_round_robin_chooser,
)
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.costs import find_cost_table
from emberline.sim.link import KVLink
from emberline.sim.result import Distribution, SimResult
from emberline.sim.workloads.parse import EXAMPLE, parse_workload

PROGRESS_SIMULATED_SECONDS = 1.0  # between two looks at the wall clock
PROGRESS_INTERVAL_S = 1.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ROUTING: dict[str, Callable[[int], WorkerChooser]] = {
    "router": lambda seed: choose_worker_by_policy,
    "fewest-requests": lambda seed: choose_worker_with_fewest_requests,
    "round-robin": lambda seed: make_round_robin_chooser(),
    "random": make_random_chooser,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        help=f"A trace file (a gateway's log, Mooncake, Azure or BurstGPT), or poisson, bursts, diurnal or agents with"
        f" settings, such as {EXAMPLE}.",
    )
    parser.add_argument("--workers", type=int, default=4, help="Workers that generate tokens.")
    parser.add_argument("--prefill-workers", type=int, default=0, help="Further workers, which only compute prompts.")
    parser.add_argument("--gpu", default="h200", help="GPU whose step times are used.")
    parser.add_argument("--model", default="llama-8b", metavar="SHAPE", help="Model whose step times are used.")
    parser.add_argument("--weights", default="plain", help="Weight format whose step times are used.")
    parser.add_argument(
        "--step-costs",
        type=Path,
        metavar="FILE",
        help="Step times of your own, from `emberline bench step-costs --json FILE`, instead of --gpu and --model.",
    )
    parser.add_argument(
        "--kv-tokens", type=int, help="KV cache of a worker in tokens. (default: that of the GPU with the model)"
    )
    parser.add_argument("--max-running", type=int, default=256, help="Requests that a worker runs at the same time.")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="Tokens that a worker computes in one step.")
    parser.add_argument("--itl-target-ms", type=float, help="Target inter-token latency, as for emberline serve.")
    parser.add_argument("--link", type=float, default=25.0, metavar="GB/S", help="Speed of KV transfer to a worker.")
    parser.add_argument("--routing", choices=list(ROUTING), default="router", help="How workers are chosen.")
    parser.add_argument(
        "--kill", type=_parse_times, default=(), metavar="S,...", help="Times in seconds at which a worker is killed."
    )
    parser.add_argument(
        "--start-seconds", type=float, default=60.0, help="Seconds until the replacement of a killed worker is ready."
    )
    parser.add_argument(
        "--detail",
        choices=["steps", "runs"],
        default="steps",
        help="steps: the engine's scheduler plans every step. runs: equal steps are computed at once, much faster.",
    )
    parser.add_argument("--until", type=float, default=math.inf, metavar="S", help="Seconds after which to stop.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything that is random.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    logging.getLogger("emberline.router").setLevel(logging.ERROR)  # it warns of each worker that is killed
    workload = parse_workload(args.workload)
    costs = _load_costs(args)
    cluster = SimCluster(_make_config(args, costs), ROUTING[args.routing](args.seed))
    for time in args.kill:
        cluster.call_at(time, lambda: _replace_first_worker(cluster, args.start_seconds))
    progress = SimulationProgress(cluster)
    if sys.stderr.isatty():
        cluster.call_every(PROGRESS_SIMULATED_SECONDS, progress.show)
    report = _make_report(cluster.run(workload.sessions(args.seed), args.until), costs)
    progress.clear()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print_table(report)
    if not report["requests"]:
        print("no request was answered", file=sys.stderr)
    return 0 if report["requests"] else 1


class SimulationProgress:
    """A line on stderr that shows, about once a second, how far a simulation is."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster, self._next_at, self._is_shown = cluster, monotonic() + PROGRESS_INTERVAL_S, False

    def show(self) -> None:
        if monotonic() < self._next_at:
            return
        self._next_at, self._is_shown = monotonic() + PROGRESS_INTERVAL_S, True
        done = f"{self._cluster.now:,.0f} s simulated, {self._cluster.result.requests:,} requests answered"
        print(f"\r{done}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _load_costs(args: argparse.Namespace) -> StepCostTable:
    if args.step_costs is not None:
        return StepCostTable.load(args.step_costs)
    return find_cost_table(args.gpu, args.model, args.weights)


def _make_config(args: argparse.Namespace, costs: StepCostTable) -> SimClusterConfig:
    kv_tokens = args.kv_tokens if args.kv_tokens is not None else costs.kv_tokens
    for flag, value in (
        ("--workers", args.workers),
        ("--max-running", args.max_running),
        ("--max-batch-tokens", args.max_batch_tokens),
        ("--kv-tokens", kv_tokens),
        ("--link", args.link),
    ):
        if not value > 0:
            unknown = flag == "--kv-tokens" and args.kv_tokens is None
            hint = "the step costs do not say how many tokens fit: add --kv-tokens" if unknown else None
            raise InvalidRequest(f"{flag} is {value}; it must be above 0", param=flag.removeprefix("--"), hint=hint)
    for flag, value in (("--start-seconds", args.start_seconds), ("--until", args.until)):
        if not value >= 0:
            raise InvalidRequest(f"{flag} is {value}; it must be at least 0", param=flag.removeprefix("--"))
    block_size = 64 if costs.plans_ahead else 16
    if kv_tokens < block_size:
        message = f"--kv-tokens is {kv_tokens}; it must be at least {block_size}, the tokens of one block"
        raise InvalidRequest(message, param="kv-tokens")
    return SimClusterConfig(
        workers=args.workers,
        prefill_workers=args.prefill_workers,
        kv_tokens=kv_tokens,
        max_running=args.max_running,
        batch_tokens=max(args.max_batch_tokens, args.max_running),
        itl_target_ms=args.itl_target_ms,
        block_size=block_size,
        cost=costs,
        link=KVLink(args.link * 1e9),
        kv_bytes_per_token=costs.kv_bytes_per_token or SimClusterConfig().kv_bytes_per_token,
        detail=args.detail,
    )


def _replace_first_worker(cluster: SimCluster, start_seconds: float) -> None:
    """Kill the longest-running worker that generates tokens, and start another in its place."""
    names = [name for name, worker in cluster.workers.items() if worker.role != "prefill" and worker.state == "ready"]
    if names:
        cluster.kill_worker(names[0])
        cluster.add_worker(start_seconds=start_seconds)


def _make_report(result: SimResult, costs: StepCostTable) -> dict[str, Any]:
    hours = result.worker_seconds / 3600
    return {
        "requests": result.requests,
        "refused": result.refused,
        "failed": result.failed,
        "too_long": result.too_long,
        "moved": result.moved,
        "handoffs": result.handoffs,
        "seconds": result.seconds,
        "requests_per_second": result.requests / result.seconds if result.seconds else 0.0,
        "output_tokens_per_second": result.output_tokens / result.seconds if result.seconds else 0.0,
        "cached_share": result.cached_share,
        "ttft_seconds": _quantiles(result.ttft_seconds),
        "inter_token_seconds": _quantiles(result.inter_token_seconds),
        "worker_hours": hours,
        "busy_share": result.busy_seconds / result.worker_seconds if result.worker_seconds else 0.0,
        "worker_hours_per_million_output_tokens": 1e6 * hours / result.output_tokens if result.output_tokens else None,
        "load_imbalance": result.load_imbalance.mean if result.load_imbalance.count else None,
        "step_costs": costs.name,
        "step_costs_source": costs.source,
    }


def _quantiles(values: Distribution) -> dict[str, float | None]:
    return {name: values.quantile(q) if values.count else None for name, q in QUANTILES.items()}


def _print_table(report: dict[str, Any]) -> None:
    for name, value in report.items():
        shown = value
        if isinstance(value, dict):
            shown = "  ".join(f"{label} {_format(number)}" for label, number in value.items())
        print(f"{name:40} {_format(shown)}")


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _parse_times(text: str) -> tuple[float, ...]:
    try:
        times = tuple(float(each) for each in parse_comma_list(text))
    except ValueError:
        times = (math.nan,)
    if not all(0 <= time < math.inf for time in times):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of seconds (hint: write 60,300)")
    return times
