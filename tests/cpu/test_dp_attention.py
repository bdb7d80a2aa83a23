"""Engines whose ranks attend to different requests sample the same tokens as on one rank. Ranks are threads here."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import run_engine
from test_rank_engine import build_config, run_threads, submissions

from emberline.engine.boot import boot
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

# All kinds of attention, of caches and of feed-forward networks that layers have.
FAMILIES = ["llama-biased", "gemma3", "cohere2", "deepseek_v3", "delta-moe", "gpt-oss", "qwen3-moe", "olmo2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_on_one_rank(name: str, tmp_path: Path) -> None:
    config = build_config(tmp_path, name)
    expected = run_engine(boot(config).engine, submissions())
    assert run_threads(config, submissions(), tp=2, dp_attention=True) == expected
    if ModelConfig.from_checkpoint(Checkpoint.open(tmp_path)).experts is not None:
        assert run_threads(config, submissions(), tp=2, ep=2, dp_attention=True) == expected
        assert run_threads(config, submissions(), tp=4, ep=2, dp_attention=True) == expected
