"""Arguments and runs of the benchmarks on the simulator, of its costs and of its accuracy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from emberline.bench import report as reports
from emberline.cli import bench_accuracy
from emberline.cli.bench_options import add_model_argument, add_rounds_option, parse_numbers


def add_parsers(kinds: Any) -> None:
    _add_routing_arguments(kinds.add_parser("routing", help="Compare routing policies on a simulated cluster."))
    _add_step_costs_arguments(
        kinds.add_parser("step-costs", help="Measure the engine's steps on this CPU, as a table for the simulator.")
    )
    bench_accuracy.add_parsers(kinds)
    _add_sim_day_arguments(
        kinds.add_parser("sim-day", help="Simulate a day of traffic on a fleet of workers, by routing policy.")
    )


def _add_sim_day_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1000, help="Number of simulated workers.")
    parser.add_argument("--cell", type=int, default=25, metavar="N", help="Workers behind one router.")
    parser.add_argument(
        "--compared", type=int, default=50, metavar="N", help="Workers with which all routing policies are compared."
    )
    parser.add_argument("--requests", type=float, default=400.0, help="Requests for each worker.")
    parser.add_argument("--hours", type=float, default=24.0, help="Simulated time.")
    parser.add_argument(
        "--check-minutes", type=float, default=4.0, help="Simulated time in which every step is planned as well."
    )
    parser.add_argument("--processes", type=int, default=2, help="Processes that simulate.")
    reports.add_report_arguments(parser)


def _run_sim_day(args: argparse.Namespace) -> int:
    from emberline.bench import sim_day

    plan = sim_day.DayPlan(
        workers=args.workers,
        cell_workers=args.cell,
        compared_workers=args.compared,
        requests_per_worker=args.requests,
        hours=args.hours,
        check_minutes=args.check_minutes,
        processes=args.processes,
    )
    sim_day.bench(plan).print_and_save(args.json, args.commit)
    return 0


def _add_step_costs_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--rows", type=parse_numbers, default=(1, 2, 4, 8, 16), help="Decoding requests in a step, comma-separated."
    )
    parser.add_argument(
        "--contexts", type=parse_numbers, default=(64, 512), help="Tokens of their contexts, comma-separated."
    )
    parser.add_argument(
        "--chunks", type=parse_numbers, default=(16, 64, 256), help="Prompt tokens in a step, comma-separated."
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine.")
    add_rounds_option(parser, 3)
    reports.add_report_arguments(parser)


def _run_step_costs(args: argparse.Namespace) -> int:
    from emberline.bench import step_costs

    plan = step_costs.StepCostPlan(args.rows, args.contexts, args.chunks, args.threads, args.rounds)
    step_costs.bench(args.model, plan).print_and_save(args.json, args.commit)
    return 0


def _add_routing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=160, help="Number of conversations, of 10 to 20 requests each.")
    parser.add_argument("--workers", type=int, default=4, help="Number of simulated workers.")
    parser.add_argument("--kv-tokens", type=int, default=81_920, help="KV cache of each worker in tokens.")
    parser.add_argument("--store-blocks", type=int, default=1 << 20, help="Capacity of the shared store in blocks.")
    parser.add_argument("--seeds", type=int, default=3, help="Number of simulations, each with its own random seed.")
    reports.add_report_arguments(parser)


def _run_routing_bench(args: argparse.Namespace) -> int:
    from emberline.bench import routing
    from emberline.sim.cluster import SimClusterConfig
    from emberline.sim.workloads.agents import AgentWorkload

    shape = SimClusterConfig(workers=args.workers, kv_tokens=args.kv_tokens)
    report = routing.bench(AgentWorkload(num_sessions=args.sessions), shape, args.store_blocks, args.seeds)
    report.print_and_save(args.json, args.commit)
    return 0


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "routing": _run_routing_bench,
    "step-costs": _run_step_costs,
    "sim-day": _run_sim_day,
    **bench_accuracy.RUNS,
}
