"""`emberline chaos`: injects faults into a cluster on this machine while it serves requests.

The run fails if a request hangs or gets a wrong answer, or if the cluster leaks a resource."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from emberline.core.config import DEFAULT_MODEL
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.output_file import check_output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"Model to serve. (default: {DEFAULT_MODEL})")
    parser.add_argument("--faults", type=int, default=60, help="Number of faults to inject.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")
    parser.add_argument("--prefill", type=int, default=1, help="Number of workers that compute prompts for others.")
    parser.add_argument("--decode", type=int, default=2, help="Number of decode workers.")
    parser.add_argument(
        "--routers",
        type=int,
        default=1,
        help="Number of routers behind a TCP balancer; with 2 or more, clients continue broken streams.",
    )
    parser.add_argument(
        "--fault",
        dest="fault_names",
        metavar="NAME",
        action="append",
        default=[],
        help="Inject only faults of this name; may be repeated. (default: all)",
    )
    parser.add_argument(
        "--kv-memory", default="48M", help="KV cache of each worker in bytes; small, so that blocks move to disk."
    )
    parser.add_argument(
        "--links",
        action="store_true",
        help="Run each worker in its own network namespace; start with: unshare -rn emberline chaos --links.",
    )
    parser.add_argument("--logs", type=Path, help="Directory for log files. (default: a new temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the result to this JSON file.")


def run(args: argparse.Namespace) -> int:
    from emberline.bench import machine
    from emberline.bench.report import current_command
    from emberline.chaos.chaos_cluster import ChaosCluster, ChaosSettings
    from emberline.chaos.chaos_report import ChaosReport
    from emberline.chaos.chaos_run import run_chaos
    from emberline.chaos.fault_table import FAULTS
    from emberline.hub.source import resolve_model

    if sys.platform != "linux":
        raise EmberlineError(
            "emberline chaos runs only on Linux, because it needs network namespaces and prlimit; "
            f"this system is {sys.platform}"
        )
    _check_arguments(args, [fault.name for fault in FAULTS])
    resolve_model(args.model)  # a missing model is reported here, and not in every worker's log
    log_dir = args.logs or Path(tempfile.mkdtemp(prefix="emberline-chaos-"))
    log_dir.mkdir(parents=True, exist_ok=True)

    report, started_at, stop_signal = ChaosReport(), time.monotonic(), 0

    async def run_until_stopped() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(signal_number: int) -> None:
            nonlocal stop_signal
            stop_signal = signal_number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):  # all processes are stopped, and the results so far printed
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        settings = ChaosSettings(
            args.model, args.prefill, args.decode, args.routers, kv_memory=args.kv_memory, links=args.links
        )
        cluster = ChaosCluster(settings, log_dir)
        await run_chaos(cluster, report, args.faults, args.seed, _print_event, args.fault_names)

    _print_event(f"log files: {log_dir}")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_until_stopped())
    seconds = time.monotonic() - started_at
    print(report.format_table())
    total = report.total_counts
    _print_event(f"{total['count']} faults in {seconds:.0f} s, {report.leak_check_count} checks for leaks")
    _print_event(f"slowest request: {report.slowest_request_s:.1f} s")
    _print_event(
        f"client errors: {dict(report.error_codes)}; {report.unexcused_errors} of them while a router was running"
    )
    for problem in report.problems[:20]:
        _print_event(problem)
    if args.json is not None:
        head = {"command": current_command(), "commit": machine.describe_commit(),
                "hardware": machine.describe_hardware(), "software": machine.describe_software(),
                "model": args.model, "seed": args.seed, "routers": args.routers}  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**head, "seconds": round(seconds), **report.as_dict()}, indent=1) + "\n")
    return 1 if report.failure_count else 128 + stop_signal if stop_signal else 0


def _check_arguments(args: argparse.Namespace, known_faults: Sequence[str]) -> None:
    check_output_file(args.json, "--json", creates_directory=True)
    if args.routers < 1:
        raise InvalidRequest(f"--routers is {args.routers}; it must be at least 1", param="routers")
    for name in args.fault_names:
        if name not in known_faults:
            message = f"--fault is {name!r}, which is not a fault of this command"
            raise InvalidRequest(message, param="fault", hint=f"known faults: {', '.join(known_faults)}")


def _print_event(event: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {event}", flush=True, file=sys.stdout)
