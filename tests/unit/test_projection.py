"""Projections of steps on several GPUs from the results of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.projection import add_projections, collectives_us
from emberline.bench.report import BenchReport
from emberline.core.errors import InvalidRequest
from emberline.planner.collective_times import all_reduce_us

CALLS = [{"name": "all_reduce", "elements": 4096, "count": 10}, {"name": "all_gather", "elements": 4096, "count": 1}]


def write_results(directory: Path, **changes: Any) -> Path:
    config = {"config": "kimi-k2.5.json", "ranks": 8, "settings": {"weights": "auto"}, "collectives": {"1": CALLS}}
    results = {"decode_b1_ms": {"value": 3.0, "unit": "ms", "limit": 2.0}}
    file = directory / "rank.json"
    file.write_text(json.dumps({"bench": "rank", "config": config | changes, "results": results}))
    return file


def test_times_between_published_sizes() -> None:
    assert all_reduce_us(1, 2) == all_reduce_us(4096, 2) == 4.6
    assert all_reduce_us((4096 + 32768) // 2, 8) == pytest.approx((5.1 + 6.6) / 2)
    assert all_reduce_us(1048576, 4) == 17.8
    assert all_reduce_us(2 * 1048576 - 262144, 4) == pytest.approx(2 * 17.8 - 10.5)


def test_projection_adds_collectives(tmp_path: Path) -> None:
    report = BenchReport("parallel")
    add_projections(report, [write_results(tmp_path)])
    whole = report.results["projected_kimi-k2.5_tp8_b1_ms"]
    assert collectives_us(CALLS, 8) == pytest.approx(10 * 5.1 + 6.6)  # 8 parts of 4,096 numbers are gathered
    assert whole.value == pytest.approx(3.0 + (10 * 5.1 + 6.6) / 1e3)
    assert (whole.limit, whole.peer) == (2.0, 9.22)


def test_results_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="among 3 GPUs"):
        add_projections(BenchReport("parallel"), [write_results(tmp_path, ranks=3)])
    other = tmp_path / "other.json"
    other.write_text('{"bench": "parallel"}')
    with pytest.raises(InvalidRequest, match=r"'parallel', not of emberline\.bench\.gpu\.rank"):
        add_projections(BenchReport("parallel"), [other])
