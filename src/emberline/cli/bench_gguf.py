"""`emberline bench gguf`: compares a GGUF model on the CPU with llama.cpp."""

from __future__ import annotations

import argparse

from emberline.cli.bench_options import add_local_engine_arguments, add_threads_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_engine_arguments(parser, 5)
    parser.add_argument("--start-rounds", type=int, default=5, help="Number of measured starts.")
    add_threads_option(parser)
    parser.add_argument("--deadline", type=float, default=600.0, help="Seconds that one task may take.")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="Seconds to wait for an idle machine before each measurement."
    )


def run(args: argparse.Namespace) -> int:
    from emberline.bench import gguf
    from emberline.bench.cpu import CPUBenchSettings

    settings = CPUBenchSettings(args.threads, args.rounds, args.deadline, args.patience)
    report = gguf.bench(args.model, settings, args.start_rounds, args.peers_dir)
    report.print_and_save(args.json, args.commit)
    return 0
