"""A real router for tests, and workers behind it: real ones with a tiny model, and fakes that fail as told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bytelevel
import tiny
from servers import SRC, Server

from emberline.core.freeport import free_port


def tiny_model(home: Path, context: int = 512, **more: Any) -> Path:
    made = bytelevel.build()
    end = made.token_to_id("<|end|>")
    sizes = {"vocab_size": made.get_vocab_size(), "eos_token_id": end, "max_position_embeddings": context}
    tiny.write(home, tiny.config("llama", **sizes, **more), seed=1)
    made.save(str(home / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return home


def spawn(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(SRC)}
        )


def stop(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def get(url: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}), timeout=30
    ) as reply:
        text = reply.read().decode()
    return json.loads(text) if "json" in reply.headers["content-type"] else text


def until(what: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := what():
                return value
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def start_router(log: Path, *arguments: str, port: int = 0) -> Server:
    port = port or free_port()
    process = spawn(log, "-m", "emberline.cli", "router", "--port", str(port), *arguments)
    url = f"http://127.0.0.1:{port}"
    until(lambda: get(f"{url}/health/live"))
    return Server(url, process, log)


class Fakes:
    """A router and fake workers, by name."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.router = start_router(home / "router", *arguments)
        self.url = self.router.url
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}

    def start(
        self,
        *names: str,
        pace: float = 0.0,
        max_running: int = 64,
        role: str = "both",
        shy: bool = False,
        dtype: str = "bfloat16",
    ) -> None:
        before = {name: self.row(name).get("incarnation") for name in names}
        for name in names:
            self.ports[name] = free_port()
            options = ("--port", str(self.ports[name]), "--pace", str(pace), "--max-running", str(max_running))
            module = ("-m", "emberline.cluster.fake", "--router", self.url, "--name", name)
            more = ("--role", role, "--dtype", dtype, *(("--shy",) if shy else ()))
            self.workers[name] = spawn(self.home / name, *module, *options, *more)
        until(lambda: self._are_up(names) and all(self._is_new(name, before[name]) for name in names))

    def _are_up(self, names: Sequence[str]) -> bool:
        for name in names:
            assert self.workers[name].poll() is None, (self.home / name).read_text()
        return True

    def _is_new(self, name: str, before: str | None) -> bool:
        row = self.row(name)
        return bool(row) and row["health"] == "ready" and row["incarnation"] != before

    def tell(self, name: str, mode: str = "", **how: Any) -> dict[str, Any]:
        """How it is to fail (`cluster.fake.Fault`); what it counted."""
        fault = {"mode": mode, **how} if mode else None
        found: dict[str, Any] = get(f"http://127.0.0.1:{self.ports[name]}/fake", fault)
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = get(f"{self.url}/cluster/status")
        return found

    def row(self, name: str) -> dict[str, Any]:
        return next((row for row in self.status()["workers"] if row["name"] == name), {})

    def health(self, name: str) -> str:
        return str(self.row(name).get("health", "unknown"))

    def close(self) -> None:
        stop(*self.workers.values(), self.router.process)
