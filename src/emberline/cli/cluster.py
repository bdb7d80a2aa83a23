"""emberline cluster up: a router and its workers on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emberline.cli import service, tracing
from emberline.core.config import DEFAULT_MODEL, KV_PORTS, Role, RouterConfig, cluster_key, core_count
from emberline.core.errors import InvalidRequest
from emberline.core.freeport import free_port
from emberline.core.gpus import Gpu, usable_gpus

POLL = 0.5  # seconds
OURS = ("--host", "--port", "--workers", "--prefill", "--decode", "--api-key", "--logs", "--router", "--role",
        "--worker-name", "--worker-url", "--cluster-key", "--otlp", "--trace-share", "--kv-port", "--open",
        "--cors-origins", "--allowed-hosts")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    up = kinds.add_parser("up", help="start all; Ctrl-C stops all")
    default = RouterConfig()
    up.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    up.add_argument("--workers", type=int, help="that answer alone (default: 2, without --prefill and --decode)")
    up.add_argument("--prefill", type=int, default=0, help="workers that compute prompts for others")
    up.add_argument("--decode", type=int, default=0, help="workers that go on from there")
    up.add_argument("--host", default=default.host, help="of the router; workers stay on this machine")
    up.add_argument("--port", type=int, default=default.port, help="of the router; workers choose theirs (0: any)")
    up.add_argument("--api-key", action="append", default=[], help="require this key; may be given several times")
    service.add_exposure(up)
    up.add_argument("--kv-events", action="store_true", help="the router follows what workers' caches hold")
    up.add_argument(
        "--kv-port", type=int, default=0, help=f"first of {KV_PORTS} ports for each worker's KV transfers (0: any)"
    )
    tracing.add_arguments(up)
    up.add_argument("--logs", type=Path, help="folder (default: a new one in the temporary folder)")
    up.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="after --: of every worker, as for emberline serve (default: on GPUs, or shares of the CPU's cores)",
    )


def run(args: argparse.Namespace) -> int:
    workers = _workers(args)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="emberline-cluster-"))
    logs.mkdir(parents=True, exist_ok=True)
    asyncio.run(_up(args, workers, logs))
    return 0


def _workers(args: argparse.Namespace) -> dict[Role, int]:
    split = args.prefill or args.decode
    alone = args.workers if args.workers is not None else 0 if split else 2
    counts: dict[Role, int] = {"prefill": args.prefill, "decode": args.decode, "both": alone}
    if min(counts.values()) < 0 or not sum(counts.values()):
        raise InvalidRequest("there must be at least one worker", param="workers")
    if args.prefill and not args.decode + alone:
        raise InvalidRequest("somebody must go on from the prompts", param="decode", hint="add --decode 1")
    return counts


async def _up(args: argparse.Namespace, workers: dict[Role, int], logs: Path) -> None:
    import secrets

    from emberline.cluster.supervisor import Supervisor, children
    from emberline.server.listening import bind

    port = args.port or free_port()
    url = f"http://[{args.host}]:{port}" if ":" in args.host else f"http://{args.host}:{port}"
    listener = bind(args.host, port)  # a taken port is an error here, and not one of the router's restarts
    keys = [word for key in args.api_key for word in ("--api-key", key)]
    traced = _traced(args)
    router = ["--host", args.host, "--port", str(port), *keys, *_exposure(args), *traced]
    router += ["--kv-events"] if args.kv_events else []
    key = cluster_key() or secrets.token_hex(16)
    kept = _keep(logs / "cluster.key", key)
    stored = ["--response-store", str(logs / "responses.sqlite")]  # shared, so that any worker finds a response
    gpus = usable_gpus() if _may_use_gpus(args) else []
    options = _worker(args, sum(workers.values()), [*keys, *traced, *stored], gpus)
    made = children(
        router,
        workers,
        options,
        url=url,
        key=key,
        logs=logs,
        kv_port=args.kv_port,
        listener=listener.fileno(),
        gpus=[gpu.name for gpu in gpus],
    )
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal that is closed ends us, and not them
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    supervisor = Supervisor(_say)
    watching = asyncio.create_task(_watch(url, key))
    try:
        for child in made:
            await supervisor.start(child)
        _say("cluster", f"its key, as for emberline drain: export EMBERLINE_CLUSTER_KEY=$(cat {kept})")
        await stopped.wait()
        _say("cluster", "stops")
    finally:
        watching.cancel()
        listener.close()
        await supervisor.stop()


def _keep(file: Path, key: str) -> Path:
    """Where only the user can read it."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(key + "\n")
    return file


