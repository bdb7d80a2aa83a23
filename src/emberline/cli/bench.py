"""`emberline bench WHAT`: measures the engine, its peers, a server or parts of the stack.

Each benchmark prints a table and ends with one JSON line."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.bench import report as reports
from emberline.cli import (
    bench_autoscaler,
    bench_churn,
    bench_crash,
    bench_drain,
    bench_exact,
    bench_gateway,
    bench_gguf,
    bench_parallel,
    bench_sim,
    bench_speculation,
)
from emberline.cli.bench_options import (
    add_local_engine_arguments,
    add_logs_option,
    add_model_argument,
    add_model_option,
    add_peers_dir_option,
    add_rounds_option,
    add_threads_option,
    choose_log_dir,
)
from emberline.cli.interrupt import interrupt_on_termination
from emberline.core.jsonfile import read_object
from emberline.core.output_file import check_output_file

if TYPE_CHECKING:
    from emberline.bench.client import CompletionClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _add_cpu_arguments(
        kinds.add_parser("cpu", help="Compare the engine with its peers on the CPU, in alternating rounds.")
    )
    _add_serve_arguments(kinds.add_parser("serve", help="Put load on any OpenAI URL: latencies and throughput."))
    _add_soak_arguments(kinds.add_parser("soak", help="Run many streams for minutes: errors, leaks, memory."))
    _add_overhead_arguments(kinds.add_parser("overhead", help="Measure the time that the API adds to the engine's."))
    bench_gguf.add_arguments(kinds.add_parser("gguf", help="Compare a GGUF model on the CPU with llama.cpp."))
    add_local_engine_arguments(kinds.add_parser("start", help="Measure the time from start to ready."))
    _add_unweight_arguments(
        kinds.add_parser("unweight", help="Measure the size of packed weights and the speed of the codec.")
    )
    _add_transfer_arguments(kinds.add_parser("transfer", help="Move KV blocks between two caches over each transport."))
    _add_tiers_arguments(kinds.add_parser("tiers", help="Load KV blocks back from main memory, a disk and a store."))
    _add_kv_codec_arguments(
        kinds.add_parser("kv-codec", help="Compress the KV blocks of a real prompt for network and disk.")
    )
    bench_speculation.add_arguments(kinds.add_parser("speculation", help="Compare methods of speculative decoding."))
    bench_parallel.add_parsers(kinds)
    bench_exact.add_arguments(kinds.add_parser("exact", help="Count the tokens that drafts change; cost of --exact."))
    _add_router_arguments(kinds.add_parser("router", help="Measure the time that the router adds, with fake workers."))
    bench_sim.add_parsers(kinds)
    bench_autoscaler.add_arguments(
        kinds.add_parser("autoscaler", help="Compare the autoscaler with an oracle, simulated, and kill a real one.")
    )
    bench_churn.add_arguments(kinds.add_parser("churn", help="Restart workers of a cluster under load at random."))
    _add_prefill_split_arguments(
        kinds.add_parser("split", help="Compare separate prefill and decode workers with workers that do both.")
    )
    bench_drain.add_arguments(kinds.add_parser("drain", help="Measure how long a drain pauses a worker's streams."))
    bench_gateway.add_gateway_arguments(
        kinds.add_parser("gateway", help="Measure the time that the gateway adds, with a fake provider.")
    )
    bench_gateway.add_gateway_logs_arguments(
        kinds.add_parser("gateway-logs", help="Measure a request log of many rows: reading it, deleting a day.")
    )
    bench_crash.add_arguments(
        kinds.add_parser("gateway-crash", help="Count the log rows that kill -9 of a gateway loses.")
    )
    _add_event_loop_arguments(kinds.add_parser("event-loop", help="Measure how long a heavy request delays /health."))
    plot = kinds.add_parser("plot", help="Draw result files as an SVG.")
    plot.add_argument("files", type=Path, nargs="+", help="JSON result files.")
    plot.add_argument("-o", "--out", type=Path, required=True, help="SVG file to write.")


def run(args: argparse.Namespace) -> int:
    interrupt_on_termination()
    if args.what == "plot":
        from emberline.bench.plot import draw_plot

        check_output_file(args.out, "--out")
        draw_plot(args.files, args.out)
        return 0
    check_output_file(args.json, "--json", creates_directory=True)
    return {
        "cpu": _run_cpu_bench,
        "serve": _run_serve_bench,
        "soak": _run_soak_bench,
        "overhead": _run_overhead_bench,
        "start": _run_startup_bench,
        "gguf": bench_gguf.run,
        "unweight": _run_unweight_bench,
        "router": _run_router_bench,
        **bench_sim.RUNS,
        "autoscaler": bench_autoscaler.run,
        "split": _run_prefill_split_bench,
        "drain": bench_drain.run,
        "churn": bench_churn.run,
        "speculation": bench_speculation.run,
        "exact": bench_exact.run,
        "parallel": bench_parallel.run,
        "rank-faults": bench_parallel.run_faults,
        "node-faults": bench_parallel.run_faults,
        "transfer": _run_transfer_bench,
        "tiers": _run_tiers_bench,
        "kv-codec": _run_kv_codec_bench,
        "gateway": bench_gateway.run_gateway,
        "gateway-logs": bench_gateway.run_gateway_logs,
        "gateway-crash": bench_crash.run,
        "event-loop": _run_event_loop_bench,
    }[args.what](args)


def _add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_engine_arguments(parser)
    parser.add_argument(
        "--peers",
        type=_split_at_commas,
        default=[],
        help="Peers to compare with, comma-separated; scripts/bench-peers installs them. (default: none)",
    )
    parser.add_argument(
        "--tasks",
        type=_split_at_commas,
        default=[],
        help="Tasks to measure, comma-separated, such as prefill_512,decode_8,mix_64. (default: all)",
    )
    add_threads_option(parser)
    parser.add_argument("--deadline", type=float, default=600.0, help="Seconds that one task may take.")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="Seconds to wait for an idle machine before each measurement."
    )


def _run_cpu_bench(args: argparse.Namespace) -> int:
    from emberline.bench import cpu

    tasks = args.tasks or list(cpu.TASKS)
    rules = cpu.CPUBenchSettings(args.threads, args.rounds, args.deadline, args.patience)
    report = cpu.bench(args.model, args.peers, tasks, rules, args.peers_dir)
    report.print_and_save(args.json, args.commit)
    return 0


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser)
    parser.add_argument("--requests", type=int, default=100, help="Number of requests.")
    parser.add_argument("--concurrency", type=int, help="Requests open at the same time.")
    parser.add_argument(
        "--rate", type=float, help="Requests per second with Poisson arrivals, instead of --concurrency."
    )
    parser.add_argument("--input-len", type=int, default=128, help="Prompt tokens of each request.")
    parser.add_argument("--output-len", type=int, default=64, help="Generated tokens of each request.")


def _run_serve_bench(args: argparse.Namespace) -> int:
    from emberline.bench import serve

    requests = serve.make_uniform_job(args.requests, args.input_len, args.output_len, args.vocab)
    names = ("model", "requests", "concurrency", "rate", "input_len", "output_len", "chat", "plain")
    client, config = _make_client(args), {name: getattr(args, name) for name in names}
    asyncio.run(client.check_model_is_served())
    report = serve.bench(client, args.url, requests, args.concurrency, args.rate, config)
    report.print_and_save(args.json, args.commit)
    return 1 if report.results["errors"].value else 0


def _add_soak_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser)
    parser.add_argument("--streams", type=int, default=64, help="Streams open at the same time.")
    parser.add_argument("--seconds", type=float, default=300.0, help="Duration in seconds.")
    parser.add_argument("--abandon", type=float, default=0.05, help="Share of streams, 0 to 1, that the client aborts.")


def _run_soak_bench(args: argparse.Namespace) -> int:
    from emberline.bench.soak import run_soak

    client = _make_client(args)
    asyncio.run(client.check_model_is_served())
    report = asyncio.run(run_soak(client, args.url, args.streams, args.seconds, args.abandon, args.vocab))
    report.print_and_save(args.json, args.commit)
    failure_counts = ("errors", "unended", "leaked", "engine_restarts")
    return 1 if any(report.results[name].value for name in failure_counts if name in report.results) else 0


def _add_overhead_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_engine_arguments(parser)
    parser.add_argument(
        "--batches", type=_split_at_commas, default=["1", "16"], help="Batch sizes in requests, comma-separated."
    )
    add_threads_option(parser)


def _run_overhead_bench(args: argparse.Namespace) -> int:
    from emberline.bench import overhead

    batches = [int(batch) for batch in args.batches]
    report = overhead.bench(args.model, batches, args.threads, args.rounds, args.peers_dir)
    report.print_and_save(args.json, args.commit)
    return 0


def _run_startup_bench(args: argparse.Namespace) -> int:
    from emberline.bench import start

    start.bench(args.model, args.rounds, args.peers_dir).print_and_save(args.json, args.commit)
    return 0


def _add_unweight_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds_option(parser, 5)
    add_peers_dir_option(parser)
    reports.add_report_arguments(parser)


def _run_unweight_bench(args: argparse.Namespace) -> int:
    from emberline.bench import unweight

    unweight.bench(args.rounds, args.peers_dir).print_and_save(args.json, args.commit)
    return 0


def _add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks",
        type=_split_at_commas,
        default=["64", "256", "1024", "2048"],
        help="Block sizes in KiB, comma-separated.",
    )
    parser.add_argument("--total", type=int, default=256, help="Data of each transfer in MiB.")
    parser.add_argument("--piece", type=int, default=4096, help="Data per message in KiB.")
    parser.add_argument("--layouts", action="store_true", help="Only between caches of different numbers of ranks.")
    add_rounds_option(parser, 5)
    reports.add_report_arguments(parser)


def _run_transfer_bench(args: argparse.Namespace) -> int:
    from emberline.bench import transfer

    sizes, total_bytes = [int(size) << 10 for size in args.blocks], args.total << 20
    if args.layouts:
        report = transfer.bench_layouts(total_bytes, args.rounds)
    else:
        report = transfer.bench(sizes, total_bytes, args.rounds, args.piece << 10)
    report.print_and_save(args.json, args.commit)
    return 0


def _add_prefill_split_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--chunks", type=_split_at_commas, default=["512", "64"], help="Token budgets of a step, comma-separated."
    )
    add_rounds_option(parser, 2)
    parser.add_argument("--seconds", type=float, default=120.0, help="Seconds of arrivals in each round.")
    parser.add_argument("--long", type=int, default=512, help="Tokens of a long prompt.")
    parser.add_argument("--long-rate", type=float, default=0.12, help="Long prompts per second.")
    parser.add_argument(
        "--chat",
        type=_split_at_commas,
        default=["48", "64"],
        help="Prompt and output tokens of a short request, comma-separated.",
    )
    parser.add_argument("--chat-rate", type=float, default=0.4, help="Short requests per second.")
    parser.add_argument("--alone", type=int, default=4, help="Long prompts sent one at a time before the arrivals.")
    add_logs_option(parser)


def _run_prefill_split_bench(args: argparse.Namespace) -> int:
    from emberline.bench import split
    from emberline.hub.source import resolve_model
    from emberline.models.config import ModelConfig

    vocab = ModelConfig.from_hf(read_object(resolve_model(args.model) / "config.json")).vocab
    plan = split.SplitBenchPlan(
        list(map(int, args.chunks)), args.rounds, args.seconds, args.long, args.long_rate,
        (int(args.chat[0]), int(args.chat[1])), args.chat_rate, args.alone,
    )  # fmt: skip
    report = split.bench(args.model, vocab, plan, choose_log_dir(args))
    report.print_and_save(args.json, args.commit)
    return 1 if any(report.results[f"errors_{chunk}"].value for chunk in plan.chunks) else 0


def _add_tiers_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_option(parser)
    parser.add_argument(
        "--directory", type=Path, help="Directory on the disk to measure. (default: the directory of temporary files)"
    )
    parser.add_argument(
        "--tokens", type=_split_at_commas, default=["256", "1024"], help="Prompt lengths in tokens, comma-separated."
    )
    add_rounds_option(parser, 3)
    reports.add_report_arguments(parser)


def _run_tiers_bench(args: argparse.Namespace) -> int:
    from emberline.bench import tiers

    lengths = [int(length) for length in args.tokens]
    tiers.bench(args.model, args.directory, lengths, args.rounds).print_and_save(args.json, args.commit)
    return 0


def _add_kv_codec_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_option(parser)
    parser.add_argument("--tokens", type=int, default=2048, help="Prompt length in tokens.")
    parser.add_argument(
        "--links",
        type=_split_at_commas,
        default=["1", "2.5", "10", "25"],
        help="Network speeds in Gbit/s besides loopback, comma-separated.",
    )
    add_rounds_option(parser, 5)
    reports.add_report_arguments(parser)


def _run_kv_codec_bench(args: argparse.Namespace) -> int:
    from emberline.bench import kvcodec

    rates = [float(rate) for rate in args.links]
    kvcodec.bench(args.model, args.tokens, rates, args.rounds).print_and_save(args.json, args.commit)
    return 0


def _add_event_loop_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="Model of an engine server to measure too. (default: gateway and router only)")
    parser.add_argument("--bytes", type=int, default=30 << 20, help="Size of the heavy requests in bytes.")
    add_rounds_option(parser, 1)
    reports.add_report_arguments(parser)


def _run_event_loop_bench(args: argparse.Namespace) -> int:
    from emberline.bench import event_loop

    event_loop.bench(args.model, args.bytes, args.rounds).print_and_save(args.json, args.commit)
    return 0


def _add_router_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="Number of fake workers.")
    parser.add_argument("--streams", type=int, default=64, help="Streams open at the same time.")
    parser.add_argument("--requests", type=int, default=1000, help="Number of requests.")
    parser.add_argument("--events", type=int, default=64, help="Events of each reply.")
    parser.add_argument("--pace", type=float, default=0.0, help="Seconds between two events of a reply.")
    parser.add_argument("--prompt", type=int, default=4096, help="Prompt length in bytes.")
    parser.add_argument("--tls", action="store_true", help="Compare mutual TLS to clients and workers with plain HTTP.")
    add_rounds_option(parser, 3)
    reports.add_report_arguments(parser)


def _run_router_bench(args: argparse.Namespace) -> int:
    from emberline.bench import router

    plan = router.RouterBenchPlan(args.workers, args.streams, args.requests, args.events, args.pace, args.prompt)
    (router.bench_tls if args.tls else router.bench)(plan, args.rounds).print_and_save(args.json, args.commit)
    return 0


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="Base URL of the server's OpenAI API.")
    add_model_option(parser)
    parser.add_argument("--api-key", help="API key of the server.")
    parser.add_argument("--chat", action="store_true", help="Use chat completions instead of completions.")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="Use only standard fields: text prompts instead of token ids, no ignore_eos.",
    )
    parser.add_argument("--vocab", type=int, default=32000, help="Vocabulary size: prompts are token ids below it.")
    reports.add_report_arguments(parser)


def _make_client(args: argparse.Namespace) -> CompletionClient:
    from emberline.bench.client import CompletionClient

    return CompletionClient(args.url, args.model, chat=args.chat, only_standard_fields=args.plain, api_key=args.api_key)


def _split_at_commas(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
