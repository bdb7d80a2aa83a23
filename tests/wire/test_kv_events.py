"""A router that follows what its workers' caches hold: what is evicted it knows, and what died with an engine too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from routers import get, spawn, start_router, stop, tiny_model, until
from servers import Server

from emberline.core.freeport import free_port

WORKERS = ("a", "b")
STORY = "There was a cache of keys and values that everybody wanted, and nobody could keep. " * 5


class Cluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.router: Server = start_router(home / "router.log", "--kv-events", "--lost-after", "2")
        self.model = tiny_model(home / "tiny", 1024)
        self.ports = {name: free_port() for name in WORKERS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in WORKERS:
            self.start(name)
        until(self.exact, 120)

    def start(self, name: str) -> None:
        command = ("-m", "emberline.cli", "worker", str(self.model), "--router", self.router.url, "--worker-name", name)
        settings = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "1M")
        place = ("--port", str(self.ports[name]))
        self.processes[name] = spawn(self.home / f"{name}.log", *command, *settings, *place)

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.router.url}/cluster/status")["workers"]}

    def exact(self, *names: str) -> bool:
        rows = self.rows()
        wanted = [rows.get(name) for name in names or WORKERS]
        return all(row and row["kv_index"] == "exact" and row["health"] == "ready" for row in wanted)

    def counted(self, name: str, what: str) -> int:
        return int(get(f"http://127.0.0.1:{self.ports[name]}/stats")[what])

    def agrees(self, name: str) -> bool:
        """Without requests, all that a cache holds is what it keeps for others."""
        return self.exact(name) and int(self.rows()[name]["kv_blocks"]) == self.counted(name, "blocks_cached")

    def ask(self, text: str, **more: Any) -> str:
        """Who answered."""
        client = openai.OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=60)
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=[{"role": "user", "content": text}], max_tokens=4, **more
        )
        list(raw.parse()) if more.get("stream") else raw.parse()
        assert "x-emberline-chain" not in raw.headers
        return raw.headers["x-emberline-worker"]

    def decisions(self) -> dict[str, int]:
        found: dict[str, int] = get(f"{self.router.url}/cluster/status")["decisions"]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("events"))
    yield made
    stop(*made.processes.values(), made.router.process)


@pytest.mark.parametrize("stream", [False, True])
def test_router_index_follows_evictions(cluster: Cluster, stream: bool) -> None:
    text = f"{stream} {STORY}"
    home = cluster.ask(text, stream=stream)
    until(lambda: cluster.agrees(home))
    before = cluster.decisions().get("prefix", 0)
    assert cluster.ask(text, stream=stream) == home and cluster.decisions()["prefix"] == before + 1
    evict(cluster, home)
    until(lambda: cluster.agrees(home))
    cluster.ask(text, stream=stream)  # it was here, and is no more: wherever it goes, it has no home
    assert cluster.decisions()["prefix"] == before + 1


def evict(cluster: Cluster, name: str) -> None:
    """Fills a worker's cache with other things, behind the router's back."""
    size = cluster.counted(name, "blocks_total")
    for i in range(2 * size // 24 + 1):
        body = {"model": "tiny", "prompt": f"{i} {name} " + "x y " * 200, "max_tokens": 1}
        get(f"http://127.0.0.1:{cluster.ports[name]}/v1/completions", body)


def test_restarted_engine_holds_no_blocks(cluster: Cluster) -> None:
    text = f"engine {STORY}"
    home = cluster.ask(text)
    until(lambda: cluster.agrees(home) and cluster.rows()[home]["kv_blocks"])
    pid = next(int(line) for line in children(cluster.processes[home].pid) if "engine.process" in command_of(int(line)))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not cluster.exact(home))
    until(lambda: cluster.agrees(home))
    assert cluster.rows()[home]["kv_blocks"] == 0


def test_restarted_worker_holds_no_blocks(cluster: Cluster) -> None:
    text = f"worker {STORY}"
    home = cluster.ask(text)
    until(lambda: cluster.agrees(home) and cluster.rows()[home]["kv_blocks"])
    old = cluster.rows()[home]["incarnation"]
    cluster.processes[home].kill()
    cluster.processes[home].wait()
    cluster.start(home)
    until(lambda: cluster.rows()[home]["incarnation"] != old and cluster.agrees(home), 120)
    assert cluster.rows()[home]["kv_blocks"] == 0
    metrics = get(f"{cluster.router.url}/metrics")
    assert f'emberline:worker_kv_exact{{worker="{home}"}} 1' in metrics


def test_subscriber_gets_snapshot_then_changes(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{cluster.ports['a']}"
    with urllib.request.urlopen(f"{url}/cluster/events", timeout=30) as lines:
        first = json.loads(next(lines))
        assert first["parts"] == 1 and len(first["stored"]) == cluster.counted("a", "blocks_cached")
        get(f"{url}/v1/completions", {"model": "tiny", "prompt": "new " * 40, "max_tokens": 1})
        second = next(batch for batch in map(json.loads, lines) if batch["stored"])
    assert second["seq"] == first["seq"] + 1
    missed = f"{url}/cluster/events?incarnation={first['incarnation']}&since={first['seq']}"
    with urllib.request.urlopen(missed, timeout=30) as lines:
        assert json.loads(next(lines)) == second
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get(f"{url}/cluster/events?since=-1")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
