"""`emberline router` and `emberline worker --device cuda` as users run them, three workers on one GPU: prompts are
computed by one and answered by another. The text is what one alone says, also if a worker is killed while it speaks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs what a server needs"),
]

ROLES = {"p": "prefill", "d": "decode", "e": "decode"}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
SETTINGS = (
    "--served-name",
    "m",
    "--embedder",
    "none",
    "--device",
    "cuda",
    "--dtype",
    "float32",
    "--kv-memory",
    "512M",
)
STORY = "Once upon a time there was a cache of keys and values that everybody wanted. "
TOKENS = 200


class Cluster:
    def __init__(self, home: Path) -> None:
        from routers import get, spawn, start_router, tiny_model, until

        from emberline.core.freeport import free_port

        self.get, self.until, self.home = get, until, home
        self.router = start_router(home / "router.log", "--split-tokens", "64", "--lost-after", "3")
        model = tiny_model(home / "m", 4096, **SIZES)
        self.ports = {name: free_port() for name in ROLES}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        for name, role in ROLES.items():
            place = ("--worker-name", name, "--role", role, "--port", str(self.ports[name]))
            command = ("-m", "emberline.cli", "worker", str(model), "--router", self.router.url, *place, *SETTINGS)
            self.workers[name] = spawn(home / f"{name}.log", *command)

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.get(f"{self.router.url}/cluster/status")["workers"]}

    def ready(self) -> bool:
        assert all(worker.poll() is None for worker in self.workers.values()), self.log_text()
        rows = self.rows()
        return len(rows) == len(ROLES) and all(
            row["health"] == "ready" and (name == "p" or row["paired"] == ["p"]) for name, row in rows.items()
        )

    def log_text(self) -> dict[str, str]:
        return {name: (self.home / f"{name}.log").read_text()[-2000:] for name in ROLES}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from routers import stop

    made = Cluster(tmp_path_factory.mktemp("workers"))
    try:
        made.until(made.ready, 150)
        yield made
    finally:
        stop(*made.workers.values(), made.router.process)


def body(number: int) -> dict[str, Any]:
    return {
        "model": "m", "prompt": f"{number}. {STORY * (4 + 3 * number)}", "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def read(url: str, number: int, after: Callable[[str], None] = lambda worker: None) -> tuple[str, Any]:
    """What is streamed; `after` happens when the first words are there, at the worker that says them."""
    asked = json.dumps(body(number) | {"stream": True}).encode()
    text = ""
    request = urllib.request.Request(f"{url}/v1/completions", asked, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            if not text:
                after(reply.headers["x-emberline-worker"])
            text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text, reply.headers


def single_worker_reply(cluster: Cluster, number: int) -> str:
    """What a worker says that computes the prompt by itself."""
    answer = cluster.get(f"http://127.0.0.1:{cluster.ports['e']}/v1/completions", body(number))
    return str(answer["choices"][0]["text"])


def test_split_replies_equal_single_worker(cluster: Cluster) -> None:
    for number in range(6):
        text, headers = read(cluster.router.url, number)
        assert headers["x-emberline-prefill"] == "p" and headers["x-emberline-worker"] in "de"
        assert text == single_worker_reply(cluster, number) and text
    moved = [cluster.get(f"http://127.0.0.1:{cluster.ports[name]}/stats")["transfer"] for name in "de"]
    assert sum(row["hit_tokens"] for row in moved) > 6 * 300 and not any(row["recomputed"] for row in moved), moved


def test_killed_worker_moves_stream(cluster: Cluster) -> None:
    """Last: it does not come back."""
    expected = single_worker_reply(cluster, 7)
    text, headers = read(cluster.router.url, 7, lambda worker: cluster.workers[worker].kill())
    assert text == expected, cluster.log_text()
    assert cluster.workers[headers["x-emberline-worker"]].wait(5) < 0
