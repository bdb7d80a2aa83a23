"""Engines on several ranks that share one GPU: the same tokens as one rank, and what happens when a rank fails.

Sums are computed in float32, so rounding is smaller than the differences between logits. NCCL refuses to let ranks
share a GPU."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import family_cases
import pytest
import tiny
import tiny_deepseek
import tiny_delta
import torch
from engine_runs import run_engine
from gpu_rank_process import COMMAND, FAILURE_FILE
from gpu_settings import short_starts
from mixed_sampling import make_submissions, write_checkpoint

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed, InvalidRequest
from emberline.core.freeport import free_port
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks import device_boot
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.node_agent import run_node

__all__ = ["short_starts"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda", "kv_tokens": 4096, "max_context": 512}
SETTINGS |= {"max_running": 8, "max_batch_tokens": 128, "block_size": 16}
MLA = tiny_deepseek.LITE_SIZES | {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
MLA |= {"vocab_size": 1000, "num_hidden_layers": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
MLA |= {"max_position_embeddings": 1024}


def boot_ranks(directory: Path, **settings: Any) -> LoadedEngine:
    config = EngineConfig.build(str(directory), **SETTINGS | settings)
    return boot(config.with_settings(ranks_per_gpu=config.parallel.num_ranks))


def make_plain_submissions() -> list[Submission]:
    """Return requests with a common prefix, whose prompts are computed in chunks."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 1000) for _ in range(40)]
    prompts = [(shared + [rng.randrange(3, 1000) for _ in range(n)])[:n] for n in (3, 65, 150, 31)]
    params = [SamplingParams(max_tokens=24, temperature=t, top_k=20, seed=7) for t in (0.0, 1.0, 0.0, 0.8)]
    return [Submission(f"r{i}", *each) for i, each in enumerate(zip(prompts, params, strict=True))]


def check_same_tokens(directory: Path, pending: list[Submission], **layout: Any) -> None:
    one = boot(EngineConfig.build(str(directory), **SETTINGS)).engine
    expected = run_engine(one, pending)
    loaded = boot_ranks(directory, **layout)
    runner = loaded.engine.runner
    assert isinstance(runner, DeviceLeaderRunner)
    try:
        assert run_engine(loaded.engine, pending, steps_between=1) == expected
        assert run_engine(loaded.engine, pending) == expected, "with cached prefixes and captured steps"
        is_captured = bool(runner._graphs.captured) and not runner._graphs.capture_failed
        assert is_captured == (layout.get("collectives") != "gloo")
    finally:
        loaded.engine.close()


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "collectives": "ipc"},
        {"pp": 2, "collectives": "ipc"},
        {"tp": 2, "pp": 2, "collectives": "ipc"},
        {"tp": 2, "collectives": "gloo"},
    ],
    ids=["tp2", "pp2", "tp2-pp2", "tp2-gloo"],
)
def test_sampling_of_all_kinds(layout: dict[str, Any], tmp_path: Path) -> None:
    """Greedy and drawn, with penalties, biases, grammars and log-probabilities."""
    check_same_tokens(write_checkpoint(tmp_path), make_submissions(1), **layout)


def test_windows(tmp_path: Path) -> None:
    family, config = family_cases.WIDE_CONFIGS["gemma3-256"]
    tiny.write_tensors(tmp_path, config, family.tensors(config, dtype=torch.float32))
    check_same_tokens(tmp_path, make_plain_submissions(), tp=2, pp=2)


def test_latents_and_experts(tmp_path: Path) -> None:
    tiny_deepseek.write_deepseek(tmp_path, "v3", dtype=torch.float32, **MLA)
    check_same_tokens(tmp_path, make_plain_submissions(), tp=4, ep=2)


def test_float8_cache(tmp_path: Path) -> None:
    """Stages compute the bits of one rank in steps of equal rows, so they round keys and values to the same numbers.

    Requests run one at a time, since requests that share a step do so in other steps with stages. Both engines compute
    prompts in the same chunks, which are short with stages."""
    directory = write_checkpoint(tmp_path)
    settings = {"dtype": "bfloat16", "kv_dtype": "float8"}
    one = boot(EngineConfig.build(str(directory), **SETTINGS | settings)).engine
    one.scheduler.plan_share = 2
    engine = boot_ranks(directory, pp=2, **settings).engine
    for submission in make_plain_submissions() * 2:  # the second time with cached prefixes
        assert run_engine(engine, [submission]) == run_engine(one, [submission])
    engine.close()


def test_preemption(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, make_submissions(2))
    engine = boot_ranks(directory, tp=2, kv_tokens=256).engine
    assert run_engine(engine, make_submissions(2)) == expected
    assert engine.scheduler.preemptions, "the cache was meant to be too small"
    engine.close()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=["tp2", "tp2-pp2"])
