"""What clients were told is laid beside the restarts of workers: an error is explained by one, or by none."""

from __future__ import annotations

import random
from typing import Any

from emberline.bench.report import Report
from emberline.chaos.churn import Churn, Plan, Restart, tell
from emberline.chaos.client import Ending, Verdict

PLAN = Plan(100.0, 0.8, 1.0, (1.0, 2.0), 4, 1, 2, 60.0, "1M", 0)


def told(*endings: Ending, held: str = "", missing: str = "") -> dict[str, Any]:
    nothing: Any = None
    churn = Churn(PLAN, nothing, nothing, nothing, print, random.Random(0), endings=list(endings), unrecovered=missing)
    churn.restarts = [Restart(10.0, "decode-2", "death", 20.0), Restart(50.0, "prefill-1", "end", None)]
    report = Report("churn")
    moves = [{"reason": "lost", "outcome": "went on", "count": 3}, {"reason": "lost", "outcome": "failed", "count": 1}]
    tell(report, churn, held, {"migrations": moves, "retries": {"unreached": 2}})
    assert report.results["requests"].value == len(endings) and report.results["restarts"].value == 2
    assert report.results["moved"].value == 3 and report.results["tried_again"].value == 2
    return {name: result.value for name, result in report.results.items()} | {"said": report.config["errors"]}


def test_errors_are_explained_or_not() -> None:
    results = told(
        Ending(Verdict.ANSWERED, "", 1.0, 1.0),
        Ending(Verdict.ERROR, "late", 1.0, 8.9),  # it ended before anything happened
        Ending(Verdict.ERROR, "lost", 1.0, 9.1),
        Ending(Verdict.CUT, "cut", 19.9, 1.0),
        Ending(Verdict.ERROR, "odd", 20.1, 1.0),  # all were back
        Ending(Verdict.ERROR, "full", 70.0, 1.0),  # somebody was not back yet
    )
    assert results["errors_during_a_restart"] == 3 and results["errors_unexplained"] == 2
    assert results["said"][:2] == ["late, no restart", "lost, death of decode-2 at 10 s"]
    assert results["answered"] == 1 and not results["wrong"] + results["hung"] + results["leaked"]


def test_what_nothing_explains() -> None:
    wrong = told(Ending(Verdict.WRONG, "said x", 12.0, 1.0), held="decode-1: blocks 3", missing="decode-2 is lost")
    assert (wrong["wrong"], wrong["leaked"], wrong["unrecovered"]) == (1, 1, 1)
    assert told(Ending(Verdict.HUNG, "", 12.0, 75.0))["hung"] == 1
