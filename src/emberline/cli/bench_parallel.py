"""Arguments and runs of `emberline bench parallel`, `rank-faults` and `node-faults`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from emberline.bench import report as reports
from emberline.cli.bench_options import add_model_argument
from emberline.core.errors import InvalidRequest


def add_parsers(kinds: Any) -> None:
    """Add the benchmarks to `emberline bench`. `kinds`: its subparsers."""
    add_arguments(kinds.add_parser("parallel", help="Measure the cost of sending plans to ranks."))
    rank_faults = kinds.add_parser("rank-faults", help="Kill and stop ranks of an engine.")
    add_fault_arguments(rank_faults)
    rank_faults.epilog = "The model `tiny` is a random one, which starts and computes faster than any other."
    rank_faults.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: all ranks share one GPU, and their CUDA contexts are broken too. (default: cpu)",
    )
    rank_faults.add_argument("--dp-attention", action="store_true", help="Use data-parallel attention.")
    rank_faults.add_argument("--lanes", type=int, default=1, help="Engines at the same time. (default: 1)")
    rank_faults.add_argument(
        "--seconds", type=float, default=3600.0, help="Inject no further fault after this time. (default: 3600)"
    )
    rank_faults.add_argument(
        "--tokens", type=int, default=0, help="Tokens of each stream. (default: 1500 for the model `tiny`, else 32)"
    )
    rank_faults.add_argument("--append", action="store_true", help="Add the faults to those in the file of --json.")
    faults = "Cut the network between two nodes of an engine, kill and stop one of them."
    add_fault_arguments(kinds.add_parser("node-faults", help=faults))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8, help="Number of ranks that read each plan. (default: 8)")
    parser.add_argument("--requests", type=int, default=256, help="Requests in each step. (default: 256)")
    parser.add_argument("--context", type=int, default=4096, help="Tokens of each request. (default: 4096)")
    parser.add_argument("--steps", type=int, default=300, help="Number of steps. (default: 300)")
    parser.add_argument("--read-model", metavar="MODEL", help="Also count the bytes that ranks of this model read.")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[2, 3, 4], help="Values of --tp for --read-model. (default: 2 3 4)"
    )
    parser.add_argument(
        "--rank-results",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="Results of `python -m emberline.bench.gpu.rank`: project steps on several GPUs from them.",
    )
    parser.add_argument("--stages", metavar="MODEL", help="Also measure how busy the stages of this model are.")
    parser.add_argument("--serve", metavar="MODEL", help="Also measure requests over HTTP: one rank, --pp 2, --tp 3.")
    parser.add_argument("--pp", type=int, default=2, help="Number of stages for --stages. (default: 2)")
    parser.add_argument("--seconds", type=float, default=20.0, help="Seconds of each run for --stages. (default: 20)")
    reports.add_report_arguments(parser)


def add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--tp", type=int, default=1, help="Tensor ranks of each stage. (default: 1)")
    parser.add_argument("--pp", type=int, default=2, help="Number of pipeline stages. (default: 2)")
    parser.add_argument("--faults", type=int, default=20, help="Number of faults. (default: 20)")
    parser.add_argument("--streams", type=int, default=4, help="Streams that are open at a fault. (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="Random seed. (default: 0)")
    reports.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.bench.parallel import PlanBenchSettings, bench

    settings = PlanBenchSettings(args.ranks, args.requests, args.context, args.steps)
    report = bench(settings)
    if args.read_model:
        from emberline.bench.rank_reads import measure_reads

        measure_reads(report, args.read_model, args.tp)
    if args.rank_results:
        from emberline.bench.projection import add_projections

        add_projections(report, args.rank_results)
    if args.stages:
        from emberline.bench.pipeline_stages import measure_stages

        measure_stages(report, args.stages, args.pp, args.seconds)
    if args.serve:
        from emberline.bench.rank_http import measure_http

        measure_http(report, args.serve, pp=2, tp=3)
    report.print_and_save(args.json, args.commit)
    return 0


def run_faults(args: argparse.Namespace) -> int:
    from emberline.bench.rank_faults import RankFaultSettings

    def log(line: str) -> None:
        print(line, flush=True)

    common = {name: getattr(args, name) for name in ("model", "tp", "pp", "faults", "streams", "seed")}
    if args.what == "node-faults":
        from emberline.bench.node_faults import bench as bench_nodes

        report = bench_nodes(RankFaultSettings(**common), log)
    else:
        from emberline.bench.rank_faults import bench as bench_ranks
        from emberline.bench.rank_faults import default_tokens

        own = {name: getattr(args, name) for name in ("device", "dp_attention", "lanes", "seconds")}
        settings = RankFaultSettings(**common, **own, tokens=args.tokens or default_tokens(args.model))
        report = bench_ranks(settings, log, read_earlier_runs(args), args.commit)
    report.print_and_save(args.json, args.commit)
    return 1 if any(report.results[name].value for name in ("hung", "wrong", "leaked")) else 0


def read_earlier_runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs in the file of --json, to which this one is added."""
    if args.append and args.json is None:
        message = "--append adds to the file of --json, which is missing"
        raise InvalidRequest(message, param="append", hint="add --json FILE")
    if not args.append or not args.json.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(args.json.read_text("utf-8"))["config"]["runs"]
    return runs
