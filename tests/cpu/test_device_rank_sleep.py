"""Models on several ranks that sleep: the same tokens after waking, memory that is freed on all ranks, and errors. The
ranks are threads, and the CPU is their device; see also tests/gpu/test_rank_sleep_on_gpu.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_rank_engines import DeviceThreadRanks
from engine_runs import run_engine, run_group
from host_engine import plain_arithmetic
from hot_experts import move_all, watch_moves
from sleeping_rank_process import keeping_arithmetic, use_freeable_caches
from test_device_rank_engine import LAYOUTS, build_config, collect, run_on_one_rank, submissions

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import reset_prefix_cache
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.kernels import backend, reference, tuning
from emberline.models.sleep import iter_instances


@pytest.fixture(autouse=True)
def memory_that_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend", backend._backend)
    monkeypatch.setattr(reference, "uniform_from_seed", reference.uniform_from_seed)
    plain_arithmetic()
    use_freeable_caches(monkeypatch.setattr)


class SleepingThreadRanks:
    """An engine on threads that can sleep, as SwappedRankEngine. As a context manager, it is closed at the end."""

    nbytes = 1

    def __init__(self, config: EngineConfig) -> None:
        self.ranks = DeviceThreadRanks(config)
        self._engine = self.ranks.make_engine(config)
        self._is_loaded = False

    def __enter__(self) -> SleepingThreadRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def leader(self) -> DeviceLeaderRunner:
        assert isinstance(self._engine.runner, DeviceLeaderRunner)
        return self._engine.runner

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def wake(self) -> int:
        copied, self._is_loaded = self.leader.wake() if self._is_loaded else 0, True
        return copied

    def sleep(self) -> int:
        copied = self.leader.sleep()
        reset_prefix_cache(self._engine)
        return copied

    def runners(self) -> list[GPURunner]:
        return [part.runner for part in self.ranks.parts]


def list_memory(runner: GPURunner) -> list[torch.Tensor]:
    return [*iter_instances(torch.Tensor, runner.model), *runner.device_buffers()]


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("llama", layout) for layout in LAYOUTS),
        ("deepseek_v3", {"tp": 2, "dp_attention": True}),
        ("delta-moe", {"tp": 2, "ep": 2}),
    ],
)
def test_same_tokens_after_sleep(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    config = build_config(tmp_path, name).with_settings(graphs=name != "delta-moe")
    with keeping_arithmetic():
        expected = select_tokens(run_on_one_rank(config, submissions()))
    with SleepingThreadRanks(config.with_settings(**layout)) as model:
        model.wake()
        memory = [list_memory(runner) for runner in model.runners()]
        weights = [count_bytes(iter_instances(torch.Tensor, runner.model)) for runner in model.runners()]
        for turn in range(3):
            assert select_tokens(collect(model.engine, submissions())) == expected
            assert any(runner.cache.keys.any() for runner in model.runners())
            assert model.sleep() == (0 if turn else sum(weights)), "the weights never change, so they are copied once"
            assert all(not tensor.untyped_storage().nbytes() for tensors in memory for tensor in tensors)
            assert not any(runner._graphs.captured for runner in model.runners())
            assert model.wake() == sum(weights)
            assert not any(runner.cache.keys.any() for runner in model.runners())
            assert model.engine.kv.num_cached_blocks == 0
        assert select_tokens(collect(model.engine, submissions())) == expected


def test_moved_experts_stay_after_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of weights in main memory, which a rank makes when it first sleeps, are made again after a move."""
    watch_moves(monkeypatch.setattr)
    config = build_config(tmp_path, "deepseek_v3", graphs=False, prefix_cache=False)
    layout = {"tp": 2, "ep": 2, "dp_attention": True, "redundant_experts": 1}
    with SleepingThreadRanks(config.with_settings(**layout)) as model:
        model.wake()
        expected = select_tokens(collect(model.engine, submissions()))
        copied = model.sleep()
        model.wake()
        move_all(model.engine, model.leader, [90, 1, 0, 1])
        assert model.sleep() == copied > 0
        model.wake()
        placed = [each.movable.placement for each in model.leader.model.movable_layers.values() if each.movable]
        assert all(0 in group for group in placed[0])
        assert select_tokens(collect(model.engine, submissions())) == expected


