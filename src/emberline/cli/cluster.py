"""`emberline cluster up`: runs a router and its workers on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import signal
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emberline.cli.cluster_ray import RayNodes, add_ray_arguments
from emberline.cli.options import add_options, explicit_options
from emberline.cluster.address import is_unspecified_address
from emberline.core.config import DEFAULT_MODEL, Role, RouterConfig, TraceConfig
from emberline.core.cpus import core_count
from emberline.core.engine_config import KV_PORT_COUNT, EngineConfig
from emberline.core.engine_packages import require_engine_packages
from emberline.core.errors import InvalidRequest
from emberline.core.freeport import free_port
from emberline.core.gpus import Gpu, usable_gpus
from emberline.core.keys import add_key_from_environment, read_cluster_keys
from emberline.core.parallel_config import ParallelConfig
from emberline.core.tls import open_identity

POLL_INTERVAL_S = 0.5
CLUSTER_OPTIONS = ("--host", "--port", "--workers", "--prefill", "--decode", "--api-key", "--logs", "--router",
                   "--role", "--worker-name", "--worker-url", "--cluster-key", "--otlp", "--trace-share", "--kv-port",
                   "--open", "--cors-origins", "--allowed-hosts", "--tls-cert", "--tls-key", "--tls-ca", "--tls-names",
                   "--tls-client-certs")  # fmt: skip
TLS_SETTINGS = ("tls_cert", "tls_key", "tls_ca", "tls_names", "tls_client_certs")
ROUTER_SETTINGS = (
    "host",
    "port",
    "api_keys",
    "open",
    "cors_origins",
    "allowed_hosts",
    "kv_events",
    "otlp",
    "trace_share",
    *TLS_SETTINGS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    up = kinds.add_parser("up", help="Start a router and workers; Ctrl-C stops them.")
    up.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"Model to serve. (default: {DEFAULT_MODEL})")
    up.add_argument(
        "--workers",
        type=int,
        help="Number of workers that both prefill and decode. (default: 2; 0 with --prefill or --decode)",
    )
    up.add_argument("--prefill", type=int, default=0, help="Number of workers that compute prompts for others.")
    up.add_argument("--decode", type=int, default=0, help="Number of decode workers.")
    add_options(up, RouterConfig(), ROUTER_SETTINGS, {"host": "Address of the router; workers use 127.0.0.1."})
    help_ = f"First port for KV transfers; each worker uses {KV_PORT_COUNT} ports; 0: any free ports."
    add_options(up, EngineConfig.build(""), ("kv_port",), {"kv_port": help_})
    add_ray_arguments(up)
    up.add_argument("--logs", type=Path, help="Directory for log files. (default: a new temporary directory)")
    up.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="Options of every worker, after --, as for emberline serve."
        " (default: GPUs if there are any, else an equal share of the CPU cores)",
    )


def run(args: argparse.Namespace) -> int:
    require_engine_packages("emberline cluster up")
    workers = _worker_counts(args)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="emberline-cluster-"))
    logs.mkdir(parents=True, exist_ok=True)
    ray_nodes = RayNodes.connect(args) if args.launcher == "ray" else None
    asyncio.run(_run_cluster(args, workers, logs, ray_nodes))
    return 0


def _worker_counts(args: argparse.Namespace) -> dict[Role, int]:
    has_split = args.prefill or args.decode
    both = args.workers if args.workers is not None else 0 if has_split else 2
    counts: dict[Role, int] = {"prefill": args.prefill, "decode": args.decode, "both": both}
    if min(counts.values()) < 0 or not sum(counts.values()):
        numbers = ", ".join(f"--{'workers' if role == 'both' else role} {count}" for role, count in counts.items())
        raise InvalidRequest(
            f"the cluster needs at least one worker and no negative count: {numbers}",
            param="workers",
            hint="use --workers 1 or more",
        )
    if args.prefill and not args.decode + both:
        raise InvalidRequest(
            f"--prefill is {args.prefill}, but the cluster would have no worker that generates tokens",
            param="decode",
            hint="add --decode 1",
        )
    return counts


async def _run_cluster(
    args: argparse.Namespace, worker_counts: dict[Role, int], log_dir: Path, ray_nodes: RayNodes | None = None
) -> None:
    import secrets

    from emberline.cluster.supervisor import Supervisor, build_processes
    from emberline.server.listener import bind_listener

    given = explicit_options(args, RouterConfig)
    config = RouterConfig(**given | {"api_keys": add_key_from_environment(given.get("api_keys", ()))})
    port = config.port or free_port()
    url = _router_url(config if ray_nodes is None else replace(config, host=ray_nodes.router_host(config)), port)
    identity = open_identity(config.tls)
    if identity is not None:
        identity.check_accepts_itself()
    # A port in use is reported here, instead of restarting the router again and again.
    listener = bind_listener(config.host, port)
    shared_options = [*_trace_options(args), *_tls_options(config)]
    router = ["--host", config.host, "--port", str(port), *_listener_options(config), *shared_options]
    router += ["--kv-events"] if config.kv_events else []
    keys = read_cluster_keys() or (secrets.token_hex(16),)
    key_file = _write_key_file(log_dir / "cluster.key", keys[0])
    if ray_nodes is None:
        gpus = usable_gpus() if _may_use_gpus(args) else []
        share = None
        shared_options += ["--response-store", str(log_dir / "responses.sqlite")]  # every worker finds a response
    else:
        gpus, share = [], ray_nodes.worker_options(config, args.options)
    options = _worker_options(args, sum(worker_counts.values()), shared_options, gpus, share)
    processes = build_processes(
        router,
        worker_counts,
        options,
        router_url=url,
        cluster_keys=keys,
        log_dir=log_dir,
        kv_port=args.kv_port or 0,
        listen_fd=listener.fileno(),
        gpus=[gpu.name for gpu in gpus],
        api_keys=config.api_keys,
    )
    if ray_nodes is not None:
        ray_nodes.run_workers_on_nodes(processes[1:], keys, config.api_keys)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGHUP of a closed terminal does not reach children
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(_print_event)
    tls = identity.peer_client_context() if identity is not None else None
    watcher = asyncio.create_task(_print_health_changes(url, keys[0], tls))
    try:
        for child in processes:
            await supervisor.start(child)
        _print_event("cluster", f"for emberline drain: export EMBERLINE_CLUSTER_KEY=$(cat {key_file})")
        await stop.wait()
        _print_event("cluster", "stopping")
    finally:
        watcher.cancel()
        listener.close()
        await supervisor.stop()


def _write_key_file(file: Path, key: str) -> Path:
    """Write the cluster key to a file that only the user can read, and return the file."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(key + "\n")
    return file


