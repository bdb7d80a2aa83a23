"""What a contender's child process says and hears: jobs in, timelines out, one JSON line each. Stdlib only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from emberline.bench.job import BenchJob, TokenTimeline


class BenchContender(Protocol):
    facts: dict[str, Any]  # versions and settings, for the report

    def run(self, job: BenchJob) -> TokenTimeline: ...

    def counters(self) -> Mapping[str, float]:
        """Seconds since start that the report wants the differences of; most have none."""
        ...


def serve(make: Callable[[dict[str, Any]], BenchContender]) -> None:
    """`make` gets the settings that the parent put on the command line. Ends with its stdin."""
    out = _take_stdout()
    contender = make(json.loads(sys.argv[-1]))
    _write_message(out, {"ready": contender.facts})
    for line in sys.stdin:
        job = BenchJob(**json.loads(line))
        before = contender.counters()
        try:
            answer: dict[str, Any] = {"times": contender.run(job).times}
        except Exception as error:  # whatever the peer raises is the finding
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        after = contender.counters()
        _write_message(out, {**answer, "counters": {name: after[name] - before[name] for name in after}})


class TokenTicks:
    """Collects when the tokens of a job come."""

    def __init__(self, job: BenchJob) -> None:
        self.times: list[list[float]] = [[] for _ in job.prompts]
        self._began = time.perf_counter()

    def mark(self, request: int, count: int = 1) -> None:
        self.times[request] += [time.perf_counter() - self._began] * count

    def timeline(self) -> TokenTimeline:
        return TokenTimeline(self.times)


def _take_stdout() -> TextIO:
    """Libraries print; the answers must not be among that."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def _write_message(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
