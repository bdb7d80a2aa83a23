"""KV tiers of a model whose ranks are processes, beside a model on one rank; and what a killed rank leaves behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE
from engine_runs import run_engine, run_group
from held_group_memory import find_group_memory, wait_until_group_memory_is_freed
from rank_engines import make_thread_engine

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine_group_boot import boot_engine_group
from emberline.engine.ranks.group import RankGroup

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "block_size": 8, "max_batch_tokens": 32, "max_running": 2, "kv_codec": "none",
}  # fmt: skip


def submissions(model: str, max_tokens: int = 4) -> list[Submission]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[3 + (7 * i + 5 * j + i * j) % 90 for j in range(41)] for i in range(4)]
    return [Submission(f"{model}{i}", prompt, sampling, model=model) for i, prompt in enumerate(prompts)]


def test_tiers_of_processes(tmp_path: Path) -> None:
    """Blocks come back from host memory, and from disk after a restart."""
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, num_attention_heads=8)
    directory = tiny.write(tmp_path / "model", config)
    held = len(find_group_memory())  # by earlier tests
    ranks = {"tp": 2, "kv_memory": 10 << 10, "kv_disk": str(tmp_path / "disk"), "kv_disk_size": 1 << 24}
    configs = {
        "divided": EngineConfig.build(str(directory), **SETTINGS, **ranks),
        "whole": EngineConfig.build(str(directory), **SETTINGS, kv_memory=1 << 20),
    }
    group, _ = boot_engine_group(configs, TimeSharingConfig())
    expected = run_group(group, submissions("whole"))
    for _ in range(2):
        found = run_group(group, submissions("divided"))
        assert list(found.values()) == list(expected.values())
    engine = group.engines["divided"]
    assert engine.stats().tiers["host"].loaded_blocks > 0
    processes = getattr(engine.runner, "ranks", None)
    assert isinstance(processes, RankGroup) and len(find_group_memory()) > held
    assert engine.kv.tiers is not None and engine.kv.tiers.wait_until_written(10.0)
    for submission in submissions("divided", max_tokens=20):
        group.add(submission)
    group.step()
    (pid,) = processes.pids.values()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 .* was killed by signal 9"):
        while True:
            group.step()
    for each in group.engines.values():
        each.close()
    del engine, each, processes, group
    wait_until_group_memory_is_freed(held)
    assert not Path(f"/proc/{pid}").exists()
    restarted = make_thread_engine(configs["divided"])
    assert list(run_engine(restarted, submissions("divided")).values()) == list(expected.values())
    assert restarted.stats().tiers["disk"].loaded_blocks > 0
    restarted.close()
