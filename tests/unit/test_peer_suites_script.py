"""scripts/peer_suites: the summary of recorded outcomes, and the choice of a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts/peer_suites"


def run_script(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_summary_of_two_runs(tmp_path: Path) -> None:
    for folder, outcome in (("before", "failed"), ("after", "passed")):
        (tmp_path / folder).mkdir()
        outcomes = {
            "tests/a.py::test_one[x]": {"outcome": outcome, "reason": ""},
            "tests/a.py::test_two": {"outcome": "failed", "reason": "assert 1 == 2"},
            "tests/a.py::test_own": {"outcome": "set aside", "reason": "needs the peer's own: calls vllm.LLM"},
        }
        for suite in ("vllm", "sglang", "llama"):
            (tmp_path / folder / f"{suite}.json").write_text(json.dumps(outcomes))
    written = tmp_path / "summary.json"
    folders = ("--before", tmp_path / "before", "--after", tmp_path / "after")
    done = run_script("summary.py", *folders, "--before-commit", "old", "--json", written, "--peer", "vllm=abc")
    assert done.returncode == 0, done.stderr
    assert "'before': {'passed': 0, 'failed': 2}, 'after': {'passed': 1, 'failed': 1}" in done.stdout
    report = json.loads(written.read_text())
    assert report["commit_before"] == "old" and report["peers"] == {"vllm": "abc"} and report["hardware"]["cores"]
    found = report["results"]["llama"]
    assert list(found["failing_after"]) == ["tests/a.py::test_two"]
    assert list(found["set_aside_by_reason"]) == ["calls into the peer's own Python modules"]


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    arguments = ("vllm", "--source", tmp_path, "--tree", tmp_path, "--python", sys.executable)
    done = run_script("run.py", *arguments, "--out", tmp_path / "out.json", HOME=str(tmp_path))
    assert done.returncode == 1 and "emberline pull smollm2" in done.stderr
