"""Arguments and runs of `emberline bench gateway` and `emberline bench gateway-logs`."""

from __future__ import annotations

import argparse

from emberline.bench import report as reports
from emberline.cli.bench_options import add_peers_dir_option, add_rounds_option


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, help="Number of requests without a stream.")
    parser.add_argument("--clients", type=int, default=32, help="Connections that each have one request open.")
    parser.add_argument("--prompt", type=int, default=1024, help="Prompt length in bytes.")
    parser.add_argument("--streams", type=int, default=32, help="Streams open at the same time.")
    parser.add_argument("--events", type=int, default=200, help="Events of each stream.")
    parser.add_argument("--pace", type=float, default=0.01, help="Seconds between two events of a stream.")
    parser.add_argument("--soak", type=int, default=100_000, help="Number of events during which memory is measured.")
    parser.add_argument("--api", choices=("chat", "messages"), default="chat", help="API of OpenAI or of Anthropic.")
    add_rounds_option(parser, 3)
    parser.add_argument(
        "--litellm", action="store_true", help="Measure LiteLLM too; scripts/bench-peers litellm installs it."
    )
    add_peers_dir_option(parser)
    reports.add_report_arguments(parser)


def run_gateway(args: argparse.Namespace) -> int:
    from emberline.bench import gateway

    names = ("requests", "clients", "prompt", "streams", "events", "pace", "soak", "rounds", "api")
    plan = gateway.GatewayBenchPlan(*(getattr(args, name) for name in names))
    gateway.bench(plan, args.peers_dir if args.litellm else None).print_and_save(args.json, args.commit)
    return 0


def add_gateway_logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000, help="Number of log rows.")
    parser.add_argument("--days", type=int, default=7, help="Days over which the rows are spread.")
    parser.add_argument("--payload-every", type=int, default=20, help="Every how many rows one has a payload.")
    add_rounds_option(parser, 5)
    parser.add_argument("--store", metavar="URL", help="An empty database. (default: SQLite in a temporary directory)")
    reports.add_report_arguments(parser)


def run_gateway_logs(args: argparse.Namespace) -> int:
    from emberline.bench import gateway_logs

    plan = gateway_logs.LogBenchPlan(args.rows, args.days, args.payload_every, args.rounds)
    gateway_logs.bench(plan, args.store).print_and_save(args.json, args.commit)
    return 0
