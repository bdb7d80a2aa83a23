"""Engines of the GPU runner whose ranks attend to different requests sample the same tokens as one rank.

Here the ranks are threads, and the CPU is their device; see also tests/gpu/test_rank_engine_on_gpu.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_device_rank_engine import build_config, run_on_one_rank, run_on_ranks, submissions

DP2: dict[str, Any] = {"tp": 2, "dp_attention": True}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "cohere2", "deepseek_v3"])
def test_same_tokens_as_one_rank(name: str, graphs: bool, tmp_path: Path) -> None:
    """Also with windows, latents and experts, in chunks, with hits of the prefix cache and captured steps."""
    config = build_config(tmp_path, name, graphs=graphs)
    assert run_on_ranks(config, submissions(), **DP2) == run_on_one_rank(config, submissions())
