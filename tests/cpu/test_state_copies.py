"""Recurrent layers: the same tokens after their states were in tiers, or came from another engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_delta

from emberline.bench.mooncake_master import MooncakeMaster
from emberline.core.engine_config import EngineConfig, TransferConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.kv.state_manager import StateKVManager
from emberline.tokens.blockhash import state_page_hash

BLOCK = 8
PROMPT = [(31 * i) % 83 + 3 for i in range(75)]  # 9 blocks and 3 tokens
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_delta.write(directory, "next")
    return directory


def start_engine(checkpoint: Path, name: str | None = None, **others: Any) -> Engine:
    settings = {"max_batch_tokens": 32, "max_running": 8, "kv_memory": 1 << 19, "block_size": BLOCK, **others}
    transfer = TransferConfig(name) if name else None
    engine = boot(EngineConfig.build(str(checkpoint), device="cpu", threads=1, transfer=transfer, **settings)).engine
    assert isinstance(engine.kv, StateKVManager)
    return engine


def manager_of(e: Engine) -> StateKVManager:
    assert isinstance(e.kv, StateKVManager)
    return e.kv


def num_pages(e: Engine) -> int:
    return manager_of(e)._pages.per_slot


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = field(default=0, compare=False)


def run(e: Engine, *submissions: Submission, background: Engine | None = None) -> dict[str, Reply]:
    for submission in submissions:
        e.add(submission)
    replies, ends = {submission.id: Reply() for submission in submissions}, time.monotonic() + 30
    while not e.idle:
        assert time.monotonic() < ends
        for output in e.step():
            assert output.error is None, output.error
            reply = replies.setdefault(output.id, Reply())
            reply.tokens += output.tokens
            reply.logprobs += [each.logprob for each in output.logprobs]
            reply.cached += output.cached_tokens
        e.kv.check_invariants()
        if background is not None:
            background.step()
    if e.kv.tiers is not None:
        assert e.kv.tiers.wait_until_written(20.0)
    return replies


def ask(prompt: list[int] = PROMPT, name: str = "r", **params: Any) -> Submission:
    wishes = {"max_tokens": 30, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **params}
    return Submission(name, prompt, SamplingParams(**wishes), timeout=60.0)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Reply:
    """Return the output of an engine that copies nothing."""
    return run(start_engine(checkpoint, prefix_cache=False), ask())["r"]


def evict_all(e: Engine) -> None:
    """Fill the slots with snapshots of other prompts."""
    for seed in range(1, 1 + manager_of(e).states.total):
        run(e, ask([(seed + 7 * i) % 83 + 3 for i in range(72)], f"other-{seed}", max_tokens=1))


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_states_load_from_host_memory(checkpoint: Path, expected: Reply) -> None:
    e = start_engine(checkpoint, kv_host_memory=8 << 20, kv_memory=1 << 17, max_running=2)
    assert run(e, ask())["r"] == expected
    evict_all(e)
    before = e.stats().tiers["host"]
    again = run(e, ask())["r"]
    after = e.stats().tiers["host"]
    assert again == expected and again.cached == 72
    assert after.loaded_blocks - before.loaded_blocks >= num_pages(e) > 1
    longer = run(e, ask([*PROMPT, *expected.tokens[:25]], max_tokens=5))["r"]
    assert longer == Reply(expected.tokens[25:], expected.logprobs[25:])
    e.close()
