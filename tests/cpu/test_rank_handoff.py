"""KV blocks move between engines whose ranks divide the model differently. Here the ranks are threads."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_engines import make_thread_engine
from rank_models import WRITERS

from emberline.core.engine_config import EngineConfig, TransferConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine

BLOCK = 8
PROMPT = [(31 * i) % 83 + 3 for i in range(45)]  # 5 blocks and 5 tokens


def start_engine(directory: Path, name: str | None = None, **settings: Any) -> Engine:
    config = EngineConfig.build(
        str(directory),
        **{
            "device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 1 << 20, "block_size": BLOCK,
            "max_context": 64, "max_batch_tokens": 16, "max_running": 3,
            "transfer": TransferConfig(name) if name else None,
        }
        | settings,
    )  # fmt: skip
    return make_thread_engine(config) if config.parallel.num_ranks > 1 else boot(config).engine


def ask(**params: Any) -> Submission:
    return Submission(
        "r",
        PROMPT,
        SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params}),
        timeout=60.0,
    )


def run(engine: Engine, *submissions: Submission, background: Engine | None = None) -> list[int]:
    for submission in submissions:
        engine.add(submission)
    tokens, ends = [], time.monotonic() + 30
    while not engine.idle:
        assert time.monotonic() < ends
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.tokens
        if background is not None:
            background.step()
    engine.kv.check_invariants()
    return tokens


def first_ticket(engine: Engine, submission: Submission) -> dict[str, Any]:
    """Return the first ticket, while the prompt is still being computed."""
    engine.add(replace(submission, publish=True))
    while not (outputs := engine.step()):
        pass
    assert outputs[0].ticket is not None and outputs[0].finish is None
    return outputs[0].ticket


LAYOUTS = [
    ({"tp": 2}, {}),
    ({"tp": 2}, {"tp": 4}),
    ({"tp": 2}, {"pp": 2}),
    ({}, {"tp": 2, "pp": 2}),
    ({"pp": 2}, {"tp": 2}),
]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize(("sender", "receiver"), LAYOUTS)
def test_handoff_between_layouts(name: str, sender: dict[str, int], receiver: dict[str, int], tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    expected = run(start_engine(tmp_path), ask())
    p, d = start_engine(tmp_path, "p", **sender), start_engine(tmp_path, "d", **receiver)
    try:
        assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected
        stats = d.stats()
        assert stats.transfer is not None and stats.transfer.pull_failures == {}
        assert stats.transfer.hit_tokens == 40 and stats.prompt_tokens == 5
        run(p)
    finally:
        p.close()
        d.close()
