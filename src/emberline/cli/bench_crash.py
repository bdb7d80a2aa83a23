"""`emberline bench gateway-crash`: the arguments, and the run."""

from __future__ import annotations

import argparse

from emberline.bench import report as reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flush", type=float, nargs="+", default=[1.0, 0.2], help="seconds, as in the settings")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of requests before the kill")
    parser.add_argument("--rounds", type=int, default=3)
    reports.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import gateway_crash

    report = gateway_crash.bench(gateway_crash.Plan(args.flush, args.rate, args.seconds, args.rounds))
    report.emit(args.json, args.commit)
    return 0 if gateway_crash.is_bounded(report) else 1
