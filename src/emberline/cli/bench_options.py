"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from emberline.bench import report as reports
from emberline.cli.options import parse_comma_list
from emberline.core.config import DEFAULT_MODEL


def add_rounds_option(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=int, default=default, help="Number of repetitions.")


def add_peers_dir_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers-dir", type=Path, default=Path("build/peers"), help="Directory of the peers' environments and logs."
    )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"Model to serve. (default: {DEFAULT_MODEL})")


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Model to measure.")


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core.")


def add_local_engine_arguments(parser: argparse.ArgumentParser, rounds: int = 3) -> None:
    add_model_option(parser)
    add_rounds_option(parser, rounds)
    add_peers_dir_option(parser)
    reports.add_report_arguments(parser)


def add_logs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=Path, help="Directory for log files. (default: a new temporary directory)")
    reports.add_report_arguments(parser)


def choose_log_dir(args: argparse.Namespace) -> Path:
    return args.logs or Path(tempfile.mkdtemp(prefix=f"emberline-{args.what}-"))


def parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in parse_comma_list(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers (hint: write 1,8,16)") from None
