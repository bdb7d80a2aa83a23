"""The entry point of `emberline`: finds the subcommand, imports its module and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import ExitStack
from typing import Any, NoReturn

from emberline import __version__
from emberline.core.engine_packages import ENGINE_PACKAGES, missing_packages_error, require_engine_packages
from emberline.core.environment import is_supervised
from emberline.core.errors import EmberlineError
from emberline.core.init_process import end_on_sigterm_as_init
from emberline.core.parent_death import end_with_parent
from emberline.engine.engine_child import EngineChild

COMMANDS = {
    "serve": "Serve a model over HTTP.",
    "router": "Distribute requests over workers.",
    "worker": "Serve a model behind a router.",
    "gateway": "Serve many providers and the local engine behind one URL.",
    "cluster": "Run a router and its workers on this machine.",
    "drain": "Send a worker no new requests, and wait until it has finished the open ones.",
    "autoscale": "Start and remove workers of a router, so that latencies stay within an SLO.",
    "chaos": "Inject faults into a cluster on this machine, and check that it recovers.",
    "simulate": "Run a workload on a simulated cluster: latencies, throughput, worker-hours.",
    "chat": "Chat with a running server in the terminal.",
    "pull": "Download a model into the cache.",
    "list": "Show the models in the cache, and the short names of others.",
    "rm": "Delete a model from the cache.",
    "unweight": "Pack a model's weights losslessly, unpack or verify them, show the savings.",
    "drafter": "Train a drafter for speculative decoding.",
    "plan": "Plan how many GPUs serve a model within latency targets.",
    "bench": "Measure this machine, the engine, its peers, or a server.",
    "doctor": "Check this machine: what it supports, what is missing, whether a model fits.",
}

ENGINE_COMMANDS = ("serve", "worker")  # start with an engine process, before they import and parse their options


class HelpFormatter(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Return the help text of an argument, with its default appended unless the text already names it."""
        help_ = action.help
        commands = (argparse._SubParsersAction, argparse._SubParsersAction._ChoicesPseudoAction)
        has_no_value = action.default is argparse.SUPPRESS or isinstance(action, commands)
        if help_ is None or "(default:" in help_ or has_no_value:
            return help_
        if action.required:
            return f"{help_} (required)"
        return f"{help_} (default: {_format_default(action.default).replace('%', '%%')})"


def _format_default(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", [], ()):
        return "none"
    if isinstance(default, list) and isinstance(default[0], str):
        return ",".join(default)
    return str(default)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that shows every default in --help and lists all commands if none is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        if self._subparsers is not None and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
            self.exit(2)
        super().error(message)


def main(argv: list[str] | None = None) -> int:
    end_on_sigterm_as_init()
    if is_supervised():
        end_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    parser = CommandParser(prog="emberline", description="Emberline, an open LLM inference stack.")
    parser.add_argument("--version", action="version", version=f"emberline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    selected = next((word for word in argv if word in COMMANDS), None)
    with ExitStack() as stack:
        child = None
        if selected in ENGINE_COMMANDS and not {"-h", "--help"} & set(argv):
            try:
                require_engine_packages(f"emberline {selected}")
            except EmberlineError as e:
                print(f"emberline: {e}", file=sys.stderr)
                return 1
            child = EngineChild.spawn()
            stack.callback(child.end)
        return _run_command(parser, commands, selected, argv, child)


def _run_command(
    parser: CommandParser,
    commands: argparse._SubParsersAction[CommandParser],
    selected: str | None,
    argv: list[str],
    child: EngineChild | None,
) -> int:
    for name, help_ in COMMANDS.items():
        subparser = commands.add_parser(name, help=help_, description=help_)
        if name == selected:
            command = importlib.import_module(f"emberline.cli.{name}")
            command.add_arguments(subparser)
            selected_parser = subparser
    args = parser.parse_args(argv, argparse.Namespace(engine_child=child))
    try:
        if getattr(args, "settings_file", None) is not None:
            from emberline.cli.settings_file import apply_settings_file

            apply_settings_file(parser, selected_parser, argv, args)
        return int(command.run(args))
    except ModuleNotFoundError as e:
        if e.name is None or (package := e.name.partition(".")[0]) not in ENGINE_PACKAGES:
            raise
        print(f"emberline: {missing_packages_error(f'emberline {selected}', package)}", file=sys.stderr)
        return 1
    except EmberlineError as e:
        print(f"emberline: {e}", file=sys.stderr)
        return 1
    except OSError as e:  # such as a full disk or a file without write permission
        print(f"emberline: {f'{e.filename}: ' if e.filename else ''}{e.strerror or e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
