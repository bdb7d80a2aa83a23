"""Growth: memory of processes, which may be started again now and then, and whether it grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emberline.bench import processes
from emberline.bench.report import BenchReport

WARM_UP = 0.25  # of a run, until memory is expected to be flat
MIN_LIFE_SAMPLES = 3  # samples of a life that say something
Z_SCORE_95 = 1.96  # standard errors: 95 %


@dataclass(slots=True)
class ProcessLife:
    """Of one process: when it was looked at, in seconds, and what it held then, in MB."""

    times: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)

    def after_warm_up(self, seconds: float) -> ProcessLife:
        """From that age on."""
        late = [i for i, at in enumerate(self.times) if at >= self.times[0] + seconds]
        return ProcessLife([self.times[i] for i in late], [self.rss[i] for i in late])


@dataclass(slots=True)
class MemoryGrowth:
    settled: float  # seconds of a process's life after which its memory is expected to be flat
    lives: dict[str, dict[int, ProcessLife]] = field(default_factory=dict)  # by name of the process, then by pid

    def sample(self, pids: Mapping[str, int], now: float) -> None:
        for name, pid in pids.items():
            if (used := processes.usage(pid)) is not None:
                life = self.lives.setdefault(name, {}).setdefault(pid, ProcessLife())
                life.times.append(now)
                life.rss.append(used.rss / 1e6)

    def add_results(self, report: BenchReport) -> None:
        """What each had in the end; of those that lived long enough also the slope, with its 95 % interval."""
        for name, every in self.lives.items():
            lives = [
                late
                for life in every.values()
                if len((late := life.after_warm_up(self.settled)).times) >= MIN_LIFE_SAMPLES
            ]
            held = [rss for life in lives or every.values() for rss in life.rss]
            report.add(f"{name}_rss", held[-1], "MB", spread=(min(held), max(held)))
            if lives:
                value, error = slope(lives)
                report.add(f"{name}_rss_slope", value, "MB/minute", spread=(value - error, value + error))


def slope(lives: Sequence[ProcessLife]) -> tuple[float, float]:
    """MB a minute, and half of its 95 % interval: one line through all lives, each at a height of its own. Samples that
    follow each other are alike, so they count as fewer than were taken, by how much alike they are."""
    xs = [np.array(life.times) / 60 - np.mean(life.times) / 60 for life in lives]
    ys = [np.array(life.rss) - np.mean(life.rss) for life in lives]
    spread = float(sum(x @ x for x in xs))
    value = float(sum(x @ y for x, y in zip(xs, ys, strict=True))) / spread
    rests = [y - value * x for x, y in zip(xs, ys, strict=True)]
    squares = float(sum(rest @ rest for rest in rests))
    after = float(sum(rest[1:] @ rest[:-1] for rest in rests))
    alike = min(max(after / squares, 0.0), 0.99) if squares else 0.0
    free = max(sum(map(len, xs)) - len(xs) - 1, 1)
    return value, Z_SCORE_95 * math.sqrt(squares / free / spread * (1 + alike) / (1 - alike))
