"""A real server for tests: `emberline serve` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from emberline.core.freeport import free_port

SRC = Path(__file__).parents[1] / "src"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def start_server(
    log: Path, *arguments: str, timeout: float = 120.0, program: tuple[str, ...] = ("-m", "emberline.cli")
) -> Server:
    """`emberline serve` as a user runs it, on a port of its own, ready to answer."""
    port = free_port()
    command = [sys.executable, *program, "serve", "--port", str(port), *arguments]
    python_path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": python_path})
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return Server(url, process, log)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    process.kill()
    raise AssertionError(f"not ready in {timeout} s:\n{log.read_text()}")


def stop_server(server: Server) -> None:
    server.process.terminate()
    try:
        server.process.wait(15)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise
