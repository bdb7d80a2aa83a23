"""Arguments and run of `emberline bench exact`."""

from __future__ import annotations

import argparse
import math

from emberline.bench import report as reports
from emberline.cli.bench_options import add_rounds_option
from emberline.core.config import DEFAULT_MODEL
from emberline.core.engine_config import DEVICES, WEIGHT_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Model to measure; it needs a chat template.")
    parser.add_argument(
        "--random-8b", action="store_true", help="Measure Llama 3.1 8B with random weights on a GPU, not --model."
    )
    parser.add_argument("--device", default="auto", choices=DEVICES, help="Device that computes.")
    parser.add_argument("--weights", default="auto", choices=WEIGHT_FORMATS, help="Format of the weights on a GPU.")
    parser.add_argument("--prompts", type=int, default=600, help="Number of requests.")
    parser.add_argument("--max-tokens", type=int, default=300, help="Maximum output of a request in tokens.")
    parser.add_argument("--streams", type=int, default=48, help="Maximum number of requests at the same time.")
    parser.add_argument("--max-draft", type=int, default=8, help="Maximum drafted tokens of a request in one step.")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="Batch sizes whose step time is measured."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="Seconds for both modes with the starts of their engines; outputs that are unfinished then are compared"
        " as far as they go. (default: no limit)",
    )
    add_rounds_option(parser, 3)
    reports.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import exact

    plan = exact.ExactPlan(
        *(args.prompts, args.max_tokens, args.streams, args.max_draft, args.batches, args.rounds), args.seconds
    )
    settings = {"weights": args.weights} if args.random_8b else {"device": args.device, "weights": args.weights}
    report = exact.bench(None if args.random_8b else args.model, plan, **settings)
    report.print_and_save(args.json, args.commit)
    found = report.results.get("spec_exact_mismatches")
    return 1 if found is None or found.value or "failed" in report.config else 0
