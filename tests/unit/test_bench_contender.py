"""Contenders are other people's programs: whatever they do, the bench learns what it was and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from emberline.bench.contender import ContenderFailed, ContenderProcess, ContenderSpec
from emberline.bench.job import BenchJob

TESTS = Path(__file__).parents[1]
JOB = BenchJob([[1, 2, 3], [4]], [2, 5])


def start(tmp_path: Path, way: str | None = None) -> ContenderProcess:
    spec = ContenderSpec("fake", Path(sys.executable), "fake_contender", {"way": way}, {"PYTHONPATH": str(TESTS)})
    return ContenderProcess(spec, tmp_path / "log")


def test_a_job_gives_a_timeline_and_differences_of_counters(tmp_path: Path) -> None:
    contender = start(tmp_path)
    assert contender.facts == {"fake": "1"}
    for _ in range(2):
        run = contender.run_job(JOB, 10.0)
        assert run.timeline.times == [[0.001, 0.002], [0.001, 0.002, 0.003, 0.004, 0.005]]
        assert run.counters == {"host": 0.5}
    contender.stop()
    assert not contender.is_alive


def test_what_a_contender_raises_is_told_and_it_lives_on(tmp_path: Path) -> None:
    contender = start(tmp_path, "raise")
    with pytest.raises(ContenderFailed, match="ValueError: not today"):
        contender.run_job(JOB, 10.0)
    assert contender.is_alive
    contender.stop()


@pytest.mark.parametrize(
    ("way", "deadline", "said"),
    [("die", 10.0, "status 3: SomeError: out of luck"), ("hang", 0.5, "sent no answer for")],
)
def test_death_and_silence_are_findings(tmp_path: Path, way: str, deadline: float, said: str) -> None:
    contender = start(tmp_path, way)
    with pytest.raises(ContenderFailed, match=said):
        contender.run_job(JOB, deadline)
    assert not contender.is_alive
    with pytest.raises(ContenderFailed):
        contender.run_job(JOB, deadline)


def test_fewer_tokens_than_asked_for_are_no_result(tmp_path: Path) -> None:
    contender = start(tmp_path, "short")
    with pytest.raises(ValueError, match="returned 2 tokens instead of the requested 7"):
        contender.run_job(JOB, 10.0)
    contender.stop()


def test_a_contender_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match="no such model"):
        start(tmp_path, "no start")
    with pytest.raises(ContenderFailed, match="not installed"):
        ContenderProcess(ContenderSpec("absent", tmp_path / "python", "x", {}), tmp_path / "log")
