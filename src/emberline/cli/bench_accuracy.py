"""Arguments and runs of the benchmarks that compare the simulator with measurements and with a published claim."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emberline.bench import report as reports
from emberline.cli.bench_options import add_logs_option, choose_log_dir, parse_numbers
from emberline.cli.options import parse_comma_list


def add_parsers(kinds: Any) -> None:
    _add_accuracy_arguments(
        kinds.add_parser("sim-accuracy", help="Compare the simulator with real clusters of this machine.")
    )
    _add_claim_arguments(
        kinds.add_parser("split-claim", help="Simulate how splitting prefill from decode shortens inter-token times.")
    )


def _add_accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=parse_comma_list, default=("tiny", "smollm2"), help="Models to serve, comma-separated."
    )
    parser.add_argument(
        "--loads", type=parse_numbers, default=(40, 70, 90), help="Percent of the capacity, comma-separated."
    )
    parser.add_argument("--seconds", type=float, default=96.0, help="Seconds of arrivals at each load.")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results"),
        help="Directory of the H200's result files, which are compared too.",
    )
    parser.add_argument(
        "--real", type=Path, metavar="FILE", help="Simulate again what this result file of the command has measured."
    )
    add_logs_option(parser)


def _run_accuracy(args: argparse.Namespace) -> int:
    from emberline.bench import sim_accuracy

    if args.real is not None:
        sim_accuracy.compare_recorded(args.real, args.results).print_and_save(args.json, args.commit)
        return 0
    report = sim_accuracy.bench(args.cases, args.loads, args.seconds, args.results, choose_log_dir(args))
    report.print_and_save(args.json, args.commit)
    return 0


def _add_claim_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=57.2, help="Requests per second at the whole cluster.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Simulated seconds; the first half is a warm-up.")
    parser.add_argument(
        "--detail", choices=("steps", "runs"), default="steps", help="Plan each step, or runs of decode steps at once."
    )
    reports.add_report_arguments(parser)


def _run_claim(args: argparse.Namespace) -> int:
    from emberline.bench import split_claim

    split_claim.bench(args.rate, args.seconds, args.detail).print_and_save(args.json, args.commit)
    return 0


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {"sim-accuracy": _run_accuracy, "split-claim": _run_claim}
