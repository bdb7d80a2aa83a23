"""The protocol between a benchmark and the child process of a compared engine.

The child process reads jobs from stdin and writes the arrival times of the tokens to stdout, one JSON object per line.
This module imports only the standard library.
"""

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
        """Return counters in seconds, by name. Most engines return an empty mapping.

        The benchmark reports by how much each counter increased during a job.
        """
        ...


def serve_jobs(make_contender: Callable[[dict[str, Any]], BenchContender]) -> None:
    """Run the jobs that arrive on stdin until stdin ends.

    `make_contender` creates the engine from the settings, which are the last command-line argument.
    """
    out = _reserve_stdout()
    contender = make_contender(json.loads(sys.argv[-1]))
    _write_message(out, {"ready": contender.facts})
    for line in sys.stdin:
        job = BenchJob(**json.loads(line))
        before = contender.counters()
        try:
            answer: dict[str, Any] = {"times": contender.run(job).times}
        except Exception as error:  # any error of the peer is a result
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        after = contender.counters()
        _write_message(out, {**answer, "counters": {name: after[name] - before[name] for name in after}})


class TokenTimeRecorder:
    """Records when the tokens of a job arrive."""

    def __init__(self, job: BenchJob) -> None:
        self.times: list[list[float]] = [[] for _ in job.prompts]
        self._began = time.perf_counter()

    def record_tokens(self, request_index: int, count: int = 1) -> None:
        self.times[request_index] += [time.perf_counter() - self._began] * count

    def timeline(self) -> TokenTimeline:
        return TokenTimeline(self.times)


def _reserve_stdout() -> TextIO:
    """Return stdout for the messages of the protocol, and redirect what libraries print to stderr."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def _write_message(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
