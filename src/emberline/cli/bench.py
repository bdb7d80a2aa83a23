"""`emberline bench WHAT`: measure the engine, a server and the peers. Each prints a table and ends in a JSON line."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.bench import report as reports
from emberline.cli import bench_crash, bench_drain
from emberline.cli.interrupt import interruptible
from emberline.core.config import DEFAULT_MODEL
from emberline.core.jsonfile import read_object

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
    _tiers(kinds.add_parser("tiers", help="blocks that come back from main memory, a disk and a store"))
    _kv_codec(kinds.add_parser("kv-codec", help="keys and values of a real prompt, compressed for wire and disk"))
    _router(kinds.add_parser("router", help="what the router adds, with workers that are fakes"))
    _routing(kinds.add_parser("routing", help="what ways of routing save, on a simulated cluster"))
    _churn(kinds.add_parser("churn", help="a cluster under load whose workers are restarted at random"))
    _split(kinds.add_parser("split", help="prompts and answers on separate workers, against workers that do both"))
    bench_drain.add_arguments(kinds.add_parser("drain", help="how long streams pause when their worker is drained"))
    _gateway(kinds.add_parser("gateway", help="what the gateway adds, with a provider that is a fake"))
    _gateway_logs(kinds.add_parser("gateway-logs", help="a log of many rows: its pages, and dropping a day"))
    bench_crash.add_arguments(kinds.add_parser("gateway-crash", help="log rows that kill -9 of a gateway loses"))
    _event_loop(kinds.add_parser("event-loop", help="how long one heavy request delays /health on each server"))
    plot = kinds.add_parser("plot", help="result files as an SVG")
    plot.add_argument("files", type=Path, nargs="+")
    plot.add_argument("-o", "--out", type=Path, required=True)


def run(args: argparse.Namespace) -> int:
    interruptible()
    if args.what == "plot":
        from emberline.bench.plot import plot

        plot(args.files, args.out)
        return 0
    runs = {"cpu": _run_cpu, "serve": _run_serve, "soak": _run_soak, "overhead": _run_overhead, "start": _run_start}
    return {
        **runs,
        "unweight": _run_unweight,
        "router": _run_router,
        "routing": _run_routing,
        "split": _run_split,
        "drain": bench_drain.run,
        "churn": _run_churn,
        "transfer": _run_transfer,
        "tiers": _run_tiers,
        "kv-codec": _run_kv_codec,
        "gateway": _run_gateway,
        "gateway-logs": _run_gateway_logs,
        "gateway-crash": bench_crash.run,
        "event-loop": _run_event_loop,
    }[args.what](args)


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
    asyncio.run(client.check())
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

    client = _client(args)
    asyncio.run(client.check())
    report = asyncio.run(soak(client, args.url, args.streams, args.seconds, args.abandon, args.vocab))
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


def _routing(p: argparse.ArgumentParser) -> None:
    p.add_argument("--sessions", type=int, default=160, help="conversations of 10 to 20 turns")
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--kv-tokens", type=int, default=81_920, help="of each worker")
    p.add_argument("--store-blocks", type=int, default=1 << 20)
    p.add_argument("--seeds", type=int, default=3)
    reports.add_arguments(p)


def _run_routing(args: argparse.Namespace) -> int:
    from emberline.bench import routing
    from emberline.sim.agents import Habits
    from emberline.sim.cluster import Shape

    shape = Shape(workers=args.workers, kv_tokens=args.kv_tokens)
    report = routing.bench(Habits(sessions=args.sessions), shape, args.store_blocks, args.seeds)
    report.emit(args.json, args.commit)
    return 0


def _churn(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--load", type=float, default=0.8, help="of what the cluster sustains, which is measured first")
    p.add_argument("--calibration", type=float, default=60.0, help="seconds for that")
    p.add_argument("--pause", type=float, nargs=2, default=[20.0, 40.0], help="least and most seconds between restarts")
    p.add_argument("--cases", type=int, default=48, help="requests whose answer is known")
    p.add_argument("--prefill", type=int, default=1, help="workers that compute prompts for others")
    p.add_argument("--decode", type=int, default=3, help="workers that go on from there; the first is never restarted")
    p.add_argument("--deadline", type=float, default=120.0, help="seconds for a request")
    p.add_argument("--kv-memory", default="96M", help="of each worker")
    p.add_argument("--seed", type=int, default=0)
    _logs(p)


def _run_churn(args: argparse.Namespace) -> int:
    from emberline.chaos import churn

    names = ("load", "calibration", "pause", "cases", "prefill", "decode", "deadline", "kv_memory", "seed")
    plan = churn.Plan(60 * args.minutes, *(getattr(args, name) for name in names))
    report = churn.bench(args.model, plan, _home(args), lambda what: print(what, flush=True))
    report.emit(args.json, args.commit)
    bad = ("errors_during_a_restart", "errors_unexplained", "wrong", "hung", "unrecovered", "leaked")
    return 1 if any(report.results[name].value for name in bad) else 0


def _split(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    p.add_argument("--chunks", type=_names, default=["512", "64"], help="tokens that a step may carry")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=120.0, help="of arrivals, in each turn")
    p.add_argument("--long", type=int, default=512, help="tokens of a long prompt")
    p.add_argument("--long-rate", type=float, default=0.12, help="of these, a second")
    p.add_argument("--chat", type=_names, default=["48", "64"], help="tokens of a short one's prompt and output")
    p.add_argument("--chat-rate", type=float, default=0.4, help="of these, a second")
    p.add_argument("--alone", type=int, default=4, help="long prompts before that, one at a time")
    _logs(p)


def _run_split(args: argparse.Namespace) -> int:
    from emberline.bench import split
    from emberline.hub.source import resolve
    from emberline.models.config import ModelConfig

    vocab = ModelConfig.from_hf(read_object(resolve(args.model) / "config.json")).vocab
    plan = split.Plan(
        list(map(int, args.chunks)), args.rounds, args.seconds, args.long, args.long_rate,
        (int(args.chat[0]), int(args.chat[1])), args.chat_rate, args.alone,
    )  # fmt: skip
    report = split.bench(args.model, vocab, plan, _home(args))
    report.emit(args.json, args.commit)
    return 1 if any(report.results[f"errors_{chunk}"].value for chunk in plan.chunks) else 0


def _tiers(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default=DEFAULT_MODEL)
    p.add_argument("--directory", type=Path, help="on the disk that is meant (default: where temporary files are)")
    p.add_argument("--tokens", type=_names, default=["256", "1024"], help="of a prompt")
    p.add_argument("--rounds", type=int, default=3)
    reports.add_arguments(p)


def _run_tiers(args: argparse.Namespace) -> int:
    from emberline.bench import tiers

    lengths = [int(length) for length in args.tokens]
    tiers.bench(args.model, args.directory, lengths, args.rounds).emit(args.json, args.commit)
    return 0


def _kv_codec(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default=DEFAULT_MODEL)
    p.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    p.add_argument("--links", type=_names, default=["1", "2.5", "10", "25"], help="Gbit/s, besides loopback")
    p.add_argument("--rounds", type=int, default=5)
    reports.add_arguments(p)


def _run_kv_codec(args: argparse.Namespace) -> int:
    from emberline.bench import kvcodec

    rates = [float(rate) for rate in args.links]
    kvcodec.bench(args.model, args.tokens, rates, args.rounds).emit(args.json, args.commit)
    return 0


def _gateway(p: argparse.ArgumentParser) -> None:
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--clients", type=int, default=32, help="connections with a request open at any time")
    p.add_argument("--prompt", type=int, default=1024, help="bytes")
    p.add_argument("--streams", type=int, default=32, help="open at any time")
    p.add_argument("--events", type=int, default=200, help="of one stream")
    p.add_argument("--pace", type=float, default=0.01, help="seconds between two events of a stream")
    p.add_argument("--soak", type=int, default=100_000, help="events that pass while its memory is watched")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--litellm", action="store_true", help="beside it; scripts/bench-peers litellm installs it")
    p.add_argument("--peers-dir", type=Path, default=Path("build/peers"), help="peers' environments")
    reports.add_arguments(p)


def _run_gateway(args: argparse.Namespace) -> int:
    from emberline.bench import gateway

    names = ("requests", "clients", "prompt", "streams", "events", "pace", "soak", "rounds")
    plan = gateway.Plan(*(getattr(args, name) for name in names))
    gateway.bench(plan, args.peers_dir if args.litellm else None).emit(args.json, args.commit)
    return 0


def _gateway_logs(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rows", type=int, default=1_000_000)
    p.add_argument("--days", type=int, default=7, help="over which they are spread")
    p.add_argument("--payload-every", type=int, default=20, help="rows: one of so many has a payload")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--store", metavar="URL", help="an empty one (default: SQLite in a temporary directory)")
    reports.add_arguments(p)


def _run_gateway_logs(args: argparse.Namespace) -> int:
    from emberline.bench import gateway_logs

    plan = gateway_logs.Plan(args.rows, args.days, args.payload_every, args.rounds)
    gateway_logs.bench(plan, args.store).emit(args.json, args.commit)
    return 0


def _event_loop(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", help="of the engine server (default: gateway and router only)")
    p.add_argument("--bytes", type=int, default=30 << 20, help="size of the heavy requests")
    p.add_argument("--rounds", type=int, default=1)
    reports.add_arguments(p)


def _run_event_loop(args: argparse.Namespace) -> int:
    from emberline.bench import event_loop

    event_loop.bench(args.model, args.bytes, args.rounds).emit(args.json, args.commit)
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


def _logs(p: argparse.ArgumentParser) -> None:
    p.add_argument("--logs", type=Path, help="folder (default: a new one in the temporary folder)")
    reports.add_arguments(p)


def _home(args: argparse.Namespace) -> Path:
    return args.logs or Path(tempfile.mkdtemp(prefix=f"emberline-{args.what}-"))


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
