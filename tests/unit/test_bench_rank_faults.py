"""Results of several runs of `emberline bench rank-faults` in one file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from emberline.bench.rank_faults import (
    PROMPT_TOKENS,
    TINY,
    TINY_TOKENS,
    FaultCounts,
    RankFaultSettings,
    default_tokens,
    engine_settings,
    report_runs,
)
from emberline.cli.bench_parallel import read_earlier_runs
from emberline.core.errors import InvalidRequest


def test_runs_are_summed(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    args = argparse.Namespace(append=True, json=file)
    assert read_earlier_runs(args) == []
    first = {"tp": 3} | asdict(FaultCounts(faults=4, broken=9, wrong=1, recovery_s=[1.0, 2.0, 3.0]))
    report_runs([first]).print_and_save(file, "stated")
    second = {"tp": 1} | asdict(FaultCounts(faults=2, broken=5, leaked=2, recovery_s=[10.0]))
    report = report_runs([*read_earlier_runs(args), second])
    values = {name: result.value for name, result in report.results.items()}
    assert [values[name] for name in ("faults", "broken_streams", "wrong", "leaked", "hung")] == [6, 14, 1, 2, 0]
    assert values["recovery_p50_s"] == 2.5 and values["recovery_p90_s"] > 3.0
    assert json.loads(json.dumps(report.config))["runs"] == [first, second]


def test_append_needs_a_file() -> None:
    assert read_earlier_runs(argparse.Namespace(append=False, json=None)) == []
    with pytest.raises(InvalidRequest, match="--json"):
        read_earlier_runs(argparse.Namespace(append=True, json=None))


def test_streams_fit_into_the_context_of_a_gpu() -> None:
    assert default_tokens(TINY) == TINY_TOKENS > 512 > default_tokens("smollm2")
    for tokens in (32, TINY_TOKENS):
        settings = RankFaultSettings("any", device="cuda", tokens=tokens)
        config = engine_settings(settings)
        assert config["max_context"] >= PROMPT_TOKENS + tokens
        assert config["kv_tokens"] >= settings.streams * (PROMPT_TOKENS + tokens)
