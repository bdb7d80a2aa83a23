"""The churn bench attributes each client error to a restart, or reports it as unexplained."""

from __future__ import annotations

import random
from typing import Any

from emberline.bench.report import BenchReport
from emberline.chaos.churn import ChurnPlan, ChurnRun, WorkerRestart, add_results
from emberline.chaos.client import RequestOutcome, Verdict

PLAN = ChurnPlan(100.0, 0.8, 1.0, (1.0, 2.0), 4, 1, 2, 60.0, "1M", 0)


def report_values(*endings: RequestOutcome, held: str = "", missing: str = "") -> dict[str, Any]:
    nothing: Any = None
    churn = ChurnRun(
        PLAN, nothing, nothing, nothing, print, random.Random(0), outcomes=list(endings), recovery_problem=missing
    )
    churn.restarts = [WorkerRestart(10.0, "decode-2", "death", 20.0), WorkerRestart(50.0, "prefill-1", "end", None)]
    report = BenchReport("churn")
    moves = [{"reason": "lost", "outcome": "went on", "count": 3}, {"reason": "lost", "outcome": "failed", "count": 1}]
    add_results(report, churn, held, {"migrations": moves, "retries": {"unreached": 2}})
    assert report.results["requests"].value == len(endings) and report.results["restarts"].value == 2
    assert report.results["moved"].value == 3 and report.results["tried_again"].value == 2
    return {name: result.value for name, result in report.results.items()} | {"said": report.config["errors"]}


def test_errors_are_attributed_to_restarts() -> None:
    results = report_values(
        RequestOutcome(Verdict.ANSWERED, "", 1.0, 1.0),
        RequestOutcome(Verdict.ERROR, "late", 1.0, 8.9),  # it ended before anything happened
        RequestOutcome(Verdict.ERROR, "lost", 1.0, 9.1),
        RequestOutcome(Verdict.CUT, "cut", 19.9, 1.0),
        RequestOutcome(Verdict.ERROR, "odd", 20.1, 1.0),  # all were back
        RequestOutcome(Verdict.ERROR, "full", 70.0, 1.0),  # somebody was not back yet
    )
    assert results["errors_during_a_restart"] == 3 and results["errors_unexplained"] == 2
    assert results["said"][:2] == ["late, no restart", "lost, death of decode-2 at 10 s"]
    assert results["answered"] == 1 and not results["wrong"] + results["hung"] + results["leaked"]


def test_errors_without_restart_are_unexplained() -> None:
    wrong = report_values(
        RequestOutcome(Verdict.WRONG, "said x", 12.0, 1.0), held="decode-1: blocks 3", missing="decode-2 is lost"
    )
    assert (wrong["wrong"], wrong["leaked"], wrong["unrecovered"]) == (1, 1, 1)
    assert report_values(RequestOutcome(Verdict.HUNG, "", 12.0, 75.0))["hung"] == 1
