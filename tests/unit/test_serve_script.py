"""scripts/serve, with an `emberline` that only says how it was called."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve"
STUB = """#!/usr/bin/env bash
trap 'echo "$1 stopped" >>"$(dirname "$0")/called"; exit 0' TERM
echo "$*" >>"$(dirname "$0")/called"
if [ -e "$(dirname "$0")/$1-fails" ]; then exit 7; fi
while :; do sleep 0.05; done
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    python = '#!/bin/sh\necho "$*" >>"$(dirname "$0")/python-called"\n'
    for name, text in (
        ("scripts/setup", "#!/bin/sh\n"),
        (".venv/bin/emberline", STUB),
        (".venv/bin/python", python),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "scripts/serve")
    return tmp_path


def wait_for_calls(here: Path, lines: int, name: str = "called") -> list[str]:
    file, deadline = here / ".venv/bin" / name, time.monotonic() + 20
    while not file.exists() or len(file.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "nothing was called"
        time.sleep(0.02)
    return sorted(file.read_text().splitlines())


def start_script(here: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([here / "scripts/serve", *arguments], stderr=subprocess.PIPE)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_engine_and_gateway_start_and_stop(here: Path, how: signal.Signals) -> None:
    process = start_script(here, "smollm2", "--port", "8123", "--gateway=9000")
    both = [
        "gateway --port 9000 --engine http://127.0.0.1:8123",
        "serve --dashboard http://127.0.0.1:9000 smollm2 --port 8123",
    ]
    assert wait_for_calls(here, 2) == both
    process.send_signal(how)
    process.communicate(timeout=20)
    assert wait_for_calls(here, 4) == sorted([*both, "gateway stopped", "serve stopped"])


def test_stop_prints_no_engine_message(here: Path) -> None:
    slow = STUB.replace("trap '", "trap '[ $1 = gateway ] || sleep 0.3; ")
    (here / ".venv/bin/emberline").write_text(slow)  # so that the gateway ends first
    process = start_script(here)
    wait_for_calls(here, 2)
    process.terminate()
    assert b"goes on" not in process.communicate(timeout=20)[1]
    assert {"gateway stopped", "serve stopped"} <= {*wait_for_calls(here, 4)}


def test_engine_alone_without_gateway(here: Path) -> None:
    process = start_script(here, "--port", "8123", "--no-gateway")
    assert wait_for_calls(here, 1) == ["serve --port 8123"]
    process.terminate()
    process.communicate(timeout=20)
    assert wait_for_calls(here, 2) == ["serve --port 8123", "serve stopped"]


def test_engine_failure_stops_gateway(here: Path) -> None:
    (here / ".venv/bin/serve-fails").touch()
    process = start_script(here)
    process.communicate(timeout=20)
    assert process.returncode == 7
    assert "gateway --port 8080 --engine http://127.0.0.1:8000" in wait_for_calls(here, 2)


def test_gateway_failure_keeps_engine(here: Path) -> None:
    (here / ".venv/bin/gateway-fails").touch()
    process = start_script(here)
    assert process.stderr is not None
    assert b"the engine goes on" in process.stderr.readline()
    assert "serve --dashboard http://127.0.0.1:8080" in wait_for_calls(here, 2)
    process.terminate()
    process.communicate(timeout=20)
    assert "serve stopped" in wait_for_calls(here, 3)


def test_requested_gateway_failure_stops_engine(here: Path) -> None:
    (here / ".venv/bin/gateway-fails").touch()
    process = start_script(here, "--gateway")
    process.communicate(timeout=20)
    assert process.returncode == 7 and "serve stopped" in wait_for_calls(here, 3)


@pytest.mark.parametrize(("arguments", "ports"), [(["--port", "8123"], "8123 8080"), (["--no-gateway"], "8000")])
def test_summary_is_printed_when_ready(here: Path, arguments: list[str], ports: str) -> None:
    process = start_script(here, *arguments)
    assert wait_for_calls(here, 1, "python-called") == [f"-m emberline.cli.startup_summary {ports}"]
    process.terminate()
    process.communicate(timeout=20)
