"""`emberline bench WHAT`: measure the engine, a server and the peers. Each prints a table and ends in a JSON line."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.bench import report as reports
from emberline.core.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from emberline.bench.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _cpu(kinds.add_parser("cpu", help="our engine and its peers, in one run, turn by turn"))
    _serve(kinds.add_parser("serve", help="load on any OpenAI URL: latencies and throughput"))
    _soak(kinds.add_parser("soak", help="many streams for minutes: errors, leaks, memory"))
    _overhead(kinds.add_parser("overhead", help="what the API adds to the engine"))
    _start(kinds.add_parser("start", help="from start to ready"))
    _unweight(kinds.add_parser("unweight", help="packed weights: their size, and the speed of the codec"))
    _transfer(kinds.add_parser("transfer", help="blocks from one cache into another, over each transport"))
    _router(kinds.add_parser("router", help="what the router adds, with workers that are fakes"))
    plot = kinds.add_parser("plot", help="result files as an SVG")
    plot.add_argument("files", type=Path, nargs="+")
    plot.add_argument("-o", "--out", type=Path, required=True)


def run(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    if args.what == "plot":
        from emberline.bench.plot import plot

        plot(args.files, args.out)
        return 0
    runs = {"cpu": _run_cpu, "serve": _run_serve, "soak": _run_soak, "overhead": _run_overhead, "start": _run_start}
    return {**runs, "unweight": _run_unweight, "router": _run_router, "transfer": _run_transfer}[args.what](args)


def _cpu(p: argparse.ArgumentParser) -> None:
    _local(p)
    p.add_argument("--peers", type=_names, default=[], help="with commas between; scripts/bench-peers installs them")
    p.add_argument("--tasks", type=_names, default=[], help="such as prefill_512,decode_8,mix_64 (default: all)")
    p.add_argument("--threads", type=int, default=0, help="0: all cores")
    p.add_argument("--deadline", type=float, default=600.0, help="seconds that one job may take")
    p.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine before each turn")


def _run_cpu(args: argparse.Namespace) -> int:
    from emberline.bench import cpu

    tasks = args.tasks or list(cpu.TASKS)
    rules = cpu.Rules(args.threads, args.rounds, args.deadline, args.patience)
    report = cpu.bench(args.model, args.peers, tasks, rules, args.peers_dir)
    report.emit(args.json, args.commit)
    return 0


def _serve(p: argparse.ArgumentParser) -> None:
    _remote(p)
    p.add_argument("--requests", type=int, default=100)
    p.add_argument("--concurrency", type=int, help="requests open at any time")
    p.add_argument("--rate", type=float, help="arrivals a second instead, Poisson")
    p.add_argument("--input-len", type=int, default=128, help="tokens")
    p.add_argument("--output-len", type=int, default=64, help="tokens")


def _run_serve(args: argparse.Namespace) -> int:
    from emberline.bench import serve

    job = serve.requests(args.requests, args.input_len, args.output_len, args.vocab)
    names = ("model", "requests", "concurrency", "rate", "input_len", "output_len", "chat", "plain")
    client, config = _client(args), {name: getattr(args, name) for name in names}
    report = serve.bench(client, args.url, job, args.concurrency, args.rate, config)
    report.emit(args.json, args.commit)
    return 1 if report.results["errors"].value else 0


def _soak(p: argparse.ArgumentParser) -> None:
    _remote(p)
    p.add_argument("--streams", type=int, default=64)
    p.add_argument("--seconds", type=float, default=300.0)
    p.add_argument("--abandon", type=float, default=0.05, help="share of streams that the client leaves midway")


def _run_soak(args: argparse.Namespace) -> int:
    from emberline.bench.soak import soak

    report = asyncio.run(soak(_client(args), args.url, args.streams, args.seconds, args.abandon, args.vocab))
    report.emit(args.json, args.commit)
    bad = ("errors", "unended", "leaked", "engine_restarts")
    return 1 if any(report.results[name].value for name in bad if name in report.results) else 0


def _overhead(p: argparse.ArgumentParser) -> None:
    _local(p)
    p.add_argument("--batches", type=_names, default=["1", "16"])
    p.add_argument("--threads", type=int, default=0, help="0: all cores")


def _run_overhead(args: argparse.Namespace) -> int:
    from emberline.bench import overhead

    batches = [int(batch) for batch in args.batches]
    overhead.bench(args.model, batches, args.threads, args.rounds, args.peers_dir).emit(args.json, args.commit)
    return 0


def _start(p: argparse.ArgumentParser) -> None:
    _local(p)


def _run_start(args: argparse.Namespace) -> int:
    from emberline.bench import start

    start.bench(args.model, args.rounds, args.peers_dir).emit(args.json, args.commit)
    return 0


def _unweight(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--peers-dir", type=Path, default=Path("build/peers"), help="peers' environments")
    reports.add_arguments(p)


def _run_unweight(args: argparse.Namespace) -> int:
    from emberline.bench import unweight

    unweight.bench(args.rounds, args.peers_dir).emit(args.json, args.commit)
    return 0


def _transfer(p: argparse.ArgumentParser) -> None:
    p.add_argument("--blocks", type=_names, default=["64", "256", "1024", "2048"], help="KiB of a block")
    p.add_argument("--total", type=int, default=256, help="MiB moved each time")
    p.add_argument("--piece", type=int, default=4096, help="KiB that travel at once")
    p.add_argument("--rounds", type=int, default=5)
    reports.add_arguments(p)


def _run_transfer(args: argparse.Namespace) -> int:
    from emberline.bench import transfer

    sizes = [int(size) << 10 for size in args.blocks]
    transfer.bench(sizes, args.total << 20, args.rounds, args.piece << 10).emit(args.json, args.commit)
    return 0


def _router(p: argparse.ArgumentParser) -> None:
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--streams", type=int, default=64, help="open at any time")
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--events", type=int, default=64, help="of one reply")
    p.add_argument("--pace", type=float, default=0.0, help="seconds between two events of a worker's reply")
    p.add_argument("--prompt", type=int, default=4096, help="bytes")
    p.add_argument("--rounds", type=int, default=3)
    reports.add_arguments(p)


def _run_router(args: argparse.Namespace) -> int:
    from emberline.bench import router

    plan = router.Plan(args.workers, args.streams, args.requests, args.events, args.pace, args.prompt)
    router.bench(plan, args.rounds).emit(args.json, args.commit)
    return 0


def _local(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default=DEFAULT_MODEL)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peers-dir", type=Path, default=Path("build/peers"), help="peers' environments, and logs")
    reports.add_arguments(p)


def _remote(p: argparse.ArgumentParser) -> None:
    p.add_argument("--url", default="http://127.0.0.1:8000/v1")
    p.add_argument("--model", default=DEFAULT_MODEL)
    p.add_argument("--api-key")
    p.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    p.add_argument("--plain", action="store_true", help="only what every server knows: text prompts, no ignore_eos")
    p.add_argument("--vocab", type=int, default=32000, help="prompts are random ids below this")
    reports.add_arguments(p)


def _client(args: argparse.Namespace) -> Client:
    from emberline.bench.client import Client

    return Client(args.url, args.model, chat=args.chat, plain=args.plain, key=args.api_key)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
