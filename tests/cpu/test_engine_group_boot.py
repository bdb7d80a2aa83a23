"""Booting an EngineGroup: memory is checked before loading, and models give the same tokens after sleep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import host_engine
import pytest
import tiny
from engine_runs import run_engine, run_group
from gpu_settings import gpu_config

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest, ModelError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup
from emberline.engine.engine_group_boot import WeightEstimate, boot_engine_group, kv_bytes_per_model, plan_time_sharing
from emberline.engine.gpu.boot import BootedGPUEngine
from emberline.engine.gpu.device import can_use_gpu
from emberline.engine.gpu.swap import SwappedEngine, usable_model_bytes
from emberline.engine.memory import plan_engine_memory
from emberline.engine.runner import TorchRunner
from emberline.kernels import backend, reference

GIB = 1 << 30
KINDS = {"a": "llama", "b": "qwen3", "c": "qwen2"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.write(root / name, kind, seed=i) for i, (name, kind) in enumerate(KINDS.items())}


@pytest.fixture
def configs(checkpoints: dict[str, Path]) -> dict[str, EngineConfig]:
    return {name: EngineConfig.build(str(home), device="cpu", max_running=8) for name, home in checkpoints.items()}


@pytest.fixture
def use_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend", backend._backend)
    monkeypatch.setattr(reference, "uniform_from_seed", reference.uniform_from_seed)
    host_engine.plain_arithmetic()


def prompts(seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 131) for _ in range(20)]
    while True:
        yield shared + [rng.randrange(3, 131) for _ in range(rng.randrange(1, 20))]


def submission(name: str, i: int, prompt: list[int]) -> Submission:
    params = SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=True)
    return Submission(f"{name}{i}", prompt, params, model=name)


def run_alone(engine: Engine, name: str, count: int) -> dict[str, list[int]]:
    return run_engine(engine, [submission(name, i, p) for i, p in zip(range(count), prompts(5), strict=False)])


def run_together(group: EngineGroup, count: int) -> dict[str, list[int]]:
    """Submit requests for each model alternately, so that each is needed while another is busy."""
    pairs = zip(range(count), prompts(5), strict=False)
    return run_group(group, [submission(name, i, prompt) for i, prompt in pairs for name in group.engines])


def test_cpu_models_give_the_same_tokens_as_alone(configs: dict[str, EngineConfig]) -> None:
    group, loaded = boot_engine_group(configs, TimeSharingConfig())
    assert list(group.engines) == list(configs) and set(loaded) == set(configs)
    assert all(group.is_awake(name) for name in configs)
    expected: dict[str, list[int]] = {}
    for name, config in configs.items():
        single, one = boot_engine_group({name: config}, TimeSharingConfig())
        assert one[name].max_context == loaded[name].max_context == 64
        expected |= run_alone(single.engines[name], name, 5)
    assert run_together(group, 5) == expected
    assert all(group.sleep_stats(name).wakes == 1 and group.sleep_stats(name).sleeps == 0 for name in configs)


def test_kv_host_memory_above_free_memory_is_rejected(configs: dict[str, EngineConfig]) -> None:
    with pytest.raises(InvalidRequest, match=r"kv_host_memory is .* GiB of memory are free"):
        boot_engine_group({"a": configs["a"].with_settings(kv_host_memory=1 << 50)}, TimeSharingConfig())


@pytest.mark.skipif(can_use_gpu(), reason="there is one")
@pytest.mark.parametrize("names", ["a", "ab"])
def test_missing_gpu_is_rejected(configs: dict[str, EngineConfig], names: str) -> None:
    with pytest.raises(InvalidRequest, match=r"device is cuda, but torch .*"):
        boot_engine_group({name: replace(configs[name], device="cuda") for name in names}, TimeSharingConfig())


def test_too_little_main_memory_is_rejected_before_loading(configs: dict[str, EngineConfig]) -> None:
    weights = sum(WeightEstimate.from_config(config).weight_bytes for config in configs.values())
    assert kv_bytes_per_model(configs, weights + 6000) == 1000  # half of the free memory for all models
    with pytest.raises(ModelError, match=r"do not fit into main memory: .*\(a .*, b .*, c .*\); .* are free"):
        kv_bytes_per_model(configs, weights - 1)
    asking = {name: config.with_settings(kv_memory=GIB) for name, config in configs.items()}
    with pytest.raises(ModelError, match=r"3\.00 GiB of KV blocks"):
        kv_bytes_per_model(asking, weights + 3 * GIB - 1)
    kv_bytes_per_model(asking, weights + 3 * GIB)
    keeping = {name: config.with_settings(kv_host_memory=GIB) for name, config in configs.items()}
    with pytest.raises(ModelError, match=r"3\.00 GiB of KV blocks"):
        kv_bytes_per_model(keeping, weights + 3 * GIB - 1)
    kv_bytes_per_model(keeping, weights + 3 * GIB)


def test_weight_estimate_equals_loaded_weights(checkpoints: dict[str, Path], configs: dict[str, EngineConfig]) -> None:
    for name, home in checkpoints.items():
        model = host_engine.booted(home).runner.model
        found = WeightEstimate.from_config(configs[name])
        assert found.dtype == "float32" and abs(found.weight_bytes / model.weight_bytes - 1) < 0.01
        assert WeightEstimate.from_config(replace(configs[name], dtype="bfloat16")).dtype == "bfloat16"


def fail_to_load(name: str, settings: EngineConfig) -> BootedGPUEngine:
    raise AssertionError("nothing is loaded yet")


def with_gpu(configs: dict[str, EngineConfig], **changes: int) -> dict[str, EngineConfig]:
    return {name: config.with_settings(device="cuda", **changes) for name, config in configs.items()}


def test_models_that_fit_share_the_gpu(configs: dict[str, EngineConfig]) -> None:
    total = 40 * GIB
    members, space = plan_time_sharing(with_gpu(configs), total, 0, fail_to_load)
    sizes = [member.nbytes for member in members.values()]
    assert space == usable_model_bytes(total) and 0 <= space - sum(sizes) < space / 1000
    kv = [
        plan_engine_memory(WeightEstimate.from_config(c).config, gpu_config(max_running=8), total, "float32").kv_bytes
        for c in configs.values()
    ]
    assert max(sizes) < max(kv) / 2


def test_models_that_do_not_fit_get_all_memory_by_turns(configs: dict[str, EngineConfig]) -> None:
    large = with_gpu(configs, max_batch_tokens=1 << 20)  # activations take more than 1 GiB
    total = 6 * GIB
    members, space = plan_time_sharing(large, total, GIB, fail_to_load)
    assert all(0.9 * space < member.nbytes <= space for member in members.values())
    with pytest.raises(ModelError, match="must hold while they sleep"):
        plan_time_sharing(large, total, 1000, fail_to_load)
    keeping = with_gpu(configs, max_batch_tokens=1 << 20, kv_host_memory=GIB)
    with pytest.raises(ModelError, match=r"must hold while they sleep and 3\.00 GiB of KV blocks"):
        plan_time_sharing(keeping, total, 3 * GIB, fail_to_load)
    plan_time_sharing(keeping, total, 4 * GIB, fail_to_load)
    with pytest.raises(ModelError, match=r"3\.00 GiB of KV blocks"):
        plan_time_sharing(with_gpu(configs, kv_host_memory=GIB), 40 * GIB, 3 * GIB - 1, fail_to_load)


def test_configured_kv_memory_is_used(configs: dict[str, EngineConfig]) -> None:
    members, space = plan_time_sharing(with_gpu(configs, kv_memory=GIB), 40 * GIB, GIB, fail_to_load)
    assert all(GIB <= member.nbytes < 2 * GIB for member in members.values()) and space == usable_model_bytes(40 * GIB)


@pytest.mark.usefixtures("use_plain_arithmetic")
def test_sleeping_models_give_the_same_tokens_as_alone(checkpoints: dict[str, Path]) -> None:
    """Three models with memory for one or two of them are switched while requests for all arrive."""
    expected: dict[str, list[int]] = {}
    for name, home in checkpoints.items():
        expected |= run_alone(host_engine.booted(home).engine, name, 6)
    for at_once in (1, 2):
        members = {
            name: SwappedEngine(host_engine.planned(home), lambda home=home: host_engine.booted(home))  # type: ignore[misc]
            for name, home in checkpoints.items()
        }
        memory = at_once * max(member.nbytes for member in members.values())
        group = EngineGroup(members, memory, TimeSharingConfig(model_turn=0.01))
        assert group.is_awake("a") and not group.is_awake("c")
        assert run_together(group, 6) == expected
        for name in members:
            group.engines[name].kv.check_invariants()
        assert all(group.sleep_stats(name).wakes > 1 for name in "bc")
        for member in members.values():
            member.close()


@pytest.mark.parametrize("size", [4, 12, 24, 40, 48, 72, 96])
def test_unsupported_block_size_is_rejected_before_loading(configs: dict[str, EngineConfig], size: int) -> None:
    with pytest.raises(InvalidRequest, match="block_size"):
        boot_engine_group({"a": configs["a"].with_settings(block_size=size)}, TimeSharingConfig())


def test_models_that_share_a_gpu_cannot_have_draft_models(configs: dict[str, EngineConfig]) -> None:
    drafting = configs | {"b": configs["b"].with_settings(speculate="draft:other")}
    with pytest.raises(InvalidRequest, match="'b' is draft:other"):
        plan_time_sharing(drafting, 80 * GIB, 80 * GIB, never_load)


def never_load(name: str, settings: EngineConfig) -> BootedGPUEngine:
    raise AssertionError("nothing may be loaded")


def test_a_cpu_model_frees_its_cache_while_it_sleeps(configs: dict[str, EngineConfig]) -> None:
    group, loaded = boot_engine_group({"a": configs["a"]}, TimeSharingConfig(models_can_sleep=True))
    expected = run_together(group, 3)
    runner = loaded["a"].engine.runner
    assert isinstance(runner, TorchRunner) and runner.cache.keys.any()
    hits = loaded["a"].engine.stats().prefix_hits
    group.set_asleep(True)
    assert not group.is_awake("a")
    assert not any(part.any() for part in runner.cache.tensors)
    assert run_together(group, 3) == expected and group.is_awake("a")
    assert loaded["a"].engine.stats().prefix_hits <= 2 * hits  # of the prefix that these requests share, as at first


def test_models_that_can_sleep_need_host_memory_and_one_rank_on_a_cpu(configs: dict[str, EngineConfig]) -> None:
    with pytest.raises(InvalidRequest, match=r"can_sleep is set, but the model has 2 ranks on CPUs.*--tp"):
        boot_engine_group({"a": configs["a"].with_settings(tp=2)}, TimeSharingConfig(models_can_sleep=True))
    on_gpu = with_gpu({"a": configs["a"]})
    plan_time_sharing(on_gpu, 40 * GIB, 0, fail_to_load)
    with pytest.raises(ModelError, match="main memory must hold while they sleep"):
        plan_time_sharing(on_gpu, 40 * GIB, 0, fail_to_load, can_sleep=True)
