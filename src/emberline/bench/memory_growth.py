"""MemoryGrowth: records the memory of processes over time, across their restarts, and computes whether it grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emberline.bench import processes
from emberline.bench.report import BenchReport

WARM_UP = 0.25  # share of a run after which memory should be flat
MIN_LIFE_SAMPLES = 3  # samples of one process that are enough for a slope
Z_SCORE_95 = 1.96  # standard errors of a 95 % interval


@dataclass(slots=True)
class ProcessMemorySamples:
    """Samples of one process: the times in seconds and the resident memory in MB."""

    times: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)

    def drop_warm_up(self, warm_up_s: float) -> ProcessMemorySamples:
        """Return the samples that were taken at least `warm_up_s` after the first sample."""
        late = [i for i, at in enumerate(self.times) if at >= self.times[0] + warm_up_s]
        return ProcessMemorySamples([self.times[i] for i in late], [self.rss[i] for i in late])


@dataclass(slots=True)
class MemoryGrowth:
    settled: float  # age of a process in seconds after which its memory should be flat
    lives: dict[str, dict[int, ProcessMemorySamples]] = field(default_factory=dict)  # by process name, then by pid

    def record_samples(self, pids_by_name: Mapping[str, int], now: float) -> None:
        for name, pid in pids_by_name.items():
            if (used := processes.read_usage(pid)) is not None:
                life = self.lives.setdefault(name, {}).setdefault(pid, ProcessMemorySamples())
                life.times.append(now)
                life.rss.append(used.rss / 1e6)

    def add_results(self, report: BenchReport) -> None:
        """Add the memory of each process to the report, and its growth if there are enough samples.

        The growth is given with its 95 % confidence interval.
        """
        for name, every in self.lives.items():
            lives = [
                late
                for life in every.values()
                if len((late := life.drop_warm_up(self.settled)).times) >= MIN_LIFE_SAMPLES
            ]
            held = [rss for life in lives or every.values() for rss in life.rss]
            report.add(f"{name}_rss", held[-1], "MB", spread=(min(held), max(held)))
            if lives:
                value, error = fit_memory_slope(lives)
                report.add(f"{name}_rss_slope", value, "MB/minute", spread=(value - error, value + error))


def fit_memory_slope(samples_by_process: Sequence[ProcessMemorySamples]) -> tuple[float, float]:
    """Return the growth in MB per minute and half the width of its 95 % confidence interval.

    One slope is fitted for all processes, each with its own starting value. Because neighbouring samples are
    correlated, they count as fewer samples, according to their autocorrelation.
    """
    xs = [np.array(life.times) / 60 - np.mean(life.times) / 60 for life in samples_by_process]
    ys = [np.array(life.rss) - np.mean(life.rss) for life in samples_by_process]
    spread = float(sum(x @ x for x in xs))
    value = float(sum(x @ y for x, y in zip(xs, ys, strict=True))) / spread
    rests = [y - value * x for x, y in zip(xs, ys, strict=True)]
    squares = float(sum(rest @ rest for rest in rests))
    after = float(sum(rest[1:] @ rest[:-1] for rest in rests))
    alike = min(max(after / squares, 0.0), 0.99) if squares else 0.0
    free = max(sum(map(len, xs)) - len(xs) - 1, 1)
    return value, Z_SCORE_95 * math.sqrt(squares / free / spread * (1 + alike) / (1 - alike))
