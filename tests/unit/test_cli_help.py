"""`--help` of every command: each argument shows its default, and options of services are config fields."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from emberline.cli.__main__ import COMMANDS, CommandParser
from emberline.cli.options import explicit_options, format_size, option_flag, parse_size
from emberline.core.config import RouterConfig, ServerConfig, WorkerConfig
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.gateway_config import GatewayConfig
from emberline.core.options import nested_config_classes, option_info

SERVICE_CONFIGS: dict[str, tuple[type[Any], ...]] = {
    "serve": (ServerConfig, EngineConfig, TimeSharingConfig, WorkerConfig),
    "worker": (ServerConfig, EngineConfig, TimeSharingConfig, WorkerConfig),
    "router": (RouterConfig,),
    "gateway": (GatewayConfig,),
    "cluster up": (RouterConfig, EngineConfig),
    "doctor": (EngineConfig,),
}
# Options of these commands that are no config field: what to run, and where the setting is computed from the option.
COMMAND_ONLY_OPTIONS = {
    "serve": {"--config", "--models", "--served-name", "--log-level"},
    "worker": {"--config", "--models", "--served-name", "--log-level"},
    "router": {"--foreign-key-env", "--listen-fd", "--log-level"},
    "gateway": {"--config", "--forget-old", "--log-level"},
    "cluster up": {"--workers", "--prefill", "--decode", "--logs", "--ray-cpus", "--ray-gpus"},
    "doctor": {"--model", "--pull", "--gpus", "--gpu-memory", "--json", "--mtp", "--tiers", "--transfer"},
}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name in COMMANDS:
        parser = CommandParser(prog=name)
        importlib.import_module(f"emberline.cli.{name}").add_arguments(parser)
        yield from with_subcommands(name, parser)


def with_subcommands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                yield from with_subcommands(f"{name} {word}", subparser)


PARSERS = dict(parsers())


def option_fields(config_class: type[Any]) -> Iterator[str]:
    for each in config_class.__dataclass_fields__.values():
        nested = nested_config_classes(config_class).get(each.name)
        if nested is not None:
            yield from option_fields(nested)
        elif option_info(each) is not None:
            yield option_flag(each)


def shown_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [each for each in parser._actions if not isinstance(each, hidden) and each.help is not argparse.SUPPRESS]


@pytest.mark.parametrize("command", PARSERS)
def test_every_argument_shows_its_default(command: str) -> None:
    parser = PARSERS[command]
    for action in shown_actions(parser):
        assert action.help, f"{command} {action.dest} has no help"
        text = parser._get_formatter()._expand_help(action)
        has_default = re.search(r"\((default: [^)]+.*|required)\)$", text)
        assert has_default, f"{command} {action.option_strings or action.dest}: {text}"


@pytest.mark.parametrize("command", SERVICE_CONFIGS)
def test_every_option_of_a_service_is_a_config_field(command: str) -> None:
    known = {flag for config in SERVICE_CONFIGS[command] for flag in option_fields(config)}
    flags = {action.option_strings[0] for action in PARSERS[command]._actions if action.option_strings} - {"-h"}
    assert flags - known == COMMAND_ONLY_OPTIONS[command]


@pytest.mark.parametrize("command", ["serve", "worker", "router", "gateway"])
def test_every_config_option_is_on_the_command_line(command: str) -> None:
    known = {flag for config in SERVICE_CONFIGS[command] for flag in option_fields(config)}
    flags = {flag for action in PARSERS[command]._actions for flag in action.option_strings}
    assert known - flags == ({"--role", "--can-sleep"} if command == "serve" else set())


def test_help_shows_the_defaults_of_the_config() -> None:
    shown = {name: " ".join(parser.format_help().split()) for name, parser in PARSERS.items()}
    assert "(default: 8000)" in shown["serve"] and "(default: 8080)" in shown["gateway"]
    assert "any free port. (default: 0)" in shown["worker"]
    assert "(default: 600 s)" in shown["router"] and "(default: 1024)" in shown["serve"]
    assert "(default: 256M)" in shown["serve"] and "(default: 64; 256 on a GPU)" in shown["serve"]


def test_options_become_settings_only_if_given() -> None:
    parser = PARSERS["serve"]
    assert explicit_options(parser.parse_args([]), EngineConfig) == {}
    words = ["--max-running", "7", "--no-prefix-cache", "--kv-memory", "1G", "--no-kv-checksums", "--itl-target-ms=9"]
    assert explicit_options(parser.parse_args(words), EngineConfig) == {
        "max_running": 7,
        "prefix_cache": False,
        "kv_memory": 1 << 30,
        "kv_checksums": False,
        "itl_target_ms": 9.0,
    }
    words = ["--api-key", "a", "--api-key", "b", "--open", "--cors-origins", "https://a, https://b"]
    assert explicit_options(parser.parse_args(words), ServerConfig) == {
        "api_keys": ("a", "b"),
        "open": True,
        "cors_origins": ("https://a", "https://b"),
    }


@pytest.mark.parametrize("size", [0, 7, 1 << 10, 3 << 29, 256 << 20, 1 << 40])
def test_sizes_are_shown_as_they_are_parsed(size: int) -> None:
    assert parse_size(format_size(size)) == size
