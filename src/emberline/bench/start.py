"""`emberline bench start`: from the start of `emberline serve` to its first "ready", with the model in the cache."""

from __future__ import annotations

from pathlib import Path

from emberline.bench.launch import Launch
from emberline.bench.report import Report


def bench(model: str, rounds: int, root: Path) -> Report:
    report = Report("start", {"model": model, "rounds": rounds, "target_seconds": 3})
    seconds = []
    for _ in range(rounds):
        with Launch([model], root / "logs" / "start.log") as server:
            seconds.append(server.ready_seconds)
    report.add("ready", seconds, "s")
    return report
