"""Write benchmarks/results/peer-suites.json from the outcomes that run.py recorded for two trees.

    python scripts/peer_suites/summary.py --before DIR --after DIR --before-commit C --json FILE --peer vllm=COMMIT ...

DIR holds vllm.json, sglang.json and llama.json. A test is set aside for both trees or for neither.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
from aside import reason_to_set_aside
from run import TEST_TIMEOUT_S
from serving import MAX_CONTEXT

from emberline.bench.machine import describe_commit, describe_hardware

SUITES = ("vllm", "sglang", "llama")
Outcomes = dict[str, dict[str, str]]


def _counts(outcomes: Outcomes, aside: set[str]) -> dict[str, int]:
    kept = [each["outcome"] for name, each in outcomes.items() if name not in aside]
    return {"passed": kept.count("passed"), "failed": kept.count("failed")}


def _group(reason: str) -> str:
    """The reasons that name one module, model or endpoint each, as one group."""
    if not reason.startswith("needs the peer's own: "):
        return reason
    detail = reason.removeprefix("needs the peer's own: ")
    for known in ("calls", "start option", "another model", "llama.cpp's own endpoint"):
        if detail.startswith(known):
            return {"calls": "calls into the peer's own Python modules"}.get(known, known)
    return detail


def _plain(test: str) -> str:
    """A test's name without the parameters of one run of it."""
    return re.sub(r"\[.*", "", test)


def _aside(name: str, before: Outcomes, after: Outcomes) -> dict[str, str]:
    found = {}
    for outcomes in (before, after):
        for test, each in outcomes.items():
            if (reason := reason_to_set_aside(name, test)) is not None:
                found[test] = reason
            elif each["outcome"] == "set aside":
                found[test] = _group(each["reason"])
            elif each["outcome"] == "not collected":
                found[test] = "the file cannot be imported without the peer's own modules"
    return found


def suite(name: str, before: Outcomes, after: Outcomes) -> dict[str, Any]:
    aside = _aside(name, before, after)
    groups: dict[str, set[str]] = defaultdict(set)
    for test, reason in aside.items():
        groups[reason].add(_plain(test))
    sizes: dict[str, int] = defaultdict(int)
    for reason in aside.values():
        sizes[reason] += 1
    failing = {
        test: {"reason": each["reason"], "before": before.get(test, {}).get("outcome", "not run")}
        for test, each in after.items()
        if each["outcome"] == "failed" and test not in aside
    }
    return {
        "collected": len(after),
        "set_aside": len(aside),
        "before": _counts(before, set(aside)),
        "after": _counts(after, set(aside)),
        "failing_after": failing,
        "passing_before_alone": sorted(test for test in failing if failing[test]["before"] == "passed"),
        # Run in both trees, and set aside only when their outcomes were seen.
        "set_aside_after_the_run": {
            test: [tree.get(test, {}).get("outcome", "not run") for tree in (before, after)]
            for test in sorted(aside)
            if {"passed", "failed"} & {tree.get(test, {}).get("outcome") for tree in (before, after)}
        },
        "set_aside_by_reason": {
            reason: {"tests": sizes[reason], "names": sorted(groups[reason])} for reason in sorted(groups)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--before", "--after", "--json"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--before-commit", required=True)
    parser.add_argument("--commit", help="of the tree after, if it is not this checkout's")
    parser.add_argument("--note", default="", help="how the runs were made")
    parser.add_argument("--peer", action="append", default=[], metavar="SUITE=COMMIT")
    asked = parser.parse_args()
    results = {}
    for name in SUITES:
        trees = [json.loads((folder / f"{name}.json").read_text()) for folder in (asked.before, asked.after)]
        results[name] = suite(name, *trees)
    report = {
        "bench": "peer-suites",
        "command": "scripts/peer_suites/run.py for each suite and tree, then summary.py (docs/peer-suites.md)",
        "commit": describe_commit(asked.commit),
        "commit_before": asked.before_commit,
        "peers": dict(each.split("=", 1) for each in asked.peer),
        "hardware": describe_hardware(),
        "config": {
            "model": "smollm2",
            "max_context": MAX_CONTEXT,
            "test_timeout_s": TEST_TIMEOUT_S,
            "note": asked.note,
        },
        "results": results,
    }
    asked.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, each in results.items():
        print(name, {key: each[key] for key in ("collected", "set_aside", "before", "after")})


if __name__ == "__main__":
    main()
