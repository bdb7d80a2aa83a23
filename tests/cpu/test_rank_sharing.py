"""How models whose ranks share GPUs divide the memory, and which models cannot share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_rank_engines import load_host_rank_model
from rank_models import WRITERS

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest, ModelError
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine_group_boot import boot_engine_group
from emberline.engine.memory import DEFAULT_UTILIZATION, RESERVE_BYTES
from emberline.engine.ranks import rank_group_boot
from emberline.engine.ranks.control import MeasuredGPU
from emberline.engine.ranks.device_boot import DeviceDivision, plan_device_caches
from emberline.engine.ranks.rank_sharing import PlannedDivision, RankSharingPlan, plan_rank_sharing
from emberline.kernels.comm.lone_rank import LoneRank

GIB = 1 << 30
HOST_BYTES = 1 << 40
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda", "block_size": 16, "max_context": 64}
SETTINGS |= {"max_running": 3, "max_batch_tokens": 16}
LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "dp_attention": True}]


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def homes(tmp_path: Path) -> dict[str, Path]:
    made = {"a": tmp_path / "a", "b": tmp_path / "b"}
    for name, kind in (("a", "llama-biased"), ("b", "deepseek_v3")):
        made[name].mkdir()
        WRITERS[kind](made[name])
    return made


def divide(homes: dict[str, Path], **settings: Any) -> dict[str, DeviceDivision]:
    configs = {name: EngineConfig.build(str(home), **SETTINGS | settings) for name, home in homes.items()}
    return {name: DeviceDivision.from_config(config.with_gpu_defaults()) for name, config in configs.items()}


def check_plan(plan: RankSharingPlan, divisions: dict[str, DeviceDivision]) -> None:
    """Check that ranks that load the models by this plan take as much memory as it says."""
    for name, division in divisions.items():
        shared = plan.memory[name]
        config = division.config.with_settings(kv_memory=shared.kv_memory)
        memory = shared.total_bytes, shared.other_bytes
        ranks = [
            load_host_rank_model(
                config, division.layout, rank, lambda _, rank, size: LoneRank(rank, size), memory
            ).describe()
            for rank in range(division.layout.num_ranks)
        ]
        num_blocks, _ = plan_device_caches(ranks)
        assert max(each.fixed_bytes + num_blocks * each.block_bytes for each in ranks) == plan.model_bytes[name]


def count_kept_bytes(divisions: dict[str, DeviceDivision]) -> int:
    """Return what the models keep on a GPU while they sleep."""
    return sum(RESERVE_BYTES + PlannedDivision(division).buffer_bytes for division in divisions.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_that_fit_share_each_gpu(layout: dict[str, Any], homes: dict[str, Path]) -> None:
    divisions = divide(homes, **layout)
    gpus = [MeasuredGPU(40 * GIB, 0), MeasuredGPU(40 * GIB, 9 * GIB)]
    plan = plan_rank_sharing(divisions, gpus, 0)
    assert plan.usable_bytes == 31 * GIB - count_kept_bytes(divisions), "the GPU with less room"
    assert 0.99 * plan.usable_bytes < sum(plan.model_bytes.values()) <= plan.usable_bytes
    check_plan(plan, divisions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_that_do_not_fit_take_turns(layout: dict[str, Any], homes: dict[str, Path]) -> None:
    large = {"max_batch_tokens": 1 << 19}  # activations take most of the memory
    fixed = plan_rank_sharing(divide(homes, **layout, **large, kv_memory=1 << 16), [MeasuredGPU(90 * GIB, 0)], 0)
    divisions = divide(homes, **layout, **large)
    total = int((1.3 * max(fixed.model_bytes.values()) + count_kept_bytes(divisions)) / DEFAULT_UTILIZATION)
    plan = plan_rank_sharing(divisions, [MeasuredGPU(total, 0)] * 2, HOST_BYTES)
    assert plan.usable_bytes < sum(fixed.model_bytes.values())
    assert all(0.9 * plan.usable_bytes < size <= plan.usable_bytes for size in plan.model_bytes.values())
    assert all(memory.kv_memory is None for memory in plan.memory.values())
    check_plan(plan, divisions)
    with pytest.raises(ModelError, match="main memory must hold while they sleep"):
        plan_rank_sharing(divisions, [MeasuredGPU(total, 0)] * 2, 1000)


def test_configured_kv_memory_is_that_of_each_rank(homes: dict[str, Path]) -> None:
    divisions = divide(homes, tp=2, kv_memory=GIB)
    plan = plan_rank_sharing(divisions, [MeasuredGPU(40 * GIB, 0)] * 2, 0)
    assert all(GIB <= size < 1.5 * GIB for size in plan.model_bytes.values())
    check_plan(plan, divisions)


def test_a_model_that_can_sleep_needs_main_memory(homes: dict[str, Path]) -> None:
    divisions = divide({"a": homes["a"]}, tp=2)
    plan_rank_sharing(divisions, [MeasuredGPU(40 * GIB, 0)], 0)
    with pytest.raises(ModelError, match="main memory must hold while they sleep"):
        plan_rank_sharing(divisions, [MeasuredGPU(40 * GIB, 0)], 0, can_sleep=True)


def test_processes_end_if_the_models_do_not_fit(homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[StartedGroup] = []

    class StartedGroup:
        is_closed = False

        def __init__(self, *_: object) -> None:
            groups.append(self)

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(rank_group_boot, "RankGroup", StartedGroup)
    monkeypatch.setattr(rank_group_boot, "wait_for_start", lambda group, config: None)
    monkeypatch.setattr(rank_group_boot, "measure_gpus", lambda division, group: [MeasuredGPU(GIB, 0)])
    configs = {name: EngineConfig.build(str(home), **SETTINGS, tp=2) for name, home in homes.items()}
    with pytest.raises(ModelError, match="does not fit into GPU memory"):
        boot_engine_group(configs, TimeSharingConfig())
    assert [group.is_closed for group in groups] == [True, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "draft:other"}, "models that sleep or share GPUs cannot have draft models"),
        (
            {"nodes": 2, "master": "10.0.0.1:29500"},
            "nodes is 2, but models that share GPUs or sleep must have all ranks on one",
        ),
        (
            {"launcher": "ray"},
            "launcher is ray, but models that share GPUs or sleep must have all ranks on one machine",
        ),
        (
            {"tp": 4},
            r"model 'a' has 2 ranks \(tp x pp\) and model 'b' has 4; models that share GPUs need equal numbers",
        ),
        ({"tp": 1}, "model 'a' has 2 ranks .* and model 'b' has 1"),
        ({"transfer": TransferConfig("p")}, "share a GPU cannot exchange KV blocks"),
        ({"tp": 3}, "tp is 3, but"),
    ],
)
def test_models_that_cannot_share_gpus(settings: dict[str, Any], message: str, homes: dict[str, Path]) -> None:
    configs = {name: EngineConfig.build(str(home), **SETTINGS, tp=2) for name, home in homes.items()}
    if "tp" not in settings or settings["tp"] == 3:
        configs["a"] = configs["a"].with_settings(**settings)
    configs["b"] = configs["b"].with_settings(**settings)
    with pytest.raises(InvalidRequest, match=message):
        boot_engine_group(configs, TimeSharingConfig())
