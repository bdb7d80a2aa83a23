"""A gateway that is told to stop: what it has done is in its log, and the store is left in order."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from emberline.core.freeport import free_port

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_last_call_is_in_the_log(tmp_path: Path, how: signal.Signals) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(f'store = "sqlite:{tmp_path}/store"\nmaster_key = "{tmp_path}/master.key"\n')
    port, nobody = free_port(), free_port()
    command = [sys.executable, "-m", "emberline.cli", "gateway", "--config", str(config), "--port", str(port)]
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--engine", f"http://127.0.0.1:{nobody}"],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
    try:
        _ready(f"http://127.0.0.1:{port}/health", process, tmp_path / "log")
        with pytest.raises(urllib.error.HTTPError) as refused:
            body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}), timeout=10)
        process.send_signal(how)
        process.wait(15)
    finally:
        process.kill()
        process.wait()
    assert not list((tmp_path / "store").glob("*-wal"))  # merged: the files alone are a whole copy
    (file,) = (tmp_path / "store").glob("logs-*.db")
    with sqlite3.connect(file) as db:
        rows = db.execute("SELECT hex(id), status, success FROM logs").fetchall()
    assert rows == [(refused.value.headers["cf-aig-log-id"].upper(), refused.value.code, 0)]


def _ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(f"not ready:\n{log.read_text()}")
