"""A contender that computes nothing: one token a millisecond, and on demand every way to go wrong."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import serve_jobs


class Fake:
    def __init__(self, settings: dict[str, Any]) -> None:
        print("a library says hello on stdout")
        if settings.get("way") == "no start":
            raise RuntimeError("no such model")
        self.way = settings.get("way")
        self.facts: dict[str, Any] = {"fake": "1"}
        self.jobs = 0

    def run(self, job: BenchJob) -> TokenTimeline:
        self.jobs += 1
        match self.way:
            case "raise":
                raise ValueError("not today")
            case "die":
                print("SomeError: out of luck", file=sys.stderr)
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "short":
                return TokenTimeline([[0.001] for _ in job.prompts])
        return TokenTimeline([[(i + 1) / 1000 for i in range(output)] for output in job.outputs])

    def counters(self) -> dict[str, float]:
        return {"host": self.jobs * 0.5}


if __name__ == "__main__":
    serve_jobs(Fake)
