"""Arguments and run of `emberline bench drain`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from emberline.bench import report as reports
from emberline.core.config import DEFAULT_MODEL
from emberline.core.jsonfile import read_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"Model to serve. (default: {DEFAULT_MODEL})")
    parser.add_argument("--streams", type=int, default=8, help="Streams open at the worker that is drained.")
    parser.add_argument("--prompt", type=int, default=400, help="Prompt tokens of each stream.")
    parser.add_argument("--output", type=int, default=300, help="Generated tokens of each stream.")
    parser.add_argument("--after", type=int, default=10, help="Tokens that each stream has received before the drain.")
    parser.add_argument("--rounds", type=int, default=4, help="Number of repetitions.")
    parser.add_argument("--logs", type=Path, help="Directory for log files. (default: a new temporary directory)")
    reports.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench import drain
    from emberline.hub.source import resolve_model
    from emberline.models.config import ModelConfig

    vocab = ModelConfig.from_hf(read_object(resolve_model(args.model) / "config.json")).vocab
    plan = drain.DrainBenchPlan(args.streams, args.prompt, args.output, args.after, args.rounds)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="emberline-drain-"))
    report = drain.bench(args.model, vocab, plan, logs)
    report.print_and_save(args.json, args.commit)
    return 1 if report.results["errors"].value else 0
