"""`emberline bench start`: the time from starting `emberline serve` until it is ready.

The model must be in the local cache; the time does not include a download.
"""

from __future__ import annotations

from pathlib import Path

from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer


def bench(model: str, rounds: int, log_root: Path) -> BenchReport:
    report = BenchReport("start", {"model": model, "rounds": rounds, "target_seconds": 3})
    seconds = []
    for _ in range(rounds):
        with EmberlineServer([model], log_root / "logs" / "start.log") as server:
            seconds.append(server.ready_seconds)
    report.add("ready", seconds, "s")
    return report
