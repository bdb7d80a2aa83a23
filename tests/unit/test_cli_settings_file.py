"""`--config FILE`: options from a YAML file, checked like those of the command line, which have priority."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from emberline.cli import serve, worker
from emberline.cli.__main__ import main
from emberline.cli.options import explicit_options
from emberline.core.config import ServerConfig
from emberline.core.engine_config import EngineConfig, TimeSharingConfig

SETTINGS = """
model: smollm2
tp: 2
pp: 3
rank-timeout: 4.5
kv_memory: 1G
no-prefix-cache: true
kv-checksums: false
api-key: [a, b]
cors-origins: [https://a, https://b]
log-level: error
port: 7000
"""


@pytest.fixture(autouse=True)
def without_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.cli.__main__.ENGINE_COMMANDS", ())


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `serve` or `worker` with a file, and returns the arguments that it gets."""

    def run(content: str, *words: str, command: str = "serve") -> argparse.Namespace:
        found: list[argparse.Namespace] = []
        monkeypatch.setattr(serve, "run", lambda args: found.append(args) or 0)
        monkeypatch.setattr(worker, "run", lambda args: found.append(args) or 0)
        file = tmp_path / "settings.yaml"
        file.write_text(content)
        assert main([command, "--config", str(file), *words]) == 0
        return found[0]

    return run


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_options_of_a_file(parse: Any, command: str) -> None:
    args = parse(SETTINGS, command=command)
    engine = EngineConfig.build("", **explicit_options(args, EngineConfig))
    assert (engine.parallel.tp, engine.parallel.pp, engine.parallel.rank_timeout) == (2, 3, 4.5)
    assert engine.kv_cache.kv_memory == 1 << 30 and not engine.scheduler.prefix_cache
    assert engine.network.kv_checksums is False
    server = explicit_options(args, ServerConfig)
    assert server["api_keys"] == ("a", "b") and server["cors_origins"] == ("https://a", "https://b")
    assert (args.model, args.log_level, server["port"]) == ("smollm2", "error", 7000)


def test_command_line_has_priority(parse: Any) -> None:
    """Also where it gives the default, and for options that can be repeated."""
    args = parse(SETTINGS, "other", "--tp", "1", "--api-key", "c", "--log-level", "info", "--kv-checksums")
    assert (args.model, args.tp, args.pp, args.api_keys, args.log_level) == ("other", 1, 3, ["c"], "info")
    assert args.kv_checksums is True and explicit_options(args, TimeSharingConfig) == {}


def test_several_models(parse: Any) -> None:
    assert parse("models: {a: smollm2, b: /x}").models == "a=smollm2,b=/x"
    assert parse("models: [smollm2, b=/x]").models == "smollm2,b=/x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tp: two", "argument --tp: invalid int value: 'two'"),
        ("device: tpu", "argument --device: invalid choice: 'tpu'"),
        ("tpp: 2", "there is no option 'tpp' that a settings file can set"),
        ("config: other.yaml", "there is no option 'config'"),
        ("help: true", "there is no option 'help'"),
        ("open: 1", "the option 'open' is 1; it must be true or false"),
        ("kv-disk:", "the option 'kv-disk' has no value"),
        ("model:", "the option 'model' has no value"),
        ("speculate: off", "the option 'speculate' is false, which is no value of it"),
        ("kv-disk: true", "the option 'kv-disk' is true, which is no value of it"),
        ("- tp", "has no options by name, but a list"),
        ("", "has no options by name, but a NoneType"),
        ("tp: [", "cannot be read: while parsing"),
    ],
)
def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert main(["serve", "--config", str(file)]) == 1
    printed = capsys.readouterr().err
    assert message in printed and str(file) in printed


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/nowhere/settings.yaml"]) == 1
    assert "the settings file /nowhere/settings.yaml cannot be read" in capsys.readouterr().err
