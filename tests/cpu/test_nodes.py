"""Engines whose ranks are on several nodes, here addresses of the loopback interface."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline import LLM, SamplingParams
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import (
    EmberlineError,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    NodeRankTaken,
    WrongClusterKey,
)
from emberline.core.freeport import free_port
from emberline.core.request import Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.ranks import node_agent
from emberline.engine.ranks.cluster_key import authenticate_node
from emberline.engine.ranks.control import RankStarted, StartRank, digest_settings
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_address import bind_master
from emberline.engine.ranks.node_agent import join_master, run_node
from emberline.engine.ranks.node_listener import NodeListener
from emberline.engine.ranks.node_messages import MasterBeat, NodeHello, NodeJoined, NodeSocket, StartNode
from emberline.engine.ranks.rank_processes import RankProcesses
from emberline.kernels.comm.communicator import RankLost
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.rendezvous import Rendezvous

KEY = "the key of this test"
SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "kv_memory": 1 << 20, "block_size": 8, "max_batch_tokens": 16, "max_running": 3,
}  # fmt: skip
PROMPTS = [[5, 6, 7], list(range(40, 70))]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, temperature=0.9, seed=3)]
PP2 = Layout(pp=2, nodes=2)


@pytest.fixture(autouse=True)
def cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", KEY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, num_attention_heads=8)
    tokenizer_file(tiny.write(directory, config))
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    with LLM(directory, **SETTINGS) as llm:
        return generate(llm)


def generate(llm: LLM) -> list[list[int]]:
    return [each.tokens for each in llm.generate(PROMPTS, PARAMS, progress=False)]


def node_settings(**changed: Any) -> dict[str, Any]:
    """Return the settings of two nodes at a free address."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
                break
            except OSError:
                continue
    return {**SETTINGS, "pp": 2, "nodes": 2, "master": f"127.0.0.1:{port}", **changed}


def build_config(directory: Path | str, settings: dict[str, Any], **changed: Any) -> EngineConfig:
    return EngineConfig.build(str(directory), **{**settings, **changed})


@contextmanager
def running_node(config: EngineConfig, keys: tuple[str, ...] = (KEY,), **options: Any) -> Iterator[Future[None]]:
    """Run node 1 in a thread; yield its result."""
    stop = threading.Event()
    config = config.with_settings(node_rank=1, node_address="127.0.0.2")
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(run_node, config, keys, stop, **options)
        finally:
            stop.set()


def wait_until(is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_same_tokens_as_one_rank(directory: Path, expected: list[list[int]]) -> None:
    settings = node_settings(tp=2)
    with running_node(build_config(directory, settings)) as node:
        with LLM(directory, **settings) as llm:
            assert generate(llm) == expected
        node.result(timeout=5)  # it ends with node 0
    host, port = settings["master"].split(":")
    for each in (int(port), int(port) + 1):
        with socket.socket() as probe:
            assert probe.connect_ex((host, each)) != 0


# -- a node that is lost -----------------------------------------------------------------------------------------------

NODE_SCRIPT = """
import sys, threading, msgspec
from emberline.core.engine_config import EngineConfig
from emberline.engine.ranks.node_agent import run_node
assert "torch" not in sys.modules
run_node(msgspec.json.decode(sys.argv[1], type=EngineConfig), (sys.argv[2],), threading.Event())
"""


def find_children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


async def collect(engine: AsyncEngine, name: str, max_tokens: int) -> list[int]:
    submission = Submission(name, PROMPTS[0], SamplingParams(max_tokens=max_tokens, temperature=0.0), model="m")
    return [token async for output in engine.submit(submission) for token in output.tokens]


async def try_again(engine: AsyncEngine) -> list[int] | None:
    try:
        return await collect(engine, "third", 8)
    except EngineUnavailable:
        return None


async def kill_node_and_retry(config: EngineConfig, expected: list[int]) -> None:
    encoded = msgspec.json.encode(config.with_settings(node_rank=1)).decode()
    engine = AsyncEngine({"m": config}, TimeSharingConfig())
    with subprocess.Popen([sys.executable, "-c", NODE_SCRIPT, encoded, KEY]) as agent:
        await engine.start()
        try:
            assert await collect(engine, "first", 8) == expected
            (rank,) = find_children(agent.pid)
            stream = asyncio.create_task(collect(engine, "second", 40))
            await asyncio.sleep(0)
            agent.send_signal(signal.SIGKILL)
            with pytest.raises(
                EngineFailed, match=r"node 1 \(rank 0 of 2\) at 127.0.0.1 closed its connection|rank 0 of"
            ):
                await stream
            wait_until(lambda: not Path(f"/proc/{rank}").exists())
            with running_node(config) as node:
                while (found := await try_again(engine)) is None:
                    await asyncio.sleep(0.05)
                assert found == expected and engine.restarts == 1
                await engine.stop()
                node.result(timeout=5)
        finally:
            await engine.stop()


def test_killed_node_restarts_the_engine(directory: Path, expected: list[list[int]]) -> None:
    asyncio.run(kill_node_and_retry(build_config(directory, node_settings()), expected[0]))


def test_silent_node_ends_the_group() -> None:
    """The node joins, and then sends nothing, as if its network were cut."""
    config = build_config("", node_settings(rank_timeout=1.0))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_master, config.with_settings(node_rank=1), (KEY,), threading.Event())
        group = RankGroup(config, PP2)
        master = joining.result()
        assert master is not None
        assert master.receive(StartNode).layout == PP2
        group.is_ready = True
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=r"node 1 \(rank 0 of 2\) at 127.0.0.1 sent nothing for 1 s"):
            group.wait_for(RankStarted)
        assert 0.9 < time.monotonic() - began < 3
        master.close()
        group.close()


