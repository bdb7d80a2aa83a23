"""Service: what commands have in common that listen until they are told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Coroutine
from dataclasses import fields
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, config: Any) -> None:
    parser.add_argument("--host", default=config.host)
    parser.add_argument("--port", type=int, default=config.port)
    parser.add_argument("--api-key", action="append", default=[], help="require this key; may be given several times")
    add_exposure(parser)
    add_setting(parser, config, "request_timeout", "seconds of a whole request; inf: as long as its tokens flow")
    add_setting(parser, config, "token_timeout", "seconds to the first token, and between two tokens of a stream")
    add_log_level(parser)


def add_exposure(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Options of a listener; `defaults`: what an option is that was not given."""
    parser.add_argument(
        "--open",
        action="store_true",
        **defaults,
        help="listen beyond this machine without authentication: anyone who reaches it may use it",
    )
    parser.add_argument(
        "--cors-origins",
        type=words,
        metavar="ORIGIN,...",
        **{"default": (), **defaults},
        help="web pages that may call, such as https://chat.example.com, or * (default: none of other sites)",
    )
    parser.add_argument(
        "--allowed-hosts",
        type=words,
        metavar="NAME,...",
        **{"default": (), **defaults},
        help="names under which it is called, besides localhost, such as that of a proxy in front",
    )


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def add_setting(parser: argparse.ArgumentParser, config: Any, name: str, help: str) -> None:
    """Add an option for the field `name` of a config, with its type and its default, which the help shows."""
    default = getattr(config, name)
    shown = help if "default" in help else f"{help} (default: %(default)s)"
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=shown)


def size(text: str) -> int:
    """Bytes, such as 500M or 1.5G."""
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = -1.0
    if not 0 <= number < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory, such as 500M or 1.5G")
    return int(number)


def given(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """What the options say of a config's fields."""
    return {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}


def log(args: argparse.Namespace) -> None:
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format=form)


def run(service: Coroutine[Any, Any, None]) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service)
    return 0
