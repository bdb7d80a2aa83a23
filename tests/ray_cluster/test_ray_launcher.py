"""Engines whose nodes Ray starts, on a Ray cluster of several nodes on this machine. scripts/test runs this alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline import LLM, SamplingParams
from emberline.autoscaler.ray_fleet import RayFleet
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed, EngineUnavailable
from emberline.core.freeport import free_port
from emberline.core.request import Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.ranks.ray_launcher import RayLauncher, RayNodeActor, connect_to_ray

try:
    import ray
except ImportError:
    ray = None
pytestmark = pytest.mark.skipif(ray is None, reason="needs Ray: pip install '.[ray]'")

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_memory": 1 << 20, "block_size": 8, "max_running": 3}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
MAX_CONTEXT, LONG_TOKENS = 8192, 4000  # so many tokens that a node is lost before the last, on any machine
NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20, "include_log_monitor": False}
# Without given ports, a node gives up if these processes of its own have not started within 15 s.
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
MARK = f"ray-test-{os.getpid()}".encode()  # in the environment of all processes of the cluster
START_ATTEMPTS = 3  # a node of Ray gives up if it does not start within 30 s, as on a busy machine


def start_node(start: Callable[[dict[str, Any]], Any]) -> Any:
    for attempt in range(START_ATTEMPTS):
        try:
            return start({**NODE, **{name: free_port("0.0.0.0") for name in PORTS}})
        except Exception:
            if attempt == START_ATTEMPTS - 1:
                raise
    return None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with two CPUs each. Their GPUs exist only for Ray."""
    from ray.cluster_utils import Cluster

    # The paths of Ray's sockets have a maximum length, so this is not a directory of pytest.
    files = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    with files, pytest.MonkeyPatch.context() as environment:
        values = {"RAY_TMPDIR": files.name, "RAY_USAGE_STATS_ENABLED": "0", "EMBERLINE_TEST": MARK.decode()}
        for name, value in values.items():
            environment.setenv(name, value)
        head = {"include_dashboard": False, "no_monitor": True}

        def start_head(settings: dict[str, Any]) -> Any:
            settings = {**settings, **head, "gcs_server_port": free_port("0.0.0.0")}
            return Cluster(initialize_head=True, head_node_args=settings)

        made = start_node(start_head)
        try:
            start_node(lambda settings: made.add_node(**settings))
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": MAX_CONTEXT}
    tokenizer_file(tiny.write(directory, tiny.config("llama", **sizes, num_attention_heads=8)))
    return directory


