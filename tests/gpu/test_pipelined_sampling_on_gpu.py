"""Penalties and grammars in pipelined steps on a GPU give the same tokens as one request and one step at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import run_engine
from mixed_sampling import make_engine, make_submissions, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_pipelined_steps_give_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    plain = make_engine(checkpoint, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    alone: dict[str, list[int]] = {}
    for submission in make_submissions(5):
        alone |= run_engine(plain, [submission])
    for settings in ({}, {"graphs": False}, {"overlap": False}, {"kv_tokens": 512, "block_size": 16}):
        engine = make_engine(checkpoint, **settings)
        assert run_engine(engine, make_submissions(5), steps_between=1) == alone, settings
        assert bool(engine.scheduler.preemptions) == ("kv_tokens" in settings)
