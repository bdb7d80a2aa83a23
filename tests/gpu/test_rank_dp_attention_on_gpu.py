"""Engines whose ranks attend to requests of their own, and share one GPU: the same tokens as one rank.

Sums are computed in float32, so rounding is smaller than the differences between logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import family_cases
import pytest
import tiny
import tiny_deepseek
import tiny_delta
import torch
from engine_runs import run_engine
from gpu_settings import short_starts
from mixed_sampling import make_submissions, write_checkpoint
from test_rank_engine_on_gpu import MLA, SETTINGS, boot_ranks, check_same_tokens, make_plain_submissions

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.kv.rank_managers import RankKVManagers

__all__ = ["short_starts"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DP2: dict[str, Any] = {"tp": 2, "dp_attention": True}


@pytest.mark.parametrize("collectives", ["ipc", "gloo"])
def test_sampling_of_all_kinds(collectives: str, tmp_path: Path) -> None:
    """Greedy and drawn, with penalties, biases, grammars and log-probabilities."""
    check_same_tokens(write_checkpoint(tmp_path), make_submissions(1), **DP2, collectives=collectives)


@pytest.mark.parametrize("layout", [DP2, DP2 | {"ep": 2}, DP2 | {"tp": 4, "ep": 2}], ids=["tp2", "ep2", "tp4-ep2"])
def test_latents_and_experts(layout: dict[str, Any], tmp_path: Path) -> None:
    tiny_deepseek.write_deepseek(tmp_path, "v3", dtype=torch.float32, **MLA)
    check_same_tokens(tmp_path, make_plain_submissions(), **layout)


def test_windows(tmp_path: Path) -> None:
    family, config = family_cases.WIDE_CONFIGS["gemma3-256"]
    tiny.write_tensors(tmp_path, config, family.tensors(config, dtype=torch.float32))
    check_same_tokens(tmp_path, make_plain_submissions(), **DP2)


def test_recurrent_states(tmp_path: Path) -> None:
    check_same_tokens(write_recurrent(tmp_path), make_plain_submissions(), **DP2)


def write_recurrent(directory: Path) -> Path:
    config = tiny_delta.make_config("dense") | {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 256}
    config |= {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "vocab_size": 1000}
    config |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 1024}
    return tiny_delta.write_random(directory, config)


@pytest.mark.parametrize("kind", ["heads", "latents", "states"])
def test_tiers(kind: str, tmp_path: Path) -> None:
    """All ranks use the blocks that one has saved: requests run again on other ranks, with empty caches. After a
    restart, blocks come from the disk."""
    directory = tmp_path / "model"
    directory.mkdir()
    if kind == "heads":
        write_checkpoint(directory)
    elif kind == "latents":
        tiny_deepseek.write_deepseek(directory, "v3", dtype=torch.float32, **MLA)
    else:
        write_recurrent(directory)
    pending = make_plain_submissions()
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, pending)
    tiers = {"kv_host_memory": 1 << 28, "kv_disk": str(tmp_path / "disk"), "kv_disk_size": 1 << 28}
    for is_restart in (False, True):
        engine = boot_ranks(directory, **DP2, **tiers).engine
        for order in (pending, [*pending[1:], pending[0]]):
            assert run_engine(engine, order) == expected
            assert engine.kv.tiers is not None and engine.kv.tiers.wait_until_written(10.0)
            engine.reset_kv()
        stats = engine.stats().tiers
        engine.close()
        assert stats["host"].hit_tokens > 0 and bool(stats["disk"].loaded_blocks) == is_restart


def test_drafts(tmp_path: Path) -> None:
    """Requests with a draft are on one rank only, and all ranks run the step with rows of several tokens."""
    directory = write_checkpoint(tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    pending = [Submission(f"r{i}", [7 + i, 8, 9, 10], params) for i in range(3)]
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, pending)
    guess = tuple(token if i % 7 != 6 else 3 for i, token in enumerate(expected["r0"]))
    engine = boot_ranks(directory, **DP2, speculate="ngram").engine
    assert run_engine(engine, [replace(pending[0], prediction=guess), *pending[1:]]) == expected
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.accepted_tokens > 0
    engine.close()


def test_preemption(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, make_submissions(2))
    engine = boot_ranks(directory, **DP2, kv_tokens=160).engine
    assert run_engine(engine, make_submissions(2)) == expected
    assert engine.scheduler.preemptions, "the caches were meant to be too small"
    engine.close()


def test_all_shapes_can_be_captured(tmp_path: Path) -> None:
    """Packed weights are unpacked for large products, of which attention has fewer rows than other layers."""
    directory, settings = (
        write_checkpoint(tmp_path),
        {"dtype": "bfloat16", "weights": "packed", "max_batch_tokens": 512},
    )
    prompt = [3 + i % 900 for i in range(450)]
    expected = score_prompt(boot(EngineConfig.build(str(directory), **SETTINGS | settings)).engine, prompt)
    loaded = boot_ranks(directory, **DP2, **settings)
    engine, runner = loaded.engine, loaded.engine.runner
    assert isinstance(runner, DeviceLeaderRunner) and isinstance(engine.kv, RankKVManagers)
    assert engine.kv.num_blocks == 2 * runner.num_blocks and loaded.kv_tokens == 2 * 4096
    while engine.prepare_next():
        pass
    differences = [abs(a - b) for a, b in zip(score_prompt(engine, prompt), expected, strict=True)]
    assert sum(differences) / len(differences) < 0.05
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = run_engine(engine, [Submission(f"r{i}", prompt[:n], params) for i, n in enumerate((3, 449, 120, 7))])
    assert all(len(tokens) == 12 for tokens in found.values())
    assert not runner._graphs.capture_failed and set(runner.shapes) <= set(runner._graphs.captured)
    engine.close()


def score_prompt(engine: Engine, prompt: list[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens after the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add(Submission("scored", prompt, params))
    found: list[float] = []
    while not engine.idle:
        found += [token.logprob for output in engine.step() for token in output.prompt_logprobs or ()]
    assert len(found) == len(prompt) - 1
    return found
