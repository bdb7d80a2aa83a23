"""family_report: the file has every measured distance, and keeps those of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_report import FamilyReport


def make_row(name: str, distance: float) -> dict[str, Any]:
    parts = {"ours": {"largest": distance, "mean": distance / 10}, "limits": {"mean": 9.0}, "peer": {"largest": 2.0}}
    return {"name": name, "kernels": "hopper", **parts}


def make_report(outcome: Any, when: Any = "call", **distances: float) -> pytest.TestReport:
    rows = [("family", make_row(name, value)) for name, value in distances.items()]
    return pytest.TestReport("id", ("file", 1, "test"), {}, outcome, None, when, user_properties=[*rows, ("other", 1)])


def test_results_are_replaced_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "families.json"
    first = FamilyReport(file, "old")
    first.pytest_runtest_logreport(make_report("passed", prefill=0.12345, decode=0.5))
    second = FamilyReport(file, "new")
    second.pytest_runtest_logreport(make_report("failed", decode=7.0))
    second.pytest_runtest_logreport(make_report("passed", "teardown", decode=8.0))
    second.pytest_runtest_logreport(make_report("passed"))
    whole = json.loads(file.read_text())
    assert whole["commit"] == "new" and set(whole["software"]) == {"transformers", "torch", "triton"}
    kept, replaced = whole["results"]["prefill"], whole["results"]["decode"]
    numbers = {"value": 0.123, "mean": 0.0123, "mean_limit": 9, "peer": 2}
    assert kept == {**numbers, "unit": "nat", "kernels": "hopper", "passed": True, "commit": "old"}
    assert (replaced["value"], replaced["passed"], replaced["commit"]) == (7, False, "new")
