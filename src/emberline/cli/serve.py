"""`emberline serve`: runs the engine and its HTTP server in one command."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from emberline.cli import service, tracing
from emberline.core.config import (
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    KV_PORT_COUNT,
    WEIGHT_FORMATS,
    EngineConfig,
    ServerConfig,
    TimeSharingConfig,
    WorkerConfig,
    cluster_key_from_environment,
)
from emberline.core.errors import InvalidRequest

PROC = Path("/proc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server, engine, fleet = ServerConfig(), EngineConfig(model=""), TimeSharingConfig()
    parser.add_argument(
        "model",
        nargs="?",
        help=f"Model: smollm2, hf:org/name, a directory or a .gguf file. (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--models",
        metavar="[NAME=]MODEL,...",
        help="Several models instead of one, each with an optional name in the API; on a GPU, models that do not fit"
        " together are loaded and unloaded in turn.",
    )
    parser.add_argument(
        "--model-turn",
        type=float,
        default=fleet.turn,
        help="Seconds that a model accepts requests while another model's requests wait. (default: %(default)s)",
    )
    parser.add_argument(
        "--model-wait",
        type=float,
        default=fleet.wait,
        help="Seconds after which a request whose model could not be loaded gets a 429. (default: %(default)s)",
    )
    service.add_arguments(parser, server)
    parser.add_argument("--served-name", help="Name of the model in the API. (default: MODEL as written)")
    _add_memory_arguments(parser, engine)
    _add_tier_arguments(parser, engine)
    _add_transfer_arguments(parser, engine)
    _add_scheduling_arguments(parser, engine)
    _add_api_arguments(parser, server)
    _add_worker_arguments(parser)
    tracing.add_arguments(parser)


def _add_memory_arguments(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    parser.add_argument(
        "--device",
        default=engine.device,
        choices=["auto", "cpu", "cuda"],
        help="Device that computes; auto: a supported GPU if there is one.",
    )
    service.add_setting(parser, engine, "threads", "CPU threads; 0: one per core.")
    parser.add_argument(
        "--dtype",
        default=engine.dtype,
        choices=["auto", "bfloat16", "float32"],
        help="Data type of the weights; auto: chosen by checkpoint and device.",
    )
    parser.add_argument(
        "--weights",
        default=engine.weights,
        choices=WEIGHT_FORMATS,
        help="Format of the weights in GPU memory. packed: 12 bits instead of 16, lossless; both: packed for small"
        " batches and plain for large ones; auto: packed if the files are.",
    )
    parser.add_argument(
        "--kv-dtype",
        default=engine.kv_dtype,
        choices=["auto", "bfloat16", "float32", "float8"],
        help="Data type of the KV cache; auto: that of the weights.",
    )
    parser.add_argument(
        "--kv-memory",
        type=service.parse_size,
        help="Size of the KV cache in bytes, such as 2G. (default: planned from the free memory)",
    )


def _add_scheduling_arguments(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    parser.add_argument("--max-context", type=int, help="Maximum context in tokens. (default: the model's)")
    parser.add_argument(
        "--max-batch-tokens", type=int, help="Maximum tokens computed in one step. (default: depends on the device)"
    )
    parser.add_argument(
        "--max-running", type=int, help="Maximum requests in one batch. (default: depends on the device)"
    )
    service.add_setting(parser, engine, "max_waiting", "Maximum waiting requests; further ones get a 429.")
    parser.add_argument("--block-size", type=int, help="Tokens of a KV block. (default: depends on the device)")
    parser.add_argument(
        "--itl-target-ms",
        type=float,
        help="Target inter-token latency on a GPU in milliseconds. Prompt chunks are sized so that 90%% of tokens meet"
        " it. (default: no target)",
    )
    service.add_setting(
        parser,
        engine,
        "itl_tail",
        "Limit of the other 10%% of tokens while prompts wait, as a multiple of --itl-target-ms.",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="Do not reuse KV blocks of earlier prompts.")


def _add_api_arguments(parser: argparse.ArgumentParser, server: ServerConfig) -> None:
    service.add_setting(
        parser, server, "stall_timeout", "Seconds without progress after which the engine is restarted."
    )
    parser.add_argument(
        "--embedder", default=DEFAULT_EMBEDDER, help="Model of /v1/embeddings, or none. (default: %(default)s)"
    )
    parser.add_argument("--chat-template", help="Jinja file with the chat template. (default: the model's own)")
    service.add_setting(
        parser, server, "tool_style", "Format of tool calls: auto, hermes, llama3, mistral or mistral-args."
    )
    service.add_setting(
        parser,
        server,
        "generation_config",
        "Sampling defaults: auto (the checkpoint's generation_config.json), none, or a directory with such a file.",
    )
    parser.add_argument(
        "--response-store",
        metavar="FILE",
        default=server.response_store,
        help="SQLite file for stored responses (previous_response_id); auto: kept until the server ends; none: off.",
    )
    parser.add_argument(
        "--response-store-size",
        type=service.parse_size,
        default=server.response_store_size,
        help="Maximum size of stored responses in bytes; the oldest are deleted first. (default: 256M)",
    )


def _add_tier_arguments(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    parser.add_argument(
        "--kv-host-memory",
        type=service.parse_size,
        default=engine.kv_host_memory,
        help="Main memory for KV blocks evicted from the KV cache, in bytes per model.",
    )
    parser.add_argument(
        "--kv-disk", metavar="DIR", help="Directory for evicted KV blocks, also used after a restart. (default: none)"
    )
    parser.add_argument(
        "--kv-disk-size", type=service.parse_size, help="Maximum size of --kv-disk in bytes per model, such as 100G."
    )
    parser.add_argument(
        "--kv-store",
        metavar="HOST:PORT",
        help="Address of the mooncake_master of a KV store that all workers share. (default: none)",
    )
    parser.add_argument(
        "--kv-store-memory",
        type=service.parse_size,
        default=engine.kv_store_memory,
        help="Main memory that each model contributes to --kv-store, in bytes.",
    )
    parser.add_argument(
        "--kv-policy",
        default=engine.kv_policy,
        choices=["lru", "arc"],
        help="Eviction policy of main memory and disk.",
    )


def _add_transfer_arguments(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    parser.add_argument(
        "--kv-mooncake",
        action="store_true",
        help="Also transfer KV blocks with Mooncake's Transfer Engine, over RDMA where available.",
    )
    parser.add_argument(
        "--kv-mooncake-host",
        metavar="ADDRESS",
        help="IPv4 address of this host for Mooncake, which does not authenticate peers: use it only in a trusted"
        " network. (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--kv-port",
        type=int,
        default=engine.kv_port,
        metavar="PORT",
        help=f"First port for KV transfers; each model uses {KV_PORT_COUNT} ports, TCP first, then Mooncake."
        " (default: any free ports)",
    )
    parser.add_argument(
        "--kv-checksums",
        action=argparse.BooleanOptionalAction,
        default=engine.kv_checksums,
        help="Send a checksum with each KV block, which the receiving worker verifies. (default: with --kv-mooncake)",
    )
    parser.add_argument(
        "--kv-codec",
        default=engine.kv_codec,
        choices=["auto", "none", "uw"],
        help="Lossless compression of KV blocks on disk and between hosts; auto: where it measures faster.",
    )


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="URL", help="URL of a router to register with. (default: none)")
    parser.add_argument("--worker-name", help="Name at the router, the same after every restart. (default: HOST:PORT)")
    parser.add_argument("--worker-url", help="URL under which the router reaches this server. (default: host and port)")
    parser.add_argument("--cluster-key", help="Cluster key of the router. (default: EMBERLINE_CLUSTER_KEY)")


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    from emberline.worker.main import serve

    started_at = time.monotonic() - (time.time() - _process_start_time())
    server = service.config_options(args, ServerConfig) | {
        "models": _parse_models(args.model, args.models, args.served_name),
        "api_keys": tuple(args.api_key),
        "embedder": None if args.embedder == "none" else args.embedder,
        "worker": _worker_config(args),
        "trace": tracing.trace_config(args),
    }
    engine = service.config_options(args, EngineConfig) | {"model": "", "prefix_cache": not args.no_prefix_cache}
    fleet = TimeSharingConfig(turn=args.model_turn, wait=args.model_wait, max_waiting=args.max_waiting)
    return service.run_service(serve(ServerConfig(**server), EngineConfig(**engine), fleet, started_at))


def _worker_config(args: argparse.Namespace) -> WorkerConfig | None:
    if args.router is not None:
        key = args.cluster_key or cluster_key_from_environment()
        return WorkerConfig(args.router, args.worker_name, args.worker_url, key, getattr(args, "role", "both"))
    for name in ("worker_name", "worker_url", "cluster_key", "kv_mooncake", "kv_checksums"):
        if getattr(args, name):
            raise InvalidRequest(
                f"--{name.replace('_', '-')} is only for a worker of a router", hint="add --router URL"
            )
    if args.kv_port and args.kv_store is None:
        raise InvalidRequest(
            f"--kv-port is {args.kv_port}, but the port is only for a worker of a router or with --kv-store",
            hint="add --router URL or --kv-store HOST:PORT",
        )
    return None


def _parse_models(model: str | None, several: str | None, served_name: str | None) -> dict[str, str]:
    """Return the models to serve, by their names in the API."""
    if several is None:
        model = model or DEFAULT_MODEL
        return {served_name or model: model}
    if model is not None or served_name is not None:
        other = f"MODEL {model!r}" if model is not None else f"--served-name {served_name!r}"
        raise InvalidRequest(
            f"--models {several[:200]!r} cannot be combined with {other}",
            param="models",
            hint="use only --models NAME=MODEL,...",
        )
    models: dict[str, str] = {}
    for item in several.split(","):
        name, equals, source = item.partition("=")
        if not equals or "/" in name:  # a path may contain "="
            name = source = item
        if not name or not source:
            raise InvalidRequest(
                f"--models contains {item!r}, which is no model", param="models", hint="write MODEL or NAME=MODEL"
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
    """Return when this process started; the current time without /proc (macOS).

    So "ready in" includes the interpreter's start and the imports."""
    try:
        ticks = int((PROC / "self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float((PROC / "uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
