"""Engines whose ranks are processes: the same tokens as one rank, and what happens when a rank dies or hangs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file
from rank_engines import make_thread_engine

from emberline import LLM, SamplingParams
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed, EngineUnavailable, ModelError
from emberline.core.params import GrammarSpec
from emberline.core.request import Submission
from emberline.engine import llm as llm_module
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.boot import boot
from emberline.engine.llm import Completion
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks.boot import boot_ranks, check_same_model, check_started
from emberline.engine.ranks.control import RankLoaded, RankStarted, digest_settings
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.group_memory import NUM_COPIED
from emberline.engine.ranks.heartbeat import LOST_PEER_STATUS
from emberline.engine.ranks.layout import Layout
from emberline.kernels import ops
from emberline.kernels.comm.communicator import RankLost
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.rendezvous import Rendezvous

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "kv_memory": 1 << 20, "block_size": 8, "max_batch_tokens": 16, "max_running": 3,
}  # fmt: skip
SHARED = "a prefix of several blocks, "
PROMPTS = ["one", SHARED + "two", SHARED + "three", "four"]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.9, seed=3, n=2),
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.0, grammar=GrammarSpec("regex", "[a-c]{3}x[0-9]+")),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, num_attention_heads=8)
    tokenizer_file(tiny.write(directory, config))
    return directory


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    """A model in two processes: this one, and one for the other rank."""
    with LLM(directory, **SETTINGS, tp=2, rank_timeout=1.0) as made:
        yield made


def generate(llm: LLM) -> list[Completion]:
    return [*llm.generate(PROMPTS, PARAMS, progress=False), *llm.generate(PROMPTS, PARAMS, progress=False)]


def ranks_of(llm: LLM) -> RankGroup:
    ranks = getattr(llm.engine.runner, "ranks", None)
    assert isinstance(ranks, RankGroup)
    return ranks


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_same_tokens_as_one_rank(llm: LLM, directory: Path) -> None:
    """Greedy, sampled, in chunks, with a grammar, and a second time with cached prefixes."""
    with LLM(directory, **SETTINGS) as whole:
        expected = generate(whole)
    found = generate(llm)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert (llm.loaded.numerics.device, llm.loaded.numerics.ranks) == ("cpu", "tp2")
    assert [(each.stage, each.tensor_rank, each.layers) for each in llm.loaded.ranks] == [(0, 0, 3), (0, 1, 3)]
    assert re.fullmatch("[a-c]{3}x[0-9]+", found[4].text)
    assert sum(each.cached_tokens for each in found) == sum(each.cached_tokens for each in expected) > 0
    for ours, theirs in zip(found[3].logprobs, expected[3].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_failed_call_leaves_no_step_running(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the ranks would wait for the rest of a step, and be ended as if they hung."""

    def boot_threads(config: EngineConfig) -> LoadedEngine:
        return replace(boot(config.with_settings(pp=1)), engine=make_thread_engine(config))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_module, "boot", boot_threads)
    with LLM(directory, **SETTINGS, pp=2) as staged:
        expected = [each.tokens for each in staged.generate(PROMPTS, PARAMS, progress=False)]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(staged, "_apply_output", interrupt)
            staged.generate(PROMPTS, PARAMS, progress=False)
        assert staged.engine.idle
        assert [each.tokens for each in staged.generate(PROMPTS, PARAMS, progress=False)] == expected


def test_stopped_rank_ends_the_group(llm: LLM) -> None:
    """This ends the fixture's group, so it comes last of the tests that use it."""
    (pid,) = ranks_of(llm).pids.values()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 \(stage 0, tensor rank 1\) hangs: no heartbeat for 1 s"):
        llm.generate(PROMPTS, progress=False)
    assert not is_running(pid)
    with pytest.raises(EngineFailed, match="rank 1 of 2"):  # and nothing waits
        llm.generate(PROMPTS, progress=False)


def find_children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


async def collect(engine: AsyncEngine, name: str, max_tokens: int, model: str = "m") -> list[int]:
    submission = Submission(name, [5, 6, 7], SamplingParams(max_tokens=max_tokens, temperature=0.0), model=model)
    return [token async for output in engine.submit(submission) for token in output.tokens]


async def kill_rank_and_retry(directory: Path) -> None:
    config = EngineConfig.build(str(directory), **SETTINGS, pp=2)
    engine = AsyncEngine({"m": config, "other": config.with_settings(pp=1)}, TimeSharingConfig())
    await engine.start()
    try:
        expected = await collect(engine, "first", 8)
        assert await collect(engine, "of the other model", 8, "other") == expected
        assert {name: len(info.ranks) for name, info in engine.model_info.items()} == {"m": 2, "other": 0}
        assert engine.pid is not None
        (rank,) = find_children(engine.pid)
        stream = asyncio.create_task(collect(engine, "second", 40))
        await asyncio.sleep(0)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 0 of 2 \(stage 0, tensor rank 0\) was killed by signal 9"):
            await stream
        while (tokens := await try_again(engine)) is None:
            await asyncio.sleep(0.05)
        assert tokens == expected and engine.restarts == 1
        (last,) = find_children(engine.pid)
    finally:
        await engine.stop()
    assert not is_running(rank) and not is_running(last)


async def try_again(engine: AsyncEngine) -> list[int] | None:
    try:
        return await collect(engine, "third", 8)
    except EngineUnavailable:
        return None


def test_killed_rank_restarts_the_engine(directory: Path) -> None:
    asyncio.run(kill_rank_and_retry(directory))


