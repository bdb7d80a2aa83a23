"""emberline gateway: one endpoint for many providers and our own engine."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from emberline.cli import service
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig

OPTIONS = ("host", "port", "engine", "store", "redis", "otlp", "trace_share", "open", "cors_origins", "allowed_hosts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = GatewayConfig()
    actions = ["serve", "rotate-keys"]
    parser.add_argument("action", nargs="?", choices=actions, default="serve", help="(default: %(default)s)")
    parser.add_argument("--forget-old", action="store_true", help="rotate-keys: only drop old master keys")
    parser.add_argument("--config", type=Path, help="gateway.toml (default: the local engine as the only provider)")
    parser.add_argument("--host", help=f"(default: {default.host})")
    parser.add_argument("--port", type=int, help=f"(default: {default.port})")
    parser.add_argument("--engine", help=f"URL of the local engine or router (default: {default.engine})")
    parser.add_argument("--store", help="sqlite:DIRECTORY or postgresql://... (default: in the cache directory)")
    parser.add_argument("--redis", help="redis://..., where several replicas count together")
    parser.add_argument("--api-key", action="append", help="a token that works and manages; may be given several times")
    service.add_exposure(parser, default=None)
    parser.add_argument("--otlp", metavar="URL", help="of an OpenTelemetry collector, for spans of calls")
    parser.add_argument("--trace-share", type=float, help="of calls whose client does not say whether to trace them")
    service.add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    service.log(args)
    from emberline.gateway.book import read_file

    found = read_file(args.config) if args.config is not None else {}
    config = configured(found, args)
    if args.action == "rotate-keys":
        from emberline.cli.rotation import rotate_keys

        return rotate_keys(config, args.forget_old)
    from emberline.server.gateway.gatewaying import serve_gateway

    return service.run(serve_gateway(config, found))


def configured(found: dict[str, Any], args: argparse.Namespace) -> GatewayConfig:
    """The file's, and over it what the command line says."""
    known = {field.name: field for field in fields(GatewayConfig)}
    given = {name: value for name, value in found.items() if name != "gateways"}
    for name, value in given.items():
        if name not in known:
            raise InvalidRequest(f"{name!r} is no setting", param=name, hint=f"known: gateways, {', '.join(known)}")
        default = getattr(GatewayConfig(), name)
        if default is not None and not isinstance(value, list if isinstance(default, tuple) else type(default)):
            raise InvalidRequest(f"{name} must be like {default!r}", param=name)
        if isinstance(value, list):
            given[name] = tuple(value)
    told = {name: getattr(args, name) for name in OPTIONS}
    config = replace(GatewayConfig(**given), **{name: value for name, value in told.items() if value is not None})
    return replace(config, api_keys=(*config.api_keys, *(args.api_key or ())))
