"""A prefill worker on two tensor ranks and a decode worker on one rank, behind a router, reply like a single worker.

Mooncake transfers the blocks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from routers import get, spawn, start_router, stop, tiny_model, until

from emberline.core.freeport import free_port

PROMPT = "Once upon a time there was a cache of keys and values that two ranks had divided. "
LAYOUTS = {"p": ("--role", "prefill", "--tp", "2"), "d": ("--role", "decode")}
SETTINGS = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "16M")
SETTINGS += ("--dtype", "float32", "--kv-mooncake")


class Cluster:
    def __init__(self, home: Path) -> None:
        self.router = start_router(home / "router.log", "--split-tokens", "32", "--split-patience", "60")
        self.url, self.ports = self.router.url, {name: free_port() for name in LAYOUTS}
        model = str(tiny_model(home / "tiny", 1024))
        self.workers: list[subprocess.Popen[bytes]] = []
        for name, options in LAYOUTS.items():
            own = ("--worker-name", name, "--port", str(self.ports[name]), *options)
            command = ("-m", "emberline.cli", "worker", model, "--router", self.url, *own, *SETTINGS)
            self.workers.append(spawn(home / f"{name}.log", *command))
        until(self.is_paired, 120)

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.url}/cluster/status")["workers"]}

    def is_paired(self) -> bool:
        rows = self.rows()
        return rows.keys() == LAYOUTS.keys() and rows["d"]["paired"] == ["p"] and rows["p"]["health"] == "ready"

    def ask(self, url: str, number: int, **more: Any) -> str:
        body = {"model": "tiny", "prompt": f"{number}. {PROMPT * 4}", "max_tokens": 24, "temperature": 0}
        return str(get(f"{url}/v1/completions", body | {"ignore_eos": True} | more)["choices"][0]["text"])

    def ask_decode_worker(self, number: int) -> str:
        """Return its reply to a prompt that it computes by itself."""
        return self.ask(f"http://127.0.0.1:{self.ports['d']}", number, cache_salt="alone")

    def stats(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = get(f"http://127.0.0.1:{self.ports[name]}/stats")
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    stop(*made.workers, made.router.process)


def test_prompts_computed_on_two_ranks_continue_on_one(cluster: Cluster) -> None:
    replies = [cluster.ask(cluster.url, number) for number in range(3)]
    transfer = cluster.stats("d")["transfer"]
    assert transfer["reached"] == {"mooncake": 1} and not transfer["passed_over"]
    assert transfer["pulls"] == 3 and transfer["hit_tokens"] > 3 * 200 and not transfer["recomputed"]
    assert len(cluster.stats("p")["ranks"]["tiny"]) == 2
    numerics = {name: row["numerics"]["tiny"]["ranks"] for name, row in cluster.rows().items()}
    assert numerics == {"p": "tp2", "d": ""}
    assert replies == [cluster.ask_decode_worker(number) for number in range(3)]
    until(lambda: not cluster.stats("p")["transfer"]["leases"])
    os.kill(find_rank(cluster.workers[0].pid), signal.SIGKILL)
    assert cluster.ask(cluster.url, 3) == cluster.ask_decode_worker(3)


def find_rank(pid: int) -> int:
    """Return the process of a worker's second rank, a child of its engine process; 0: there is none."""
    if "emberline.engine.ranks.process" in Path(f"/proc/{pid}/cmdline").read_text():
        return pid
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return next((rank for file in files for child in file.read_text().split() if (rank := find_rank(int(child)))), 0)