def _listener_options(config: RouterConfig) -> list[str]:
    """Return the router's options --open, --cors-origins and --allowed-hosts as command line arguments."""
    lists = {"--cors-origins": config.cors_origins, "--allowed-hosts": config.allowed_hosts}
    return [
        *(["--open"] if config.open else []),
        *(f"{name}={','.join(values)}" for name, values in lists.items() if values),
    ]


def _router_url(config: RouterConfig, port: int) -> str:
    """Return the router's URL for workers. Raises InvalidRequest if they could not check the router's certificate."""
    if config.tls_cert is None:
        host = config.host
    elif config.tls_ca is None:
        message = "tls_cert is set without tls_ca: the workers must check the certificate of the router"
        raise InvalidRequest(message, param="tls_ca", hint="add --tls-ca FILE")
    else:  # no certificate has the address of all interfaces
        host = "127.0.0.1" if is_unspecified_address(config.host) else config.host
    return f"{config.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _tls_options(config: RouterConfig) -> list[str]:
    """Return the TLS options of the router and of every worker as command line arguments."""
    if config.tls_cert is None:
        return []
    values = {name: getattr(config, name) for name in TLS_SETTINGS}
    values["tls_names"] = ",".join(config.tls_names)
    return [word for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", value)]


def _trace_options(args: argparse.Namespace) -> list[str]:
    config = RouterConfig(**explicit_options(args, RouterConfig))
    # Reports invalid options here, and not in every process's log.
    TraceConfig.from_options(config.otlp, config.trace_share)
    endpoint = [] if config.otlp is None else ["--otlp", config.otlp]
    return [*endpoint, "--trace-share", str(config.trace_share)]


def _may_use_gpus(args: argparse.Namespace) -> bool:
    """Return whether the cluster's workers may use GPUs: no if their options set --threads or a CPU device."""
    words = [word.split("=")[0] for word in args.options]
    return not {"--threads", "--device"} & {*words} or "--device=cuda" in args.options or "cuda" in args.options


def _worker_options(
    args: argparse.Namespace,
    worker_count: int,
    cluster_options: list[str],
    gpus: Sequence[Gpu] = (),
    share: list[str] | None = None,
) -> list[str]:
    """Return the command line arguments of every worker.

    They are the model, the cluster's options, the worker's share of its machine, and the user's options. `share`: the
    options for the share; None: an equal part of this machine."""
    options = [word for word in args.options if word != "--"]
    for word in options:
        if word.split("=")[0] in CLUSTER_OPTIONS:
            raise InvalidRequest(
                f"{word} is an option of the cluster, but it follows the model, where only workers' options may be",
                hint=f"put {word.split('=')[0]} before the model",
            )
    if share is None and gpus:
        share = _gpu_memory_options(options, worker_count, gpus)
    elif share is None and not any(word.startswith(("--threads", "--device")) for word in options):
        share = ["--threads", str(max(1, core_count() // (worker_count * _rank_count(options)))), "--device", "cpu"]
    return [args.model, *cluster_options, *(share or []), *options]


def _rank_count(worker_options: list[str]) -> int:
    """Return the number of ranks of each worker, from its options --tp and --pp."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, EngineConfig.build(""), ("tp", "pp"))
    given, _ = parser.parse_known_args(worker_options)
    return ParallelConfig(**explicit_options(given, ParallelConfig)).num_ranks


def _gpu_memory_options(worker_options: list[str], worker_count: int, gpus: Sequence[Gpu]) -> list[str]:
    """Return the --kv-memory option of workers that share a GPU; [] if it is not needed.

    A worker with its own GPU plans its memory itself. Workers that share a GPU start at the same time and do not see
    each other's memory use, so the GPU's free memory is divided equally among them. Each worker uses half of its
    share for the KV cache, and the rest for the weights."""
    workers_per_gpu = -(-worker_count // len(gpus))
    if workers_per_gpu == 1 or any(word.split("=")[0] == "--kv-memory" for word in worker_options):
        return []
    return ["--kv-memory", str(min(gpu.free_bytes for gpu in gpus) // workers_per_gpu // 2)]


async def _print_health_changes(url: str, key: str, tls: ssl.SSLContext | None) -> None:
    """Poll the router, and print a worker's health whenever it changes."""
    printed: dict[str, tuple[str, str]] = {}  # by worker: incarnation and line printed last
    while True:
        status = await asyncio.to_thread(_fetch_status, url, key, tls)
        for row in status["workers"] if status else []:
            line = f"{row['health']}, {', '.join(row['models'])}"
            if printed.get(row["name"]) != (row["incarnation"], line):
                printed[row["name"]] = row["incarnation"], line
                _print_event(row["name"], line)
        ready = sum(row["health"] == "ready" for row in status["workers"]) if status else 0
        line = f"{ready} of {len(status['workers'])} workers ready at {url}" if ready else "no worker is ready"
        if printed.get("") != ("", line):
            printed[""] = "", line
            _print_event("cluster", line)
        await asyncio.sleep(POLL_INTERVAL_S)


def _fetch_status(url: str, key: str, tls: ssl.SSLContext | None = None) -> Any:
    request = urllib.request.Request(f"{url}/cluster/status", headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5, context=tls) as reply:
            return json.load(reply)
    except (OSError, ValueError, http.client.HTTPException):
        return None  # the router does not run (yet), or stopped in the middle of its reply


def _print_event(process_name: str, event: str) -> None:
    with contextlib.suppress(OSError):  # a closed output must not stop the supervision
        print(f"{time.strftime('%H:%M:%S')} {process_name:<10} {event}", flush=True, file=sys.stdout)
