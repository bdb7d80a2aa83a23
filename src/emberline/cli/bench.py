"""`emberline bench WHAT`: measure the engine, the server and the peers; every one ends in a JSON line."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "measure speed, on this machine or against any OpenAI URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _cpu(kinds.add_parser("cpu", help="our engine and its peers, one run, turn by turn"))


def _cpu(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="smollm2")
    p.add_argument("--peers", default="", help="names with commas between; none: ourselves alone")
    p.add_argument("--tasks", default="", help="such as prefill_512,decode_8,mix_64; all when not given")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--deadline", type=float, default=600.0, help="seconds that one job may take")
    p.add_argument("--peers-dir", type=Path, default=Path("build/peers"))
    _json(p)


def _json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")


def run(args: argparse.Namespace) -> int:
    match args.what:
        case "cpu":
            from emberline.bench import cpu

            tasks = args.tasks.split(",") if args.tasks else list(cpu.TASKS)
            peers = [name for name in args.peers.split(",") if name]
            report = cpu.bench(args.model, peers, tasks, args.threads, args.rounds, args.deadline, args.peers_dir)
            report.emit(args.json)
    return 0
