"""Arguments and run of `emberline bench speculation`."""

from __future__ import annotations

import argparse

from emberline.bench import report as reports
from emberline.cli.bench_options import add_rounds_option
from emberline.core.config import DEFAULT_MODEL
from emberline.core.engine_config import DEVICES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Model to measure; it needs a chat template.")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="Device that computes.")
    parser.add_argument(
        "--sets",
        nargs="+",
        default=["edits", "chat"],
        help="Prompts: edits (of code), chat, calls (of tools).",
    )
    parser.add_argument("--methods", nargs="+", default=["suffix"], help="Methods to compare with off.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="Requests at the same time.")
    parser.add_argument("--prompts", type=int, default=60, help="Number of prompts of each set.")
    parser.add_argument("--max-tokens", type=int, default=400, help="Maximum output of a request in tokens.")
    parser.add_argument("--max-draft", type=int, default=8, help="Maximum guessed tokens of a request in one step.")
    parser.add_argument(
        "--http",
        action="store_true",
        help="Start a server for each method, and report the first and the last pass that a client sees.",
    )
    add_rounds_option(parser, 2)
    reports.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import speculation, speculation_http

    plan = speculation.SpeculationPlan(
        args.sets, args.methods, args.streams, args.prompts, args.max_tokens, args.max_draft, args.rounds
    )
    if args.http:
        report = speculation_http.bench(args.model, plan, args.device)
    else:
        report = speculation.bench(args.model, plan, device=args.device)
    report.print_and_save(args.json, args.commit)
    return 0
