"""KV tiers of engines on several ranks. Here the ranks are threads; see also test_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import run_engine
from rank_engines import make_thread_engine
from rank_models import WRITERS

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "dtype": "float32", "block_size": 8, "max_context": 64, "max_batch_tokens": 32,
    "max_running": 2,
}  # fmt: skip


def submissions() -> list[Submission]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[3 + (7 * i + 5 * j + i * j) % 90 for j in range(35)] for i in range(4)]
    return [Submission(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def build_config(directory: Path, name: str, **settings: Any) -> EngineConfig:
    WRITERS[name](directory)
    return EngineConfig.build(str(directory), **SETTINGS | settings)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "delta-dense"])
def test_host(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    config = build_config(tmp_path, name, kv_memory=1 << 20)
    expected = run_engine(boot(config).engine, submissions())
    engine = make_thread_engine(config.with_settings(kv_host_memory=8 << 20, **layout))
    print(engine.kv.num_blocks)
    for _ in range(2):
        assert run_engine(engine, submissions()) == expected
        engine.reset_kv()
    stats = engine.stats()
    engine.close()
    print(stats.tiers)
    assert stats.tiers["host"].loaded_blocks > 0
