"""Arguments and run of `emberline bench gateway-crash`."""

from __future__ import annotations

import argparse

from emberline.bench import report as reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flush",
        type=float,
        nargs="+",
        default=[1.0, 0.2],
        help="Seconds between two writes of the log, each measured.",
    )
    parser.add_argument("--rate", type=float, default=200.0, help="Requests per second.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Seconds of requests before the kill.")
    parser.add_argument("--rounds", type=int, default=3, help="Number of repetitions.")
    reports.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import gateway_crash

    report = gateway_crash.bench(gateway_crash.CrashBenchPlan(args.flush, args.rate, args.seconds, args.rounds))
    report.print_and_save(args.json, args.commit)
    return 0 if gateway_crash.is_loss_within_flush_interval(report) else 1
