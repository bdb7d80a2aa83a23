"""`emberline cluster up` as a user runs it: one command, readable lines, what dies comes back, Ctrl-C stops all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
from routers import SRC, tiny_model, until

from emberline.autoscaler.router_client import RouterClient
from emberline.core.freeport import free_port


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def put_both_to_sleep(url: str, key: str) -> list[bool]:
    router = RouterClient(url, key)
    try:
        assert all([await router.set_asleep(name) for name in ("worker-1", "worker-2")])
        return [row["asleep"] for row in (await router.fetch_status())["workers"]]
    finally:
        router.close()


def test_cluster_up_restarts_killed_worker_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    model, port, out = tiny_model(tmp_path / "tiny"), free_port(), tmp_path / "out"
    command = ["cluster", "up", "--workers", "2", "--port", str(port), "--logs", str(tmp_path / "logs"), str(model)]
    options = ["--", "--served-name", "tiny", "--embedder", "none", "--kv-memory", "64M", "--can-sleep"]
    with out.open("wb") as log:
        cluster = subprocess.Popen([sys.executable, "-m", "emberline.cli", *command, *options],
                                   stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(SRC)})  # fmt: skip
    try:
        both = f"2 of 2 workers ready at http://127.0.0.1:{port}"
        until(lambda: both in out.read_text(), 120)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices

        pids = {name: int(pid) for name, pid in re.findall(r"(\S+) +started, pid (\d+)", out.read_text())}
        assert set(pids) == {"router", "worker-1", "worker-2"}
        kept = tmp_path / "logs" / "cluster.key"
        key = kept.read_text().strip()
        assert kept.stat().st_mode & 0o777 == 0o600 and len(key) == 32
        assert not any(key in Path(f"/proc/{pid}/cmdline").read_text() for pid in (*pids.values(), cluster.pid))
        drain = [sys.executable, "-m", "emberline.cli", "drain", "worker-2", "--router", f"http://127.0.0.1:{port}"]
        for secret, status in (("", 1), (key, 0)):
            env = {**os.environ, "PYTHONPATH": str(SRC), "EMBERLINE_CLUSTER_KEY": secret}
            assert subprocess.run([*drain, "--undo"], env=env, capture_output=True, timeout=60).returncode == status
        assert asyncio.run(put_both_to_sleep(f"http://127.0.0.1:{port}", key)) == [True, True]
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices  # wakes one of them
        os.kill(pids["worker-1"], signal.SIGKILL)
        until(lambda: "ended by SIGKILL; restarts" in out.read_text())
        until(lambda: out.read_text().count("worker-1   ready") == 2, 120)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices

        pids |= {name: int(pid) for name, pid in re.findall(r"(\S+) +started, pid (\d+)", out.read_text())}
        cluster.send_signal(signal.SIGINT)
        assert cluster.wait(60) == 0
    finally:
        if cluster.poll() is None:
            cluster.terminate()
            cluster.wait(60)
    lines = [line.split(maxsplit=2)[1:] for line in out.read_text().splitlines()]
    first, *others = (who for who, what in lines if what == "stopped")
    assert first == "router" and sorted(others) == ["worker-1", "worker-2"]
    assert not any(map(is_alive, pids.values())) and "Traceback" not in out.read_text()
