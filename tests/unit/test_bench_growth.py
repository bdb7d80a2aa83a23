"""A line through memory: found where there is one, over restarts, and not where there is only noise."""

from __future__ import annotations

import os

import numpy as np
import pytest

from emberline.bench.memory_growth import MemoryGrowth, ProcessMemorySamples, fit_memory_slope
from emberline.bench.report import BenchReport


def lived(
    begin: float, seconds: float, height: float, grows: float, noise: np.ndarray | None = None
) -> ProcessMemorySamples:
    """A process that takes 20 s to get to its height."""
    ages = np.arange(0.0, seconds, 2.0)
    rss = np.minimum(height, height * ages / 20) + grows * ages / 60
    return ProcessMemorySamples(
        (begin + ages).tolist(), (rss + (0.0 if noise is None else noise[: len(ages)])).tolist()
    )


def test_each_life_has_its_own_height() -> None:
    lives = [lived(0, 100, 500.0, 1.5), lived(110, 80, 300.0, 1.5), lived(200, 20, 100.0, 1.5)]
    assert fit_memory_slope([life.drop_warm_up(30.0) for life in lives[:2]]) == pytest.approx((1.5, 0.0), abs=1e-6)
    assert fit_memory_slope(lives)[0] > 10  # what starts up does grow
    report = BenchReport("churn")
    MemoryGrowth(30.0, {"worker": dict(enumerate(lives)), "short": {1: lives[2]}}).add_results(report)
    assert report.results["worker_rss_slope"].value == pytest.approx(1.5)
    assert report.results["worker_rss"].spread == pytest.approx((300 + 1.5 / 2, 500 + 1.5 * 98 / 60))
    assert report.results["short_rss"].value > 0
    assert "short_rss_slope" not in report.results  # it did not live long enough to say anything


@pytest.mark.parametrize("grows", [0.0, 2.0])
def test_noise_is_not_growth(grows: float) -> None:
    """Also such as memory has, which stays where it is for a while: 95 of 100 intervals hold the truth, or nearly."""
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = np.zeros(900)
        for i in range(1, 900):
            noise[i] = 0.8 * noise[i - 1] + rng.normal()
        found = fit_memory_slope([lived(0, 1800, 200.0, grows, noise).drop_warm_up(30.0)])
        held += abs(found[0] - grows) <= found[1]
    assert held >= 88


def test_it_looks_at_processes() -> None:
    growth, report = MemoryGrowth(settled=1.0), BenchReport("churn")
    for now in range(8):
        growth.record_samples({"me": os.getpid(), "nobody": 1 << 30}, float(now))
    growth.add_results(report)
    assert set(report.results) == {"me_rss", "me_rss_slope"} and report.results["me_rss"].value > 1
