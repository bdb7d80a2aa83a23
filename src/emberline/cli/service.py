"""Logging and the event loop of commands that serve until a signal stops them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Coroutine
from typing import Any


def add_log_level_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="Lowest level that is logged.",
    )


def configure_logging(args: argparse.Namespace) -> None:
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format=form)


def run_service(service: Coroutine[Any, Any, None]) -> int:
    import asyncio  # imported late, so that `emberline serve` can start its engine process before

    import uvloop

    from emberline.core.descriptor_limit import raise_descriptor_limit

    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service)
    return 0
