"""Engines reuse each other's prefixes through a real store, and continue if the store hangs or dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from rank_engines import make_thread_engine

from emberline.bench.mooncake_master import MooncakeMaster
from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine

Answer = tuple[list[int], list[float], int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIGS["llama"])


def settings(model: Path, master: MooncakeMaster | None, codec: str = "auto") -> EngineConfig:
    store = master.address if master is not None else None
    return EngineConfig.build(
        str(model), device="cpu", dtype="bfloat16", block_size=8, max_context=64, kv_memory=1 << 18,
        kv_store=store, kv_store_memory=64 << 20, kv_codec=codec,
    )  # fmt: skip


def engine(model: Path, master: MooncakeMaster | None, codec: str = "auto") -> Engine:
    return boot(settings(model, master, codec)).engine


def complete(engine: Engine, seed: int, salt: str = "") -> Answer:
    """Return the tokens, their log-probabilities, and the number of cached prompt tokens."""
    prompt = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    engine.add(Submission("r", prompt, params, salt=salt))
    tokens, logprobs, cached = [], [], 0
    while not engine.idle:
        for output in engine.step():
            tokens += output.tokens
            logprobs += [each.logprob for each in output.logprobs]
            cached += output.cached_tokens
        engine.kv.check_invariants()
    if engine.kv.tiers is not None:
        assert engine.kv.tiers.wait_until_written(20.0)
    return tokens, logprobs, cached


@pytest.mark.parametrize("codec", ["uw", "none"])
def test_prefix_is_reused_by_another_engine(model: Path, master: MooncakeMaster, codec: str) -> None:
    one, two, alone = engine(model, master, codec), engine(model, master), engine(model, None)
    expected = complete(alone, 1)
    assert complete(one, 1) == expected and expected[2] == 0
    assert complete(two, 1, salt="another tenant")[2] == 0
    assert complete(two, 1) == (*expected[:2], 40)
    assert two.stats().tiers["store"].hit_tokens == 40
    one.close()
    two.close()


def test_stages_reuse_a_prefix_of_one_rank(model: Path, master: MooncakeMaster) -> None:
    one = engine(model, master)
    expected = complete(one, 1)
    two = make_thread_engine(settings(model, master).with_settings(pp=2, threads=1))
    assert complete(two, 1) == (*expected[:2], 40)
    assert two.stats().tiers["store"].hit_tokens == 40
    one.close()
    two.close()


def test_requests_continue_without_the_store(model: Path, master: MooncakeMaster) -> None:
    one, alone = engine(model, master), engine(model, None)
    complete(one, 1)
    master.freeze()
    assert complete(one, 2) == complete(alone, 2)  # only one request waits for the store
    assert not one.stats().tiers["store"].on and complete(one, 3) == complete(alone, 3)
    master.kill()
    assert complete(one, 4) == complete(alone, 4)
    one.close()
