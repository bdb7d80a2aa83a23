"""The server that the peers' tests call: one `emberline serve`, started again when a test asks for other settings."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import NoReturn

START_TIMEOUT_S = 120
OWN_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # tests of this very model know its context
MODEL_CONTEXT = 8192
MAX_CONTEXT = 4096  # tokens: an answer that does not end by itself takes seconds, not minutes


class NotComparable(Exception):
    """The test needs the peer's own modules, a start option without a counterpart, or another model."""


def set_aside(reason: str) -> NoReturn:
    raise NotComparable(reason)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Serving:
    """Starts `emberline serve` of the tree EMBERLINE_TREE, on one port for the whole run."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._options: list[str] = []
        atexit.register(self.stop)

    def start(
        self, name: str, *, context: int | None = None, api_key: str | None = None, embedder: str = "none"
    ) -> None:
        """Serve smollm2 as `name`; a running server with the same settings is kept."""
        if name != OWN_MODEL:
            context = min(context or MAX_CONTEXT, MAX_CONTEXT)
        options = ["--served-name", name, "--embedder", embedder, "--max-context", str(context or MODEL_CONTEXT)]
        options += ["--threads", os.environ.get("EMBERLINE_THREADS", "0")]
        if api_key:
            options += ["--api-key", api_key]
        if self._process and self._process.poll() is None and options == self._options:
            return
        self.stop()
        tree = Path(os.environ["EMBERLINE_TREE"])
        command = [
            os.environ["EMBERLINE_PYTHON"],
            "-m",
            "emberline.cli.__main__",
            "serve",
            "smollm2",
            "--port",
            str(self.port),
        ]
        with Path(os.environ["EMBERLINE_LOG"]).open("ab") as log:
            environment = os.environ | {"PYTHONPATH": str(tree / "src")}
            self._process = subprocess.Popen(
                [*command, *options], cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._options = options
        self._wait_until_ready()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"emberline serve {self._options} ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"emberline serve {self._options} was not ready in {START_TIMEOUT_S} s")


serving = Serving()


def option(arguments: list[str], *names: str) -> str | None:
    """The value of a start option in a peer's command line, as `--name value` or `--name=value`."""
    for at, argument in enumerate(arguments):
        if argument in names and at + 1 < len(arguments):
            return str(arguments[at + 1])
        for name in names:
            if str(argument).startswith(name + "="):
                return str(argument).partition("=")[2]
    return None