def _exposure(args: argparse.Namespace) -> list[str]:
    """As the router is to have it."""
    lists = {"--cors-origins": args.cors_origins, "--allowed-hosts": args.allowed_hosts}
    return [
        *(["--open"] if args.open else []),
        *(f"{name}={','.join(given)}" for name, given in lists.items() if given),
    ]


def _traced(args: argparse.Namespace) -> list[str]:
    tracing.trace_config(args)  # what is wrong is told here, and not in every log
    given = [] if args.otlp is None else ["--otlp", args.otlp]
    return [*given, "--trace-share", str(args.trace_share)]


def _may_use_gpus(args: argparse.Namespace) -> bool:
    """Unless the options say on what workers run."""
    words = [word.split("=")[0] for word in args.options]
    return not {"--threads", "--device"} & {*words} or "--device=cuda" in args.options or "cuda" in args.options


def _worker(args: argparse.Namespace, workers: int, own: list[str], gpus: Sequence[Gpu] = ()) -> list[str]:
    """`own`: what the options may not say. Its share of the machine, unless they say otherwise."""
    options = [word for word in args.options if word != "--"]
    for word in options:
        if word.split("=")[0] in OURS:
            raise InvalidRequest(f"{word} after the model would be every worker's", hint="put it before the model")
    shared = []
    if gpus:
        shared = _gpu_share(options, workers, gpus)
    elif not any(word.startswith(("--threads", "--device")) for word in options):
        shared = ["--threads", str(max(1, core_count() // workers)), "--device", "cpu"]
    return [args.model, *own, *shared, *options]


def _gpu_share(options: list[str], workers: int, gpus: Sequence[Gpu]) -> list[str]:
    """Workers with a GPU of their own plan its memory themselves. Those that share one start at the same time and do
    not see each other's: each gets half of its share for keys and values, which leaves the rest for weights."""
    sharing = -(-workers // len(gpus))
    if sharing == 1 or any(word.split("=")[0] == "--kv-memory" for word in options):
        return []
    return ["--kv-memory", str(min(gpu.free_bytes for gpu in gpus) // sharing // 2)]


async def _watch(url: str, key: str) -> None:
    """Says what the router sees, whenever that changes."""
    told: dict[str, tuple[str, str]] = {}  # of which process, and what
    while True:
        status = await asyncio.to_thread(_status, url, key)
        for row in status["workers"] if status else []:
            line = f"{row['health']}, {', '.join(row['models'])}"
            if told.get(row["name"]) != (row["incarnation"], line):
                told[row["name"]] = row["incarnation"], line
                _say(row["name"], line)
        ready = sum(row["health"] == "ready" for row in status["workers"]) if status else 0
        line = f"{ready} of {len(status['workers'])} workers ready at {url}" if ready else "no worker is ready"
        if told.get("") != ("", line):
            told[""] = "", line
            _say("cluster", line)
        await asyncio.sleep(POLL)


def _status(url: str, key: str) -> Any:
    request = urllib.request.Request(f"{url}/cluster/status", headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return json.load(reply)
    except (OSError, ValueError, http.client.HTTPException):
        return None  # not yet, or not any more, be it in the middle of its answer


def _say(who: str, what: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it is gone: no reason to stop looking after the others
        print(f"{time.strftime('%H:%M:%S')} {who:<10} {what}", flush=True, file=sys.stdout)
