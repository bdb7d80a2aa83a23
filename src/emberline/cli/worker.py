"""`emberline worker`: `emberline serve` behind a router."""

from __future__ import annotations

import argparse
from typing import get_args

from emberline.cli import serve
from emberline.core.config import Role
from emberline.core.errors import InvalidRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role",
        default="both",
        choices=get_args(Role),
        help="prefill: compute prompts for other workers; decode: generate from their prompts; both: do both.",
    )
    serve.add_arguments(parser)
    parser.set_defaults(port=0)


def run(args: argparse.Namespace) -> int:
    if args.router is None:
        raise InvalidRequest(
            "--router is missing: a worker registers with a router",
            param="router",
            hint="run emberline worker MODEL --router http://HOST:PORT",
        )
    return serve.run(args)
