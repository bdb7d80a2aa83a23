"""`emberline worker`: runs `emberline serve` as a worker of a router."""

from __future__ import annotations

import argparse

from emberline.cli import serve
from emberline.cli.options import add_options
from emberline.core.config import ServerConfig, WorkerConfig
from emberline.core.errors import InvalidRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, WorkerConfig(()), ("role", "can_sleep"))
    serve.add_arguments(parser, ServerConfig(port=0))
    parser.set_defaults(port=0)


def run(args: argparse.Namespace) -> int:
    if args.routers is None:
        raise InvalidRequest(
            "--router is missing: a worker registers with a router",
            param="router",
            hint="run emberline worker MODEL --router http://HOST:PORT",
        )
    return serve.run(args)