def test_node_that_sends_no_message_ends_the_group() -> None:
    """The thread that watches the ranks must not end without a failure: nobody would notice a lost rank."""
    config = build_config("", node_settings())
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_master, config.with_settings(node_rank=1), (KEY,), threading.Event())
        group = RankGroup(config, PP2)
        master = joining.result()
        assert master is not None
        master.send_bytes(b"\xc1")
        with pytest.raises(EngineFailed, match="cannot be watched any more: DecodeError"):
            group.wait_for(RankStarted, timeout_s=5.0)
        master.close()
        group.close()


def test_node_joins_no_group_that_has_started() -> None:
    """A node that was lost, and comes back before that is noticed, must wait for the next group."""
    config = build_config("", node_settings())
    listener = NodeListener(config, PP2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(node_agent._try_to_join, config.with_settings(node_rank=1), (KEY,)).result()
        (link,) = listener.wait_for_nodes()
        first.close()
        assert isinstance(join_once(config), NodeRankTaken)
    link.socket.close()
    listener.close()


def test_node_that_cannot_start_a_rank_closes_its_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    config, layout = build_config("", node_settings(tp=2)), Layout(2, 2, nodes=2)
    spawn = RankProcesses.spawn

    def spawn_once(self: RankProcesses, start: StartRank) -> None:
        if self.children:
            raise OSError("no process is left")
        spawn(self, start)

    monkeypatch.setattr(RankProcesses, "spawn", spawn_once)
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = NodeSocket(socket.create_connection(server.getsockname()), 1.0)
        run = node_agent.NodeRun(config.with_settings(node_rank=1), master, ("sleep", "100"))
        run._start = StartNode(config, layout, 1)
        with pytest.raises(ConnectionError, match="no process is left"):
            run.run(threading.Event())
        (pipe,) = run._processes.notice_fds.values()
        assert not Path(f"/proc/self/fd/{pipe}").exists()
        master.close()


def test_lost_node_0_is_noticed_while_the_plans_of_a_rank_are_full() -> None:
    """Its messages are not read then."""
    config = build_config("", node_settings(rank_timeout=1.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = NodeSocket(socket.create_connection(server.getsockname()), 1.0)
        node_0 = NodeSocket(server.accept()[0], 1.0)
        run = node_agent.NodeRun(config.with_settings(node_rank=1), own, ())
        run._processes = RankProcesses(2, ())
        run._node_zero_timer.limit_s = 0.3
        for _ in range(6):
            node_0.send(MasterBeat(is_ready=True))
            run._check()
            time.sleep(0.1)
        with pytest.raises(ConnectionError, match=r"node 0 sent nothing for 0\.3 s"):
            for _ in range(20):
                run._check()
                time.sleep(0.05)
        node_0.send(MasterBeat(is_ready=True))  # it stays unread
        run._check()
        node_0.close()
        time.sleep(0.05)
        with pytest.raises(ConnectionError, match="node 0 closed the connection"):
            run._check()
        run._processes.close()
        own.close()


def accept_node(listener: socket.socket) -> NodeSocket:
    node = NodeSocket(listener.accept()[0], 1.0)
    authenticate_node(node, (KEY,))
    assert node.receive(NodeHello).node_rank == 1
    node.send(NodeJoined())
    return node


def find_sleeping_ranks() -> list[int]:
    """Return the ranks that are `sleep` processes. Other tests may have left children in this process."""
    commands = {pid: Path(f"/proc/{pid}/comm") for pid in find_children(os.getpid())}
    return [pid for pid, command in commands.items() if command.exists() and command.read_text() == "sleep\n"]


def test_node_ends_its_ranks_if_node_0_is_silent() -> None:
    """Then it joins again, and ends when it is asked to stop."""
    settings = node_settings(rank_timeout=1.0)
    with (
        bind_master("127.0.0.1", int(settings["master"].split(":")[1])) as listener,
        running_node(build_config("", settings), command=("sleep", "100")),
    ):
        listener.settimeout(60.0)  # a busy machine starts ranks slowly
        first = accept_node(listener)
        first.send(StartNode(build_config("", settings), PP2, 1))
        wait_until(lambda: len(find_sleeping_ranks()) == 1)
        (rank,) = find_sleeping_ranks()
        first.send(MasterBeat(is_ready=True))
        second = accept_node(listener)
        assert not Path(f"/proc/{rank}").exists()
        first.close()
        second.close()


def test_abort_ends_a_call_that_waits() -> None:
    """If the network is cut, no connection closes by itself."""
    fd = os.memfd_create("store")
    with ThreadPoolExecutor(3) as pool:
        timeouts = {"connect_timeout_s": 10.0, "timeout_s": 30.0}
        pair = [pool.submit(GlooGroup, Rendezvous(fd), "pair", rank, 2, **timeouts) for rank in range(2)]
        ours, _ = (each.result() for each in pair)
        waiting = [pool.submit(ours.receive, torch.zeros(1), 1), pool.submit(ours.all_gather, torch.zeros(1))]
        time.sleep(0.1)
        ours.abort()
        for each in waiting:
            with pytest.raises(RankLost):
                each.result(timeout=5)
    os.close(fd)


# -- a node that cannot join -------------------------------------------------------------------------------------------


def join_once(config: EngineConfig, keys: tuple[str, ...] = (KEY,)) -> EmberlineError | None:
    """Return the error of a node that joins; None if it may."""
    try:
        node = node_agent._try_to_join(config.with_settings(node_rank=1), keys)
    except EmberlineError as error:
        return error
    node.close()
    return None


def test_missing_node_is_named() -> None:
    config = build_config("", node_settings(node_timeout=0.3))
    with pytest.raises(EngineFailed, match=r"node 1 \(rank 0 of 2\) did not join at 127.0.0.1:\d+ within 0.3 s"):
        RankGroup(config, PP2)


def test_master_that_never_comes() -> None:
    config = build_config("", node_settings(node_timeout=0.3))
    with (
        running_node(config) as node,
        pytest.raises(EngineUnavailable, match=r"node 0 cannot be reached at 127.0.0.1:"),
    ):
        node.result(timeout=5)


def test_wrong_key_is_refused_on_both_sides() -> None:
    config = build_config("", node_settings(node_timeout=0.5))
    listener = NodeListener(config, PP2)
    with (
        running_node(config, ("another key", "a third key")) as node,
        pytest.raises(WrongClusterKey, match="has another cluster key"),
    ):
        node.result(timeout=5)
    with pytest.raises(EngineFailed, match=r"node 1 .* did not join .* a node at 127.0.0.1 was refused: the node has"):
        listener.wait_for_nodes()
    listener.close()


@pytest.mark.parametrize(
    ("keys", "node_keys"),
    [(("new", "old"), ("old",)), (("old",), ("new", "old")), (("old", "new"), ("new", "old")), (("new",), ("new",))],
)
def test_nodes_with_one_key_in_common(
    keys: tuple[str, ...], node_keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the cluster key is being changed, some have two keys."""
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "\n".join(keys))
    config = build_config("", node_settings())
    listener = NodeListener(config, PP2)
    assert join_once(config, node_keys) is None
    listener.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 16}, r"node 1 has other settings than node 0: block_size is 16, and on node 0 it is 8"),
        ({"max_context": 8192}, r"max_context is 8192, and on node 0 it is default"),
        ({"nodes": 3, "pp": 3}, r"nodes is 3, and on node 0 it is 2"),
    ],
)
def test_other_settings_end_both_sides(changed: dict[str, Any], message: str) -> None:
    settings = node_settings()
    config = build_config("/here", settings)
    listener = NodeListener(config, PP2)
    refused = join_once(build_config("/there", settings, **changed))
    assert isinstance(refused, InvalidRequest)
    with pytest.raises(InvalidRequest, match=message) as error:
        listener.wait_for_nodes()
    assert error.value.message == refused.message
    listener.close()


def test_other_version_and_too_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config("", node_settings(threads=0))
    listener = NodeListener(config, PP2)
    with monkeypatch.context() as patch:
        patch.setattr(node_agent, "__version__", "0.0")
        assert "node 1 has version 0.0 of Emberline, and node 0 has" in str(join_once(config))
    monkeypatch.setattr(node_agent, "core_count", lambda: 0)
    assert "node 1 (rank 0 of 2) needs 1 cores, and its process may use 0" in str(join_once(config))
    listener.close()


def test_node_0_decides_what_depends_on_its_device(directory: Path) -> None:
    """On a GPU, node 0 changes the defaults before nodes join."""
    settings = node_settings()
    asked = build_config(directory, {**settings, "block_size": None, "device": "auto"})
    config = asked.with_settings(block_size=64, device="cuda")
    listener = NodeListener(config, PP2)
    assert join_once(asked) is None
    own = asked.with_settings(node_rank=1, node_address="127.0.0.2", threads=2)
    used = node_agent.with_settings_of_node(config, own)
    assert (used.scheduler.block_size, used.device, used.threads, used.parallel) == (64, "cuda", 2, own.parallel)
    assert digest_settings(used, PP2) == digest_settings(config, PP2)
    listener.close()


def test_second_node_with_the_same_rank() -> None:
    """It is refused while the first one is connected. A stranger that sends nothing delays no node."""
    config = build_config("", node_settings())
    listener = NodeListener(config, PP2)
    with socket.create_connection(config.parallel.parse_master()):
        first = node_agent._try_to_join(config.with_settings(node_rank=1), (KEY,))
        assert isinstance(refused := join_once(config), NodeRankTaken)
        assert "node 1 (rank 0 of 2) has joined already, from 127.0.0.1" in refused.message
        first.close()
        assert join_once(config) is None
    (link,) = listener.wait_for_nodes()
    link.socket.close()
    listener.close()


def test_addresses_that_cannot_be_used() -> None:
    config = build_config("", node_settings())
    host, port = config.parallel.parse_master()
    for taken in (port, port + 1):
        with socket.socket() as other:
            other.bind((host, taken))
            other.listen()
            with pytest.raises(InvalidRequest, match=f"cannot listen at {host}, port {taken}: Address already in use"):
                NodeListener(config, PP2)
    for wrong in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(InvalidRequest, match=f"cannot listen at {wrong}"):
            bind_master(wrong, port)
    with pytest.raises(InvalidRequest, match=r"master has the address 0.0.0.0, which stands for all interfaces"):
        bind_master("0.0.0.0", port)
    for wrong in ("192.0.2.1", "0.0.0.0"):
        with pytest.raises(InvalidRequest, match="node_address") as error:
            run_node(config.with_settings(node_rank=1, node_address=wrong), (KEY,), threading.Event())
        assert error.value.param == "node_address"


def test_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERLINE_CLUSTER_KEY")
    with pytest.raises(InvalidRequest, match="there is no cluster key"):
        NodeListener(build_config("", node_settings()), PP2)
