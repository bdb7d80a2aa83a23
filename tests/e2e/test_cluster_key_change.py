"""While the cluster key is being changed, processes with two keys work with those that send either one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from routers import SRC, get, spawn, start_router, stop, tiny_model, until

API_KEY = "a client's key"


def test_processes_that_send_different_cluster_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker accepts nothing but keys, so requests through the router reach it only with a cluster key."""
    monkeypatch.setenv("EMBERLINE_API_KEY", API_KEY)
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "old key\nnew key")
    router = start_router(tmp_path / "router")
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "new key\nold key")
    monkeypatch.setenv("EMBERLINE_API_KEY", "a key that no client has")
    options = ("--served-name", "tiny", "--embedder", "none", "--kv-memory", "64M", "--worker-name", "w", "--port", "0")
    model = str(tiny_model(tmp_path / "tiny"))
    worker = spawn(tmp_path / "worker", "-m", "emberline.cli", "worker", model, "--router", router.url, *options)
    try:
        status = {"authorization": f"Bearer {API_KEY}"}
        url = f"{router.url}/cluster/status"
        until(lambda: [row["health"] for row in get(url, headers=status)["workers"]] == ["ready"], 120)
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key=API_KEY, max_retries=0, timeout=60)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
        for key in ("old key", "new key"):
            assert "emberline:worker_ready" in get(f"{router.url}/metrics", headers={"authorization": f"Bearer {key}"})
        drain = [sys.executable, "-m", "emberline.cli", "drain", "w", "--router", router.url, "--undo"]
        for keys, expected in (("new key", 0), ("old key\nthird key", 0), ("third key", 1)):
            environment = {**os.environ, "PYTHONPATH": str(SRC), "EMBERLINE_CLUSTER_KEY": keys}
            assert subprocess.run(drain, env=environment, capture_output=True, timeout=60).returncode == expected
    finally:
        stop(worker, router.process)
