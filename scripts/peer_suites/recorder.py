"""pytest plugin: writes one JSON line per test, with its outcome and why it failed or was set aside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aside import reason_to_set_aside
from serving import NotComparable

MAX_REASON_CHARS = 400
_results: dict[str, dict[str, str]] = {}


def pytest_itemcollected(item: pytest.Item) -> None:
    reason = reason_to_set_aside(os.environ["PEER_SUITE"], item.nodeid)
    if reason is not None:
        _results[item.nodeid] = {"outcome": "set aside", "reason": reason}
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    known = _results.get(item.nodeid)
    if known is not None and known["outcome"] in ("set aside", "failed"):
        return report
    if call.excinfo is not None and call.excinfo.errisinstance(NotComparable):
        _results[item.nodeid] = {"outcome": "set aside", "reason": f"needs the peer's own: {call.excinfo.value}"}
    elif call.excinfo is not None and call.excinfo.typename == "FixtureLookupError":
        _results[item.nodeid] = {
            "outcome": "set aside",
            "reason": "needs the peer's own: a fixture of its whole test tree",
        }
    elif report.skipped:
        _results[item.nodeid] = {"outcome": "set aside", "reason": "skipped by the suite itself"}
    elif report.failed:
        why = str(call.excinfo.value) if call.excinfo else ""
        _results[item.nodeid] = {
            "outcome": "failed",
            "reason": f"{call.excinfo.typename if call.excinfo else ''}: {why}"[:MAX_REASON_CHARS],
        }
    elif call.when == "call":
        _results[item.nodeid] = {"outcome": "passed", "reason": ""}
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _results[report.nodeid] = {"outcome": "not collected", "reason": str(report.longrepr)[-MAX_REASON_CHARS:]}


def pytest_runtest_logfinish() -> None:
    Path(os.environ["PEER_RESULTS"]).write_text(json.dumps(_results, indent=1))
