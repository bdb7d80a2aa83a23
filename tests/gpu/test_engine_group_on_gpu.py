"""Several models in one process on a GPU: awake together if they fit, otherwise sharing it over time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import tiny
import torch
from engine_runs import run_group

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT = 6


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    kinds = {"a": "llama", "b": "qwen3", "c": "qwen2"}
    root = tmp_path_factory.mktemp("models")
    homes = {
        n: tiny.write(root / n, tiny.config(kind, **tiny.LARGE_VOCAB_SIZES), seed=i)
        for i, (n, kind) in enumerate(kinds.items())
    }
    # float32: the last bits of logits depend on the batch, which rarely changes a token
    settings = {"device": "cuda", "dtype": "float32", "max_running": 16, "max_batch_tokens": 512}
    return {name: EngineConfig.build(str(home), kv_memory=256 << 20, **settings) for name, home in homes.items()}


def submissions(name: str) -> Iterator[Submission]:
    rng = random.Random(7)
    for i in range(COUNT):
        prompt = [rng.randrange(3, 32000) for _ in range(rng.choice((5, 130, 400, 900)))]
        params = SamplingParams(max_tokens=10 + 7 * i, temperature=0.0, ignore_eos=True)
        yield Submission(f"{name}{i}", prompt, params, model=name)


def run_all(group, names: str) -> dict[str, list[int]]:  # type: ignore[no-untyped-def]
    pending = [one for many in zip(*(submissions(name) for name in names), strict=True) for one in many]
    tokens_by_id = run_group(group, pending, steps_per_add=3)
    for name in names:
        group.engines[name].kv.check_invariants()
    return tokens_by_id


@pytest.fixture(scope="module")
def expected(configs: dict[str, EngineConfig]) -> dict[str, list[int]]:
    from emberline.engine.engine_group_boot import boot_engine_group

    tokens_by_id: dict[str, list[int]] = {}
    for name, config in configs.items():
        group, _ = boot_engine_group({name: config}, TimeSharingConfig())
        tokens_by_id |= run_all(group, name)
    return tokens_by_id


def test_models_that_fit_are_awake_together(configs: dict[str, EngineConfig], expected: dict[str, list[int]]) -> None:
    from emberline.engine.engine_group_boot import boot_engine_group

    group, loaded = boot_engine_group(configs, TimeSharingConfig())
    assert all(group.is_awake(name) for name in configs) and set(loaded) == set(configs)
    for _ in range(2):
        assert run_all(group, "abc") == expected
    assert all(group.sleep_stats(name).sleeps == 0 for name in configs)


@pytest.mark.parametrize("at_once", [1, 2])
def test_models_that_do_not_fit_share_the_gpu_over_time(
    configs: dict[str, EngineConfig], expected: dict[str, list[int]], at_once: int
) -> None:
    from emberline.core.freememory import free_memory
    from emberline.engine.boot import boot_on_gpu
    from emberline.engine.engine_group import EngineGroup
    from emberline.engine.engine_group_boot import plan_time_sharing
    from emberline.engine.gpu.boot import BootedGPUEngine

    def load(name: str, settings: EngineConfig) -> BootedGPUEngine:
        return boot_on_gpu(settings, None)

    members, _ = plan_time_sharing(configs, torch.cuda.mem_get_info()[1], free_memory(), load)
    memory = at_once * max(member.nbytes for member in members.values())
    group = EngineGroup(members, memory, TimeSharingConfig(model_turn=0.02))
    for _ in range(2):
        assert run_all(group, "abc") == expected
    assert all(group.sleep_stats(name).wakes > 1 for name in configs)
    for member in members.values():
        member.close()


def test_models_share_memory_by_default(configs: dict[str, EngineConfig], expected: dict[str, list[int]]) -> None:
    from emberline.engine.engine_group_boot import boot_engine_group

    plain = {
        name: replace(config, kv_cache=replace(config.kv_cache, kv_memory=None)) for name, config in configs.items()
    }
    group, loaded = boot_engine_group(plain, TimeSharingConfig())
    assert all(group.is_awake(name) for name in plain)
    assert sum(one.kv_bytes for one in loaded.values()) > 0.8 * torch.cuda.mem_get_info()[1]
    assert run_all(group, "abc") == expected