def test_rank_that_cannot_start(directory: Path) -> None:
    config = EngineConfig.build(str(directory), **SETTINGS, pp=2)
    group = RankGroup(config, Layout(pp=2), command=("false",))
    with pytest.raises(EngineFailed, match=r"rank 0 of 2 .* ended with exit status 1"):
        group.wait_for(RankStarted)
    with pytest.raises(EngineFailed, match=r"rank 0 of 2 .* ended with exit status 1"):
        group.connect("stages-0", 1, 2)  # gloo itself would wait for the rank
    group.close()
    group = RankGroup(config, Layout(pp=2), command=("sleep", "100"))  # it never comes
    with pytest.raises(EngineFailed, match=r"rank 0 of 2 .* did not send RankStarted within 0.1 s"):
        group.wait_for(RankStarted, timeout_s=0.1)
    (pid,) = group.pids.values()
    group.close()
    assert not is_running(pid)


def test_copies_last_until_every_rank_has_made_them(directory: Path) -> None:
    """And end with an error if one of the ranks dies before."""
    config = EngineConfig.build(str(directory), **SETTINGS, pp=3)
    group = RankGroup(config, Layout(pp=3), command=("sleep", "100"))
    group.publish_copies(b"first")
    group.publish_copies(b"second")
    group.memory.set(0, NUM_COPIED, 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(group.finish_copies)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.05)
        group.memory.set(1, NUM_COPIED, 1)
        first.result(timeout=10.0)
        second = pool.submit(group.finish_copies)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of 3 .* was killed by signal 9"):
            second.result(timeout=10.0)
    group.close()


def test_rank_that_ends_because_of_another_is_not_the_cause(directory: Path) -> None:
    """Rank 0 ends at once, because it lost its connection, and rank 1 is killed a little later."""
    config = EngineConfig.build(str(directory), **SETTINGS, pp=3)
    script = f"if [ $1 = 0 ]; then exit {LOST_PEER_STATUS}; fi; sleep 0.2; kill -9 $$"
    group = RankGroup(config, Layout(pp=3), command=("bash", "-c", script))
    with pytest.raises(EngineFailed, match=r"rank 1 of 3 .* was killed by signal 9"):
        group.wait_for(RankStarted)
    group.close()


def test_kernels_are_compiled_before_ranks_start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every rank compiles them, and those that end first do not wait for the others."""
    calls: list[str] = []

    def start_ranks(*_: object, **__: object) -> None:
        calls.append("ranks")
        raise EngineFailed("the test ends here")

    monkeypatch.setattr(ops, "start_backend", lambda **_: calls.append("kernels"))
    monkeypatch.setattr("emberline.engine.ranks.boot.RankGroup", start_ranks)
    with pytest.raises(EngineFailed, match="the test ends here"):
        boot_ranks(EngineConfig.build(str(directory), **SETTINGS, tp=2), None)
    assert calls == ["kernels", "ranks"]


def test_settings_keep_their_hash_on_the_way_to_a_rank() -> None:
    config, layout = EngineConfig.build("m", tp=2, rank_timeout=5, max_running=7), Layout(tp=2)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert digest_settings(received, layout) == digest_settings(config, layout)


def test_ranks_with_another_version_or_model_are_refused() -> None:
    layout = Layout(tp=2)
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 .* has the version 0.0, and the leader has"):
        check_started({1: RankStarted("0.0", "x")}, "x", layout)
    parts = {0: RankLoaded("aaa", 1, 1, 1, 0), 1: RankLoaded("bbb", 1, 1, 1, 0)}
    with pytest.raises(ModelError, match=r"rank 1 of 2 .* has a checkpoint with the fingerprint bbb, and the leader"):
        check_same_model(parts, layout)


def run_peer(store_fd: int, rank: int) -> None:
    group = GlooGroup(Rendezvous(store_fd), "pair", rank, 2, connect_timeout_s=10.0, timeout_s=0.3)
    assert group.all_gather(torch.full((1, 2), rank, dtype=torch.bfloat16)).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert group.all_reduce(torch.tensor([0.5 + rank])).tolist() == [2.0]
    rows = torch.arange(6, dtype=torch.bfloat16).view(3, 2) + 10 * rank
    sent, received = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    expected = [[0, 1]] if rank == 0 else [[2, 3], [4, 5], [10, 11], [12, 13], [14, 15]]
    assert group.all_to_all(rows, sent, received).tolist() == expected
    assert group.all_to_all(rows[:0], [0, 0], [0, 0]).shape == (0, 2)
    x = torch.tensor([3.0 * rank])
    if rank:
        group.send(x, 0)
        return
    group.receive(x, 1)
    assert x.tolist() == [3.0]
    exchange = partial(group.all_to_all, x, [0, 1], [0, 1])
    for call in (lambda: group.receive(x, 1), lambda: group.all_reduce(x), exchange):  # rank 1 makes no more calls
        with pytest.raises(RankLost, match="group pair, rank 0 of 2"):
            call()


def test_gloo_group_of_threads() -> None:
    """Calls end within the deadline, and so does a group whose other rank never comes."""
    fd = os.memfd_create("store")
    with ThreadPoolExecutor(2) as pool:
        for peer in [pool.submit(run_peer, fd, rank) for rank in range(2)]:
            peer.result()
    with pytest.raises(RankLost, match="group absent, rank 0 of 2"):
        GlooGroup(Rendezvous(fd), "absent", 0, 2, connect_timeout_s=0.2, timeout_s=5.0)
    os.close(fd)
