"""`emberline serve`: runs the engine and its HTTP server in one command."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from emberline.cli import service
from emberline.cli.options import add_options, explicit_options
from emberline.cli.settings_file import add_settings_file_option
from emberline.core.config import DEFAULT_MODEL, ServerConfig, WorkerConfig
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest
from emberline.core.keys import ADMIN_KEY_VARIABLE, add_key_from_environment, read_cluster_keys

PROC = Path("/proc")


def add_arguments(parser: argparse.ArgumentParser, server: ServerConfig | None = None) -> None:
    """Add the arguments of `emberline serve`. `server`: HTTP settings to show as defaults."""
    parser.add_argument(
        "model",
        nargs="?",
        help="Model: smollm2, a short name such as qwen3-0.6b (emberline list --all), hf:org/name[:Q4_K_M], a directory"
        f" or a .gguf file. (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--models",
        metavar="[NAME=]MODEL,...",
        help="Several models instead of one, each with an optional name in the API; on a GPU, models that do not fit"
        " together are loaded and unloaded in turn.",
    )
    add_settings_file_option(parser)
    add_options(parser, TimeSharingConfig())
    parser.add_argument("--served-name", help="Name of the model in the API. (default: MODEL as written)")
    add_options(parser, server or ServerConfig())
    service.add_log_level_option(parser)
    add_options(parser, EngineConfig.build(""))
    add_options(parser, WorkerConfig(()), ("routers", "worker_name", "worker_url"))


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    gc.disable()  # until the server is ready: collections take a tenth of the imports, and free nothing
    started_at = time.monotonic() - (time.time() - _process_start_time())
    given, cluster_keys = explicit_options(args, ServerConfig), read_cluster_keys(args.cluster_key)
    server = given | {
        "api_keys": add_key_from_environment(given.get("api_keys", ())),
        "admin_keys": add_key_from_environment(given.get("admin_keys", ()), ADMIN_KEY_VARIABLE),
        "models": _parse_models(args.model, args.models, args.served_name),
        "cluster_key": cluster_keys[0] if cluster_keys else None,
        "other_cluster_keys": cluster_keys[1:],
        "worker": _worker_config(args),
    }
    if args.embedder == "none":
        server["embedder"] = None
    engine = EngineConfig.build("", **explicit_options(args, EngineConfig))
    time_sharing = TimeSharingConfig(**explicit_options(args, TimeSharingConfig))
    config, child = ServerConfig(**server), args.engine_child
    if engine.parallel.nodes > 1 or engine.parallel.launcher == "ray":
        _check_one_model(config.models, engine)
    if engine.parallel.node_rank:
        child.end()  # the ranks are started when all nodes have joined
        return _run_node(next(iter(config.models.values())), engine)
    from emberline.worker.main import serve  # imported while the engine process starts

    return service.run_service(serve(config, engine, time_sharing, started_at, child))


def _check_one_model(models: dict[str, str], engine: EngineConfig) -> None:
    if len(models) > 1:
        nodes = "nodes of Ray" if engine.parallel.launcher == "ray" else f"{engine.parallel.nodes} nodes"
        message = f"--models names {len(models)} models, but an engine on {nodes} can have only one"
        raise InvalidRequest(message, param="models", hint="use --models with one node, or serve each model by itself")


def _run_node(model: str, engine: EngineConfig) -> int:
    """Run the ranks of this node until node 0 shuts down or a signal stops the process."""
    from emberline.engine.ranks.cluster_key import read_node_keys
    from emberline.engine.ranks.node_agent import run_node
    from emberline.hub.source import resolve_model

    stop, keys = threading.Event(), read_node_keys(engine)
    engine = replace(engine, model=str(resolve_model(model)))
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    run_node(engine, keys, stop)
    return 0


def _worker_config(args: argparse.Namespace) -> WorkerConfig | None:
    if args.routers is not None:
        return WorkerConfig(**explicit_options(args, WorkerConfig))
    for name in ("worker_name", "worker_url", "cluster_key", "kv_mooncake", "kv_checksums"):
        if getattr(args, name):
            raise InvalidRequest(
                f"--{name.replace('_', '-')} is set, but the option is only for a worker of a router",
                hint="add --router URL",
            )
    if args.kv_port and args.kv_store is None:
        raise InvalidRequest(
            f"--kv-port is {args.kv_port}, but the port is only for a worker of a router or with --kv-store",
            hint="add --router URL or --kv-store HOST:PORT",
        )
    return None


def _parse_models(model: str | None, models_option: str | None, served_name: str | None) -> dict[str, str]:
    """Return the models to serve: a dict from the name in the API to the model's path or repository."""
    if models_option is None:
        model = model or DEFAULT_MODEL
        return {served_name or model: model}
    if model is not None or served_name is not None:
        other = f"MODEL {model!r}" if model is not None else f"--served-name {served_name!r}"
        raise InvalidRequest(
            f"--models {models_option[:200]!r} cannot be combined with {other}",
            param="models",
            hint="use only --models NAME=MODEL,...",
        )
    models: dict[str, str] = {}
    for item in models_option.split(","):
        name, equals, source = item.partition("=")
        if not equals or "/" in name:  # a path may contain "="
            name = source = item
        if not name or not source:
            raise InvalidRequest(
                f"--models contains {item!r}, which names no model", param="models", hint="write MODEL or NAME=MODEL"
            )
        if name in models:
            raise InvalidRequest(
                f"--models contains the name {name!r} twice",
                param="models",
                hint="write NAME=MODEL with different names",
            )
        models[name] = source
    return models


def _process_start_time() -> float:
    """Return the time at which this process started, in seconds since 1970.

    Systems without /proc, such as macOS, do not report it: there the result is the current time. The time that the
    log calls "ready in" starts here, so it includes the interpreter's start and the imports."""
    try:
        ticks = int((PROC / "self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float((PROC / "uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