def test_tiers(layout: dict[str, int], tmp_path: Path) -> None:
    """Blocks come back from host memory, and from disk after a restart. Every rank copies its part.

    The cache has 13 blocks; all requests together fill 16."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_checkpoint(directory)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, make_plain_submissions())
    settings = layout | {"kv_tokens": 208, "kv_disk": str(tmp_path / "disk"), "kv_disk_size": 1 << 28}
    for is_restart in (False, True):
        engine = boot_ranks(directory, **settings, kv_host_memory=1 << 26).engine
        for _ in range(3):
            assert run_engine(engine, make_plain_submissions()) == expected
        assert engine.kv.tiers is not None and engine.kv.tiers.wait_until_written(10.0)
        stats = engine.stats().tiers
        engine.close()
        assert stats["host"].hit_tokens > 0 and bool(stats["disk"].loaded_blocks) == is_restart


def test_recurrent_states_in_tiers(tmp_path: Path) -> None:
    """Ranks have the same KV heads and different states."""
    config = tiny_delta.make_config("dense") | {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 256}
    config |= {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "vocab_size": 1000}
    config |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 1024}
    directory = tiny_delta.write_random(tmp_path, config)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, make_plain_submissions())
    engine = boot_ranks(directory, tp=2, kv_tokens=256, kv_host_memory=1 << 28).engine
    for _ in range(3):
        assert run_engine(engine, make_plain_submissions()) == expected
    assert engine.stats().tiers["host"].hit_tokens > 0
    engine.close()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "collectives": "gloo"}], ids=["tp2", "pp2-gloo"])
def test_nodes(layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two addresses of the loopback interface are the nodes, and share the GPU."""
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "the key of this test")
    directory = write_checkpoint(tmp_path)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, make_plain_submissions())
    master = f"127.0.0.1:{free_port()}"
    config = EngineConfig.build(str(directory), **SETTINGS, **layout, nodes=2, master=master)
    node = config.with_settings(node_rank=1, node_address="127.0.0.2")
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(run_node, node, "the key of this test", threading.Event())
        engine = boot(config).engine
        try:
            assert run_engine(engine, make_plain_submissions(), steps_between=1) == expected
        finally:
            engine.close()
        joined.result(timeout=30)  # it ends with node 0


@pytest.mark.parametrize(("sender", "receiver"), [({"tp": 2}, {"pp": 2}), ({"pp": 2}, {}), ({}, {"tp": 2, "pp": 2})])
def test_blocks_move_between_layouts(sender: dict[str, int], receiver: dict[str, int], tmp_path: Path) -> None:
    """A prompt that one engine has computed continues on another; its blocks are copied, not computed again."""
    directory, submission = write_checkpoint(tmp_path), make_plain_submissions()[2]  # 150 tokens
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, [submission])
    p, d = (
        boot_ranks(directory, transfer=TransferConfig(name), kv_checksums=True, **layout).engine
        for name, layout in (("p", sender), ("d", receiver))
    )
    try:
        p.add(replace(submission, publish=True))
        while not (outputs := p.step()):
            pass
        d.add(replace(submission, source=outputs[0].ticket))
        tokens: list[int] = []
        while not d.idle:
            tokens += [token for output in d.step() for token in output.tokens]
            p.step()
        assert tokens == expected[submission.id]
        stats = d.stats()
        assert stats.transfer is not None and stats.transfer.pull_failures == {}
        assert stats.transfer.hit_tokens == 144 and stats.prompt_tokens == 6
    finally:
        p.close()
        d.close()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def pids_of(loaded: LoadedEngine) -> dict[int, int]:
    runner = loaded.engine.runner
    assert isinstance(runner, DeviceLeaderRunner) and isinstance(runner._group, RankGroup)
    return runner._group.pids


@pytest.mark.parametrize("collectives", ["ipc", "gloo"])
def test_killed_rank_ends_the_engine(collectives: str, tmp_path: Path) -> None:
    """Kernels of the leader that wait for it end too."""
    loaded = boot_ranks(write_checkpoint(tmp_path), tp=2, collectives=collectives)
    (pid,) = pids_of(loaded).values()
    for submission in make_plain_submissions():
        loaded.engine.add(submission)
    loaded.engine.step()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 \(stage 0, tensor rank 1\) was killed by signal 9"):
        while True:
            loaded.engine.step()
    loaded.engine.close()
    assert not is_running(pid)
    torch.cuda.synchronize()  # the GPU can be used: the leader's context is not broken


def test_broken_context_names_the_rank_and_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_boot, "RankGroup", partial(RankGroup, command=COMMAND))
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "failure"))
    directory = tmp_path / "model"
    directory.mkdir()
    loaded = boot_ranks(write_checkpoint(directory), tp=2)
    (pid,) = pids_of(loaded).values()
    run_engine(loaded.engine, make_plain_submissions()[:1])
    (tmp_path / "failure").touch()
    loaded.engine.add(make_plain_submissions()[1])
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 .*: GPU .* failed: .*CUDA error"):
        while True:
            loaded.engine.step()
    loaded.engine.close()
    assert not is_running(pid)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.build(str(write_checkpoint(tmp_path)), **SETTINGS, tp=8)
    with pytest.raises(InvalidRequest, match=rf"need 8 GPUs, and .* {torch.cuda.device_count()}"):
        if torch.cuda.device_count() >= 8:
            pytest.skip("there are 8 GPUs")
        boot(config)
