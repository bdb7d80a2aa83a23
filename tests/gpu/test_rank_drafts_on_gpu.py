"""Draft models of engines on two ranks that share one GPU: the tokens of one rank without drafts, and accepted drafts.

The leader drafts, and sends its drafts to the other rank on the GPU. As in test_rank_engine_on_gpu.py, weights are
float32, and NCCL cannot be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bytelevel import EOS, tokenizer_file
from eagle3_head import write_eagle3_head
from engine_runs import run_engine
from mixed_sampling import make_submissions, write_checkpoint
from test_mtp_on_gpu import write_model
from test_rank_engine_on_gpu import SETTINGS, boot_ranks

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.speculation.drafter import Drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = tiny.config("llama", **tiny.GPU_SIZES, eos_token_id=EOS)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def write_drafts(directory: Path, kind: str) -> tuple[Path, str]:
    """Write a model and what drafts for it; return the model's directory and the setting `speculate`."""
    target = directory / "model"
    if kind.startswith("mtp"):
        return write_model(target, kind.removeprefix("mtp "), reads="hidden state"), "mtp"
    write_checkpoint(target)
    if kind == "same model":
        return target, f"draft:{target}"
    if kind == "smaller model":
        smaller = tiny.write(
            directory / "smaller", {**CONFIG, "num_hidden_layers": 1, "num_attention_heads": 4}, seed=5
        )
        tokenizer_file(smaller)
        return target, f"draft:{smaller}"
    return target, f"eagle3:{write_eagle3_head(directory / 'head', CONFIG, draft_vocab=640)}"


def draft_always(engine: Engine) -> Drafter:
    """Let the engine verify all drafts: otherwise their number depends on times."""
    drafter = engine.scheduler.drafter
    assert drafter is not None
    drafter._adaptive = False
    return drafter


@pytest.mark.parametrize("collectives", ["ipc", "gloo"])
@pytest.mark.parametrize("kind", ["same model", "smaller model", "eagle3", "mtp glm", "mtp deepseek"])
def test_drafts_never_change_the_tokens(kind: str, collectives: str, tmp_path: Path) -> None:
    """Greedy and drawn, with penalties, biases, grammars and log-probabilities; then with cached prefixes."""
    directory, speculate = write_drafts(tmp_path, kind)
    pending = make_submissions(1)
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, pending)
    loaded = boot_ranks(directory, tp=2, collectives=collectives, speculate=speculate, max_draft=4)
    engine, runner = loaded.engine, loaded.engine.runner
    assert isinstance(runner, DeviceLeaderRunner) and runner._drafting is not None
    drafter = draft_always(engine)
    try:
        assert run_engine(engine, pending, steps_between=1) == expected
        assert run_engine(engine, pending) == expected
        assert not runner._graphs.capture_failed
        assert bool(runner._graphs.captured) == bool(runner._drafting._replays) == (collectives != "gloo")
    finally:
        engine.close()
    assert drafter.drafted_tokens > 100
    assert drafter.accepted_tokens >= 50 or kind in ("smaller model", "eagle3")


@pytest.mark.parametrize("kind", ["same model", "mtp glm", "mtp deepseek"])
def test_drafts_that_must_be_right(kind: str, tmp_path: Path) -> None:
    """Greedy requests, with chunks of prompts beside decoded tokens; several are preempted with few blocks."""
    directory, speculate = write_drafts(tmp_path, kind)
    pending = [Submission(f"r{i}", list(range(3, 20 + 30 * i)), GREEDY) for i in range(6)]
    expected = run_engine(boot(EngineConfig.build(str(directory), **SETTINGS)).engine, pending)
    for kv_tokens in (4096, 256):
        engine = boot_ranks(directory, tp=2, speculate=speculate, max_draft=4, kv_tokens=kv_tokens).engine
        drafter = draft_always(engine)
        while engine.prepare_next():
            pass
        try:
            assert run_engine(engine, pending, steps_between=1) == expected
        finally:
            engine.close()
        assert drafter.accepted_tokens >= 0.95 * drafter.drafted_tokens > 100
        assert bool(engine.scheduler.preemptions) == (kv_tokens == 256)


def test_the_bfloat16_head_of_ranks_drafts_as_that_of_one(tmp_path: Path) -> None:
    """Rounding differs between the layouts, so compare how often the head is right. Weights are packed on all ranks."""
    directory, speculate = write_drafts(tmp_path, "eagle3")
    settings: dict[str, Any] = {"dtype": "bfloat16", "weights": "packed", "speculate": speculate, "max_draft": 3}
    pending = [Submission(f"r{i}", list(range(3 + i, 40 + i)), replace(GREEDY, max_tokens=100)) for i in range(8)]
    rates = []
    for layout in ({}, {"tp": 2}):
        engine = boot_ranks(directory, **settings, **layout).engine
        drafter = draft_always(engine)
        run_engine(engine, pending)
        engine.close()
        rates.append(drafter.accepted_tokens / drafter.drafted_tokens)
    assert abs(rates[0] - rates[1]) < 0.1, rates
