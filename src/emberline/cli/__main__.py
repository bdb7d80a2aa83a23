"""The command line: one subcommand, one file, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn

from emberline import __version__
from emberline.core.config import is_supervised
from emberline.core.errors import EmberlineError
from emberline.core.lifeline import end_with_parent

COMMANDS = {
    "serve": "serve a model over HTTP",
    "router": "spread requests over workers",
    "worker": "serve a model for a router",
    "gateway": "one endpoint for many providers and the local engine",
    "cluster": "a router and its workers on this machine",
    "drain": "let a worker finish what it has, and give it nothing new",
    "chaos": "break a cluster on this machine on purpose, and see that it recovers",
    "chat": "talk to a running server in the terminal",
    "pull": "fetch a model into the cache",
    "unweight": "pack a model's weights losslessly, unpack, verify, say what it saved",
    "bench": "measure this machine, the engine, its peers, or a server",
    "doctor": "say what this machine can do and what is missing",
}


class Parser(argparse.ArgumentParser):
    """Lists the commands, not only the usage line, where one of them is missing."""

    def error(self, message: str) -> NoReturn:
        if self._subparsers is not None and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
            self.exit(2)
        super().error(message)


def main(argv: list[str] | None = None) -> int:
    if is_supervised():
        end_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="emberline", description="An open LLM inference stack.")
    parser.add_argument("--version", action="version", version=f"emberline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in argv if word in COMMANDS), None)
    for name, help_ in COMMANDS.items():
        sub = commands.add_parser(name, help=help_, description=help_)
        if name == asked:
            command = importlib.import_module(f"emberline.cli.{name}")
            command.add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        return int(command.run(args))
    except EmberlineError as e:
        print(f"emberline: {e}", file=sys.stderr)
        return 1
    except OSError as e:  # of the machine: a full disk, a file that may not be written
        print(f"emberline: {f'{e.filename}: ' if e.filename else ''}{e.strerror or e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
