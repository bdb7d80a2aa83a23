"""Options and start of the commands that serve until a signal stops them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Coroutine
from dataclasses import fields
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, config: Any) -> None:
    parser.add_argument("--host", default=config.host, help="Address to listen on.")
    parser.add_argument("--port", type=int, default=config.port, help="Port to listen on; 0: any free port.")
    parser.add_argument(
        "--api-key", action="append", default=[], help="Require this API key; may be repeated. (default: none required)"
    )
    add_exposure(parser)
    add_setting(parser, config, "request_timeout", "Time limit of a whole request in seconds; inf: none.")
    add_setting(parser, config, "token_timeout", "Seconds to the first token, and between two tokens of a stream.")
    add_log_level(parser)


def add_exposure(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that open a listener to others. `defaults`: the default of every option."""
    parser.add_argument(
        "--open",
        action="store_true",
        **defaults,
        help="Allow other machines to connect without authentication.",
    )
    parser.add_argument(
        "--cors-origins",
        type=comma_list,
        metavar="ORIGIN,...",
        **{"default": (), **defaults},
        help="Sites whose web pages may call, such as https://chat.example.com, or *. (default: none)",
    )
    parser.add_argument(
        "--allowed-hosts",
        type=comma_list,
        metavar="NAME,...",
        **{"default": (), **defaults},
        help="Host names under which clients call, such as a proxy's. (default: localhost and IP addresses only)",
    )


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="Lowest level that is logged.",
    )


def add_setting(parser: argparse.ArgumentParser, config: Any, name: str, help: str) -> None:
    """Add an option for the field `name` of a config, with the field's type and default."""
    default = getattr(config, name)
    shown = help if "default" in help else f"{help} (default: %(default)s)"
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=shown)


def parse_size(text: str) -> int:
    """Parse a size in bytes, such as 500M or 1.5G; raise ArgumentTypeError if it is none."""
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = -1.0
    if not 0 <= number < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes (hint: write 500M or 1.5G)")
    return int(number)


def config_options(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the values of a config's fields that have an option."""
    return {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}


def configure_logging(args: argparse.Namespace) -> None:
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format=form)


def run_service(service: Coroutine[Any, Any, None]) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service)
    return 0
