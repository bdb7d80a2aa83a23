"""Models whose ranks share GPUs, as boot_engine_group loads them: their processes, turns, and what ends them. The CPU
is the GPU of each rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
from engine_runs import run_engine, run_group
from sleeping_rank_process import COMMAND, SLEEP_FAILURE_FILE, keeping_arithmetic, simulate_sleeping_gpus

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine_group import EngineGroup
from emberline.engine.engine_group_boot import boot_engine_group
from emberline.engine.memory import DEFAULT_UTILIZATION, RESERVE_BYTES
from emberline.engine.ranks import device_rank_model, rank_group_boot
from emberline.engine.ranks.control import MeasuredGPU
from emberline.engine.ranks.device_boot import DeviceDivision
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.rank_sharing import plan_rank_sharing
from emberline.kernels import backend, reference
from emberline.kernels.comm.ipc import count_buffer_bytes

SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": 1 << 20, "block_size": 16, "max_batch_tokens": 16}
SETTINGS |= {"max_running": 3, "max_context": 64, "device": "cuda", "tp": 2}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Simulate GPUs, and return the file that lets ranks fail."""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_backend", backend._backend)
        patch.setattr(reference, "uniform_from_seed", reference.uniform_from_seed)
        simulate_sleeping_gpus(patch.setattr)
        patch.setattr(rank_group_boot, "RankGroup", partial(RankGroup, command=COMMAND))
        patch.setenv(SLEEP_FAILURE_FILE, str(tmp_path / "failure"))
        yield tmp_path / "failure"


def make_configs(root: Path, *names: str) -> dict[str, EngineConfig]:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2}
    homes = {name: tiny.write(root / name, tiny.config("llama", **sizes), seed=ord(name)) for name in names}
    return {name: EngineConfig.build(str(home), **SETTINGS) for name, home in homes.items()}


def bytes_for_one_model(configs: dict[str, EngineConfig]) -> int:
    """Return the memory of a GPU with room for one and a half of these models."""
    divisions = {name: DeviceDivision.from_config(config.with_gpu_defaults()) for name, config in configs.items()}
    sizes = plan_rank_sharing(divisions, [MeasuredGPU(64 << 30, 0)], 1 << 40).model_bytes.values()
    kept = len(configs) * (RESERVE_BYTES + count_buffer_bytes())
    return int((1.5 * max(sizes) + kept) / DEFAULT_UTILIZATION)


def make_submissions(model: str) -> list[Submission]:
    params = [
        SamplingParams(max_tokens=5 + i, temperature=t, seed=3, ignore_eos=True) for i, t in enumerate((0.0, 0.9))
    ]
    return [Submission(f"{model}{i}", list(range(5, 25 + i)), each, model=model) for i, each in enumerate(params)]


def run_on_one_rank(config: EngineConfig, model: str) -> dict[str, list[int]]:
    with keeping_arithmetic():
        return run_engine(boot(config.with_settings(device="cpu", tp=1, threads=1)).engine, make_submissions(model))


def find_pid(group: EngineGroup, name: str) -> int:
    """Return the process of the model's rank 1."""
    runner = group.engines[name].runner
    assert isinstance(runner, DeviceLeaderRunner) and isinstance(runner._group, RankGroup)
    return runner._group.pids[1]


def test_models_take_turns_until_a_rank_is_killed(gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = make_configs(tmp_path, "a", "b")
    size = bytes_for_one_model(configs)
    monkeypatch.setattr(
        device_rank_model, "measure_memory", lambda device: (size, 0)
    )  # of the leader, which has the least
    expected = run_on_one_rank(configs["a"], "a") | run_on_one_rank(configs["b"], "b")
    group, loaded = boot_engine_group(configs, TimeSharingConfig(model_turn=0.01))
    try:
        assert not gpus.exists() and list(loaded) == ["b", "a"] and len(loaded["a"].ranks) == 2
        assert group.is_awake("a") and not group.is_awake("b")
        for _ in range(2):
            mixed = [each for pair in zip(*map(make_submissions, configs), strict=True) for each in pair]
            assert run_group(group, mixed) == expected
        stats = group.sleep_stats("b")
        weights = loaded["b"].weight_bytes  # of both ranks, without tables of angles
        assert stats.wakes > 2 and weights <= stats.sleep_bytes < 1.1 * weights
        (asleep,) = (name for name in configs if not group.is_awake(name))
        os.kill(find_pid(group, asleep), signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 \(stage 0, tensor rank 1\) was killed by signal 9"):
            while True:
                group.step()
    finally:
        for engine in group.engines.values():
            engine.close()


@pytest.mark.parametrize("failing", ["free", "restore"])
def test_a_rank_that_fails_ends_the_engine(failing: str, gpus: Path, tmp_path: Path) -> None:
    """A model that has the GPUs for itself is put to sleep by a message, and woken by a request."""
    configs = make_configs(tmp_path, "a")
    group, _ = boot_engine_group(configs, TimeSharingConfig(models_can_sleep=True))
    try:
        group.set_asleep(True)
        assert not group.is_awake("a")
        assert run_group(group, make_submissions("a")) == run_on_one_rank(configs["a"], "a") and group.is_awake("a")
        if failing == "restore":
            group.set_asleep(True)
        gpus.write_text(failing)
        with pytest.raises(
            EngineFailed, match=r"rank 1 of 2 .*: GPU 1 failed: RuntimeError: CUDA error: out of memory"
        ):
            group.set_asleep(failing == "free")
    finally:
        for engine in group.engines.values():
            engine.close()
