"""Two models, each on several ranks, that take turns on one GPU, which all ranks share: the same tokens as on one rank,
and memory of the GPU that is really free while a model sleeps."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engine_runs import run_engine, run_group
from gpu_settings import short_starts
from test_rank_engine_on_gpu import SETTINGS, is_running, make_plain_submissions

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine_group import EngineGroup
from emberline.engine.engine_group_boot import boot_engine_group
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.memory import RESERVE_BYTES
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.group import RankGroup

__all__ = ["short_starts"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_RANKS = 2
UTILIZATION = 0.2  # of a rank's half of the GPU
KINDS = {"a": "llama", "b": "qwen3"}
LEFT_BYTES = 1 << 30  # of a rank while its model sleeps, besides what a bare process has: workspaces, small tensors


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = tiny.LARGE_VOCAB_SIZES
    return {name: tiny.write(root / name, tiny.config(kind, **sizes), seed=ord(name)) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def expected(homes: dict[str, Path]) -> dict[str, list[int]]:
    """The tokens of one rank."""
    tokens: dict[str, list[int]] = {}
    for name, home in homes.items():
        tokens |= run_engine(boot(EngineConfig.build(str(home), **SETTINGS)).engine, make_submissions(name))
    gc.collect()
    torch.cuda.empty_cache()
    return tokens


def make_submissions(model: str) -> list[Submission]:
    """Return greedy requests: among 32,000 nearly equal tokens, draws would depend on the order of sums."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    return [replace(s, id=f"{model}-{s.id}", model=model, params=params) for s in make_plain_submissions()]


def kv_bytes() -> int:
    """Return a size of the KV cache of a rank with which one model fits, and two do not."""
    share = UTILIZATION * torch.cuda.mem_get_info()[1] / NUM_RANKS
    return int(0.6 * (share - 2 * RESERVE_BYTES))


@contextmanager
def booted(homes: dict[str, Path], **settings: Any) -> Iterator[tuple[EngineGroup, dict[str, LoadedEngine]]]:
    options = SETTINGS | {"kv_tokens": None, "kv_memory": kv_bytes(), "gpu_memory_utilization": UTILIZATION}
    options |= {"ranks_per_gpu": NUM_RANKS, "collectives": "ipc"}
    configs = {name: EngineConfig.build(str(home), **options | settings) for name, home in homes.items()}
    group, loaded = boot_engine_group(configs, TimeSharingConfig(model_turn=0.05, models_can_sleep=True))
    try:
        yield group, loaded
    finally:
        for engine in group.engines.values():
            engine.close()


def find_runner(group: EngineGroup, name: str) -> DeviceLeaderRunner:
    runner = group.engines[name].runner
    assert isinstance(runner, DeviceLeaderRunner)
    return runner


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"tp": 2, "kv_host_memory": 1 << 28}], ids=str)
def test_models_take_turns(settings: dict[str, Any], homes: dict[str, Path], expected: dict[str, list[int]]) -> None:
    with booted(homes, **settings) as (group, _):
        assert group.is_awake("a") and not group.is_awake("b")
        mixed = [each for pair in zip(*map(make_submissions, homes), strict=True) for each in pair]
        for _ in range(3):
            assert run_group(group, mixed, steps_per_add=3) == expected
        for name in homes:
            stats, graphs = group.sleep_stats(name), find_runner(group, name)._graphs
            assert stats.sleeps >= 2 and stats.wakes >= 3 and stats.sleep_bytes > 0
            assert not graphs.capture_failed
            group.engines[name].kv.check_invariants()
        awake = next(name for name in homes if group.is_awake(name))
        assert find_runner(group, awake)._graphs.captured, "steps are captured again after waking"


def test_models_that_fit_stay_awake(homes: dict[str, Path], expected: dict[str, list[int]]) -> None:
    """Ranks of two models exchange tensors at the same time. One model sleeps while the other computes."""
    with booted(homes, tp=2, kv_memory=64 << 20) as (group, _):
        assert all(map(group.is_awake, homes))
        mixed = [each for pair in zip(*map(make_submissions, homes), strict=True) for each in pair]
        assert run_group(group, mixed) == expected
        assert all(group.sleep_stats(name).sleeps == 0 for name in homes)
        of_a = {name: tokens for name, tokens in expected.items() if name.startswith("a")}
        for each in make_submissions("a"):
            group.add(each)
        group.step()
        group.set_asleep(True)
        assert group.is_awake("a") and not group.is_awake("b"), "a model with open requests stays awake"
        group.set_asleep(False)
        assert group.is_awake("b")
        while not group.idle:
            assert all(o.error is None for outputs in group.step().outputs.values() for o in outputs)
        assert run_group(group, make_submissions("a")) == of_a


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_sleep_frees_the_memory_of_all_ranks(homes: dict[str, Path], expected: dict[str, list[int]]) -> None:
    of_a = {name: tokens for name, tokens in expected.items() if name.startswith("a")}
    with booted({"a": homes["a"]}, tp=2) as (group, loaded):
        weights = sum(each.weight_bytes for each in loaded["a"].ranks)
        sizes = []
        for turn in range(3):
            assert run_group(group, make_submissions("a")) == of_a
            awake = free_bytes()
            group.set_asleep(True)
            asleep = free_bytes()
            assert not group.is_awake("a") and asleep - awake >= NUM_RANKS * kv_bytes() + 0.9 * weights
            sizes.append(asleep)
            assert group.sleep_stats("a").sleep_bytes >= weights > 0 and group.sleep_stats("a").sleeps == turn + 1
        assert max(sizes) - min(sizes) < LEFT_BYTES, "each sleep leaves the same"
        assert run_group(group, make_submissions("a")) == of_a


def test_a_rank_that_dies_while_its_model_sleeps_ends_the_engine(homes: dict[str, Path]) -> None:
    with booted(homes, tp=2) as (group, _):
        runner = find_runner(group, "b")
        assert not group.is_awake("b") and isinstance(runner._group, RankGroup)
        pid = runner._group.pids[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 \(stage 0, tensor rank 1\) was killed by signal 9"):
            while True:
                group.step()
    assert not is_running(pid)
