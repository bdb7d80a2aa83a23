"""Starts servers for benchmarks.

EmberlineServer runs `emberline serve` on a free port and measures how long it takes to become ready. running_process
runs any other command.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

START_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.01


class EmberlineServer:
    def __init__(self, arguments: list[str], log_file: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "emberline.cli", "serve", *arguments, "--port", str(self.port)]
        # An installed package has compiled files; with this variable a source tree would be compiled at each start.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        began = time.perf_counter()
        with log_file.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdout=errors, stderr=errors, start_new_session=True, env=environment
            )
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                self.stop()
                raise EmberlineError(
                    f"the server did not become ready; the end of its log: {log_file.read_text()[-500:]}"
                )
            time.sleep(POLL_INTERVAL_S)
        self.ready_seconds = time.perf_counter() - began

    def __enter__(self) -> EmberlineServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def running_process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the context is open, and discard its output."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