def find_ranks() -> list[int]:
    """Return the processes of ranks that were started by this test or by nodes of its cluster."""
    processes = [file for file in Path("/proc").iterdir() if file.name.isdigit()]
    is_rank = {
        p: b"emberline.engine.ranks.process" in read(p / "cmdline") and MARK in read(p / "environ") for p in processes
    }
    return [int(process.name) for process, found in is_rank.items() if found]


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def wait_until(is_done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def test_same_tokens_as_one_rank(cluster: Any, directory: Path) -> None:
    """Stages on different nodes, each divided among the two CPUs of its node."""
    prompts = ["one", "a second prompt", "three"]
    with LLM(directory, **SETTINGS) as llm:
        expected = llm.generate(prompts, PARAMS, progress=False)
    with LLM(directory, **SETTINGS, tp=2, pp=2, launcher="ray", ray_address=cluster.address) as llm:
        found = llm.generate(prompts, PARAMS, progress=False)
        assert len(find_ranks()) == 3 and free_cpus() == 0
        actors = [row for row in ray.util.placement_group_table().values() if row["state"] == "CREATED"]
        assert len(actors) == 1 and len(set(actors[0]["bundles_to_node_id"].values())) == 2
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    wait_until(lambda: not find_ranks() and free_cpus() == 4)


def test_too_few_resources(cluster: Any, directory: Path) -> None:
    began = time.monotonic()
    message = (
        r"3 nodes with 1 CPU each, .* for 3 ranks within 1 s; it has .* \(2 CPUs, 2 GPUs\), .* \(2 CPUs, 2 GPUs\);"
    )
    with pytest.raises(EngineUnavailable, match=message):
        LLM(directory, **SETTINGS, pp=3, launcher="ray", ray_address=cluster.address, node_timeout=1.0)
    assert time.monotonic() - began < 15
    wait_until(lambda: free_cpus() == 4)


def test_gpus_are_reserved(cluster: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both nodes, and on this one those that the engine uses."""
    settings = {"pp": 4, "launcher": "ray", "ray_address": cluster.address, "node_timeout": 30.0}
    config = EngineConfig.build(str(directory), **settings)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    launcher = RayLauncher(config, "GPU")
    try:
        assert launcher.config.parallel.nodes == 2 and launcher.config.threads == 0
        assert "GPU" not in ray.available_resources() and free_cpus() == 4
        launcher.check()
    finally:
        launcher.close()
    wait_until(lambda: ray.available_resources().get("GPU") == 4)


async def start_and_stop_a_worker(cluster: Any) -> None:
    def make_fleet() -> RayFleet:
        def build_command(role: str, name: str) -> list[str]:
            return [sys.executable, "-c", "import time; time.sleep(100)", role, name]

        resources = {"both": {"num_cpus": 1.0, "num_gpus": 0}}
        return RayFleet(
            connect_to_ray(cluster.address), build_command, ["both"], environment={}, resources_by_role=resources
        )

    await make_fleet().start_workers("both", 1)
    fleet = make_fleet()  # an autoscaler that was started again
    (worker,) = await fleet.list_workers()
    assert worker.role == "both" and not worker.is_stopping
    await asyncio.to_thread(wait_until, lambda: bool(find_processes(worker.name)))
    await fleet.stop_worker(worker.name)
    await asyncio.to_thread(wait_until, lambda: not find_processes(worker.name))
    while await fleet.list_workers():
        await asyncio.sleep(0.1)


def find_processes(word: str) -> list[Path]:
    return [file for file in Path("/proc").glob("[0-9]*") if word.encode() in read(file / "cmdline").split(b"\0")]


def test_workers_of_an_autoscaler(cluster: Any) -> None:
    asyncio.run(asyncio.wait_for(start_and_stop_a_worker(cluster), 100))
    wait_until(lambda: free_cpus() == 4)


def test_model_that_another_node_cannot_read(tmp_path: Path) -> None:
    assert "config.json" in RayNodeActor().check_model(str(tmp_path))


async def collect(engine: AsyncEngine, name: str, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    submission = Submission(name, [5, 6, 7], params, model="m")
    return [token async for output in engine.submit(submission) for token in output.tokens]


async def lose_a_node(cluster: Any, config: EngineConfig) -> None:
    engine = AsyncEngine({"m": config}, TimeSharingConfig())
    await engine.start()
    try:
        expected = await collect(engine, "first")
        stream = asyncio.create_task(collect(engine, "second", LONG_TOKENS))
        await asyncio.sleep(0)
        (node,) = cluster.worker_nodes
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        with pytest.raises(EngineFailed, match=r"node 1 \(rank 0 of 2\)|rank 0 of 2"):
            await stream
        with pytest.raises(EngineUnavailable):  # it waits for a node, and requests do not
            await collect(engine, "third")
        start_node(lambda settings: cluster.add_node(**settings))  # in this thread, because Ray handles signals in it
        while (tokens := await try_again(engine)) is None:
            await asyncio.sleep(0.1)
        assert tokens == expected
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)  # Ray ends the actors of a driver that has ended
        await asyncio.to_thread(wait_until, lambda: not find_ranks())
    finally:
        await engine.stop()


async def try_again(engine: AsyncEngine) -> list[int] | None:
    try:
        return await collect(engine, "last")
    except EngineUnavailable:
        return None


def test_lost_node_and_its_replacement(cluster: Any, directory: Path) -> None:
    settings = {**SETTINGS, "threads": 2, "pp": 2, "launcher": "ray", "ray_address": cluster.address}
    config = EngineConfig.build(str(directory), **settings | {"kv_memory": 16 << 20}, node_timeout=100.0)
    asyncio.run(asyncio.wait_for(lose_a_node(cluster, config), 200))
    wait_until(lambda: not find_ranks() and free_cpus() == 4)


class SplitCluster:
    """A router and two workers, started with one command on the nodes of Ray."""

    def __init__(self, cluster: Any, directory: Path, home: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = home / "cluster.log"
        command = f"cluster up --launcher ray --ray-address {cluster.address} --prefill 1 --decode 1 --port"
        worker = "--embedder none --kv-memory 8M --served-name m --block-size 8"
        words = [*command.split(), self.url.rpartition(":")[2], "--logs", str(home), str(directory), *worker.split()]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "emberline.cli", *words], stdout=out, stderr=out)

    def count_ready_workers(self) -> int:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/cluster/status", timeout=5) as reply:
                return sum(row["health"] == "ready" for row in json.load(reply)["workers"])
        except urllib.error.HTTPError as e:
            assert e.code == 401
            return 0
        except OSError:
            return 0

    def complete(self, prompt: str) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def test_split_cluster_on_nodes_of_ray(cluster: Any, tmp_path: Path) -> None:
    """A node is lost while requests run, and its worker starts on the other one: all answers are right."""
    connect_to_ray(cluster.address)
    directory = tmp_path / "model"
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 2048}
    tokenizer_file(tiny.write(directory, tiny.config("llama", **sizes)))
    prompts = [f"prompt number {i} " * 70 for i in range(8)]  # so long that the prefill worker computes them
    with LLM(directory, **SETTINGS | {"kv_memory": 8 << 20}) as llm:
        expected = [each.text for each in llm.generate(prompts, PARAMS, progress=False)]
    split = SplitCluster(cluster, directory, tmp_path)
    try:
        wait_until(lambda: split.count_ready_workers() == 2, 90)
        assert free_cpus() == 2
        with ThreadPoolExecutor(3) as clients:
            answers = [clients.submit(split.complete, prompt) for prompt in prompts * 2]
            (node,) = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)
            assert [each.result() for each in answers] == expected * 2
        wait_until(lambda: split.log.read_text().count("starts on a node") == 3, 60)  # one of the two again
        wait_until(lambda: split.count_ready_workers() == 2, 90)
        assert [split.complete(prompt) for prompt in prompts] == expected
    finally:
        split.close()
    wait_until(lambda: free_cpus() == 2, 60)
