"""Speculative decoding on a GPU: in float32, drafts never change the tokens, with captured and uncaptured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bytelevel import VOCAB_SIZE
from draft_oracle import DraftOracle
from engine_runs import run_engine
from mixed_sampling import make_engine, make_submissions, write_checkpoint

from emberline.engine.speculation.drafter import Drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUNNING = 32


def test_drafts_never_change_the_tokens(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    plain = make_engine(checkpoint, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    alone: dict[str, list[int]] = {}
    for submission in make_submissions(3):
        alone |= run_engine(plain, [submission])
    expected = {(name, 0): tokens for name, tokens in alone.items()}
    for settings in ({}, {"graphs": False}, {"overlap": False}, {"kv_tokens": 512, "block_size": 16}):
        for right in ((True,), (True, True, False), (False,)):
            engine = make_engine(checkpoint, max_running=RUNNING, speculate="ngram", max_draft=4, **settings)
            drafter = Drafter([DraftOracle(expected, right, VOCAB_SIZE)], 4, max_rows=RUNNING, adaptive=False)
            engine.scheduler.drafter = drafter
            assert run_engine(engine, make_submissions(3), steps_between=1) == alone, (settings, right)
            assert drafter.drafted_tokens > 0
            assert drafter.accepted_tokens > 100 or not any(right)
