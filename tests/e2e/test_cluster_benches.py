"""`emberline bench split` and `bench churn` run to their end on real processes, and say what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from routers import SRC, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", 1024)


def measure(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "emberline.cli", "bench", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    whole: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return whole


def test_split_bench_hands_over_long_prompts(model: Path, tmp_path: Path) -> None:
    arrivals = ("--seconds", "2", "--long-rate", "4", "--chat-rate", "4", "--long", "600", "--chat", "20,12")
    turns = ("--chunks", "64", "--rounds", "1", "--alone", "2", "--logs", str(tmp_path))
    told = measure("split", str(model), *arrivals, *turns)
    results = {name: result["value"] for name, result in told["results"].items()}
    assert told["config"]["requests_64"] == {"long": 8, "chat": 8} and results["errors_64"] == 0
    assert results["pulls_alone_64"] == 2 and results["pulls_mixed_64"] == 8  # each long one, no short one
    assert results["recomputed_alone_64"] == results["recomputed_mixed_64"] == 0
    assert 0 < results["copying_hidden_alone_64"] < 100  # chunk after chunk, but not the last
    for name in ("itl_p99_64", "ttft_long_p90_64", "ttft_chat_p50_64", "output_64"):
        assert results[name] > 0 and results[f"{name}/colocated"] == told["results"][name]["peer"] > 0


def test_churn_bench_reports_no_errors(model: Path, tmp_path: Path) -> None:
    """With a load that one of the two can bear alone, however long the other takes to come back."""
    plan = ("--minutes", "0.12", "--calibration", "1", "--pause", "0.5", "1", "--cases", "4", "--kv-memory", "4M")
    told = measure("churn", str(model), *plan, "--load", "0.4", "--decode", "2", "--logs", str(tmp_path))
    results = {name: result["value"] for name, result in told["results"].items()}
    assert results["restarts"] == len(told["config"]["restarts"]) >= 1
    assert results["requests"] == results["answered"] > 10
    assert results["sustained"] > results["arrived"] > 0
    assert all(results[bad] == 0 for bad in ("wrong", "hung", "unrecovered", "leaked"))
    spared = {"router", "decode-1", "decode-1_engine.process"}
    assert {f"{name}_rss" for name in spared} <= set(results)
    assert "decode-1" not in {restart["worker"] for restart in told["config"]["restarts"]}