def select_tokens(found: dict[tuple[str, int], list[Any]]) -> dict[tuple[str, int], list[int]]:
    """Leave out log-probabilities, whose last digit may differ: kernels for a CPU compute those of one rank."""
    return {name: [value for value in row if isinstance(value, int)] for name, row in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_host_tier_keeps_its_blocks(layout: dict[str, Any], tmp_path: Path) -> None:
    config = build_config(tmp_path, "llama").with_settings(kv_host_memory=1 << 20, **layout)
    with SleepingThreadRanks(config) as model:
        model.wake()
        expected = collect(model.engine, submissions())
        for _ in range(2):
            model.sleep()
            model.wake()
            loaded = model.engine.stats().tiers["host"].loaded_blocks
            assert collect(model.engine, submissions()) == expected
            assert model.engine.stats().tiers["host"].loaded_blocks > loaded


def name_models(model: str) -> list[Submission]:
    return [replace(each, id=f"{model}-{each.id}", model=model) for each in submissions() if each.params.n == 1]


@pytest.mark.parametrize(("layout", "at_once"), [({"tp": 2}, 1), ({"tp": 2}, 2), ({"pp": 2}, 1)])
def test_models_take_turns(layout: dict[str, Any], at_once: int, tmp_path: Path) -> None:
    configs = {}
    for name, kind in (("a", "llama"), ("b", "cohere2")):
        (tmp_path / name).mkdir()
        configs[name] = build_config(tmp_path / name, kind)
    expected: dict[str, list[int]] = {}
    for name, config in configs.items():
        with SleepingThreadRanks(config.with_settings(**layout)) as model:
            expected |= run_engine(model.engine, name_models(name))
    with ExitStack() as stack:
        members = {
            name: stack.enter_context(SleepingThreadRanks(config.with_settings(**layout)))
            for name, config in configs.items()
        }
        check_turns(members, expected, at_once)


def check_turns(members: dict[str, SleepingThreadRanks], expected: dict[str, list[int]], at_once: int) -> None:
    group = EngineGroup(members, at_once, TimeSharingConfig(model_turn=0.01))
    assert group.is_awake("a") and group.is_awake("b") == (at_once == 2)
    mixed = [each for pair in zip(*map(name_models, members), strict=True) for each in pair]
    assert run_group(group, mixed) == expected
    for name in members:
        group.engines[name].kv.check_invariants()
        assert (group.sleep_stats(name).sleeps > 0) == (group.sleep_stats(name).sleep_bytes > 0) == (at_once == 1)


def test_error_of_the_leader_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other ranks: test_device_rank_sleep_processes.py."""
    model = SleepingThreadRanks(build_config(tmp_path, "llama").with_settings(tp=2))

    def fail() -> int:
        raise RuntimeError("no memory can be pinned")

    monkeypatch.setattr(model.leader._memory, "free", fail)
    message = r"rank 0 of 2 .* could not put its part of the model to sleep: RuntimeError: no memory can be pinned"
    with pytest.raises(EngineFailed, match=message):
        model.sleep()


def test_ranks_get_kernels_that_another_model_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a group must multiply with the same kernels."""
    chosen = [(32, 64, 128, "store", 3)]
    config = build_config(tmp_path, "llama").with_settings(tp=2)
    used: list[Any] = []
    monkeypatch.setattr(tuning, "list_choices", lambda: chosen)
    monkeypatch.setattr(tuning, "use_choices", used.append)
    with SleepingThreadRanks(config) as model:
        model.leader.share_kernel_choices()
    assert used == [chosen]
