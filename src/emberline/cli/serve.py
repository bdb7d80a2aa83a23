"""emberline serve: the engine and its HTTP face in one command."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from emberline.cli import service, tracing
from emberline.core.config import (
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    KV_PORTS,
    WEIGHTS,
    EngineConfig,
    FleetConfig,
    ServerConfig,
    WorkerConfig,
    cluster_key,
)
from emberline.core.errors import InvalidRequest

PROC = Path("/proc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server, engine, rules = ServerConfig(), EngineConfig(model=""), FleetConfig()
    parser.add_argument(
        "model", nargs="?", help=f"smollm2, hf:org/name, a directory or a .gguf file (default: {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--models",
        metavar="[NAME=]MODEL,...",
        help="several instead of one, each under its name or as given; those that do not fit in a GPU take turns",
    )
    parser.add_argument(
        "--model-turn",
        type=float,
        default=rules.turn,
        help="seconds that a model which others wait for still takes requests (default: %(default)s)",
    )
    parser.add_argument(
        "--model-wait",
        type=float,
        default=rules.wait,
        help="seconds after which a request whose model could not be woken gets a 429 (default: %(default)s)",
    )
    service.add_arguments(parser, server)
    parser.add_argument("--served-name", help="the model's name in the API (default: as given)")
    parser.add_argument("--device", default=engine.device, choices=["auto", "cpu", "cuda"])
    service.add_setting(parser, engine, "threads", "on a CPU; 0: all cores")
    parser.add_argument("--dtype", default=engine.dtype, choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--weights",
        default=engine.weights,
        choices=WEIGHTS,
        help="in a GPU's memory; packed: about 12 bits instead of 16, to the bit; both: packed for steps of few rows, "
        "plain for all others; auto: packed if the files are",
    )
    parser.add_argument("--kv-dtype", default=engine.kv_dtype, choices=["auto", "bfloat16", "float32", "float8"])
    parser.add_argument("--kv-memory", type=service.size, help="bytes of KV cache, e.g. 2G (default: planned)")
    _add_tiers(parser, engine)
    parser.add_argument("--max-context", type=int, help="tokens (default: the model's)")
    parser.add_argument("--max-batch-tokens", type=int, help="computed in one step (default: by the device)")
    parser.add_argument("--max-running", type=int, help="requests in one batch (default: by the device)")
    service.add_setting(parser, engine, "max_waiting", "more than these get a 429")
    parser.add_argument("--block-size", type=int, help="tokens of a KV block (default: by the device)")
    parser.add_argument(
        "--itl-target-ms",
        type=float,
        help="target inter-token latency on a GPU: prompt chunks are sized so that 90%% of tokens meet it",
    )
    service.add_setting(
        parser, engine, "itl_tail", "the other 10%% of tokens stay within so many targets while prompts wait"
    )
    parser.add_argument("--no-prefix-cache", action="store_true")
    service.add_setting(parser, server, "stall_timeout", "seconds until a silent engine is restarted")
    parser.add_argument(
        "--embedder", default=DEFAULT_EMBEDDER, help="model of /v1/embeddings, or none (default: %(default)s)"
    )
    parser.add_argument("--chat-template", help="a Jinja file instead of the model's own")
    service.add_setting(parser, server, "tool_style", "auto, hermes, llama3, mistral, mistral-args")
    _add_api(parser, server)
    _add_worker_arguments(parser)
    tracing.add_arguments(parser)


def _add_api(parser: argparse.ArgumentParser, server: ServerConfig) -> None:
    service.add_setting(
        parser,
        server,
        "generation_config",
        "sampling defaults: auto (the checkpoint's generation_config.json), none, or a directory with another one",
    )
    parser.add_argument(
        "--response-store",
        metavar="FILE",
        default=server.response_store,
        help="SQLite file for stored responses (previous_response_id); auto: until the server ends, none: off",
    )
    parser.add_argument(
        "--response-store-size",
        type=service.size,
        default=server.response_store_size,
        help="bytes of stored responses, of which the oldest are deleted first (default: 256M)",
    )


def _add_tiers(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    parser.add_argument(
        "--kv-host-memory",
        type=service.size,
        default=engine.kv_host_memory,
        help="bytes of main memory for prefixes that the KV cache has no room for, each model's own",
    )
    parser.add_argument("--kv-disk", metavar="DIR", help="where such prefixes are kept on disk, also after a restart")
    parser.add_argument("--kv-disk-size", type=service.size, help="bytes there, each model's own")
    parser.add_argument(
        "--kv-store", metavar="HOST:PORT", help="mooncake_master of a store that all workers of a cluster share"
    )
    parser.add_argument(
        "--kv-store-memory",
        type=service.size,
        default=engine.kv_store_memory,
        help="bytes of main memory that each model gives to it",
    )
    parser.add_argument(
        "--kv-policy", default=engine.kv_policy, choices=["lru", "arc"], help="which prefixes leave these first"
    )
    parser.add_argument(
        "--kv-mooncake",
        action="store_true",
        help="a worker moves prefixes by Mooncake's Transfer Engine too (RDMA where there is some)",
    )
    parser.add_argument(
        "--kv-mooncake-host",
        metavar="ADDRESS",
        help="IPv4 address of this host for Mooncake, which authenticates no peer: name one only in a network that you "
        "trust (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--kv-port",
        type=int,
        default=engine.kv_port,
        metavar="PORT",
        help=f"first of {KV_PORTS} ports for each model's KV transfers: TCP, then Mooncake (default: free ones)",
    )
    parser.add_argument(
        "--kv-checksums",
        action=argparse.BooleanOptionalAction,
        default=engine.kv_checksums,
        help="each block is published with a checksum, which the receiving worker compares with what arrived "
        "(default: with --kv-mooncake)",
    )
    parser.add_argument(
        "--kv-codec",
        default=engine.kv_codec,
        choices=["auto", "none", "uw"],
        help="lossless compression of prefixes on disk and between hosts; auto: where it measures faster",
    )


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="URL", help="take requests from this router too")
    parser.add_argument("--worker-name", help="there; one that is started again keeps it (default: host:port)")
    parser.add_argument("--worker-url", help="under which the router reaches this server (default: host and port)")
    parser.add_argument("--cluster-key", help="the router's, if it has one (better: EMBERLINE_CLUSTER_KEY)")


def run(args: argparse.Namespace) -> int:
    service.log(args)
    from emberline.server.worker.serving import serve

    began = time.monotonic() - (time.time() - _process_start())
    server = service.given(args, ServerConfig) | {
        "models": _models(args.model, args.models, args.served_name),
        "api_keys": tuple(args.api_key),
        "embedder": None if args.embedder == "none" else args.embedder,
        "worker": _worker(args),
        "trace": tracing.trace_config(args),
    }
    engine = service.given(args, EngineConfig) | {"model": "", "prefix_cache": not args.no_prefix_cache}
    rules = FleetConfig(turn=args.model_turn, wait=args.model_wait, max_waiting=args.max_waiting)
    return service.run(serve(ServerConfig(**server), EngineConfig(**engine), rules, began))


def _worker(args: argparse.Namespace) -> WorkerConfig | None:
    if args.router is not None:
        key = args.cluster_key or cluster_key()
        return WorkerConfig(args.router, args.worker_name, args.worker_url, key, getattr(args, "role", "both"))
    for name in ("worker_name", "worker_url", "cluster_key", "kv_mooncake", "kv_checksums"):
        if getattr(args, name):
            raise InvalidRequest(
                f"--{name.replace('_', '-')} is for a worker of a router", hint="give --router URL too"
            )
    if args.kv_port and args.kv_store is None:
        raise InvalidRequest("--kv-port is for a worker of a router, or with --kv-store", hint="give --router URL too")
    return None


def _models(model: str | None, several: str | None, served_name: str | None) -> dict[str, str]:
    """By the name in the API, what is served."""
    if several is None:
        model = model or DEFAULT_MODEL
        return {served_name or model: model}
    if model is not None or served_name is not None:
        given = "a model" if model is not None else "--served-name"
        raise InvalidRequest(f"--models and {given} were given", param="models", hint="write --models NAME=MODEL,...")
    models: dict[str, str] = {}
    for item in several.split(","):
        name, equals, source = item.partition("=")
        if not equals or "/" in name:  # a path may have one
            name = source = item
        if not name or not source:
            raise InvalidRequest(
                f"--models has {item!r}, which is no model", param="models", hint="MODEL or NAME=MODEL"
            )
        if name in models:
            raise InvalidRequest(f"--models has {name!r} twice", param="models", hint="write NAME=MODEL")
        models[name] = source
    return models


def _process_start() -> float:
    """When this process was started, so that "ready in" counts the interpreter and the imports too; now, without /proc
    (macOS)."""
    try:
        ticks = int((PROC / "self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float((PROC / "uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
