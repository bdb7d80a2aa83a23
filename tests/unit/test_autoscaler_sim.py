"""The autoscaler in control of a simulated cluster, and the log of minutes that judges it."""

from __future__ import annotations

import pytest

from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings
from emberline.bench.autoscaler import AutoscalerBenchPlan, LoadTrace, find_oracle, run_autoscaler, run_schedule
from emberline.core.errors import InvalidRequest
from emberline.core.slo import LatencyTargets
from emberline.sim.cluster import SimClusterConfig
from emberline.sim.workloads.arrivals import ConstantRate
from emberline.sim.workloads.ramped_bursts import RampedBurstRate

SETTINGS = AutoscalerSettings(LatencyTargets(3.0, 0.1), (PoolSettings("both", 1, 8),), start_seconds=10.0, period=0.0)
PLAN = AutoscalerBenchPlan(SETTINGS, SimClusterConfig(max_running=64, detail="runs"), 10.0, 8000, 100)


def test_the_autoscaler_follows_a_burst_with_few_more_workers_than_an_oracle() -> None:
    burst = RampedBurstRate(2.5, 420.0, 1, (2.5, 2.5), (240.0, 240.0), 60.0)
    trace = LoadTrace("burst", burst, 420.0)
    outcome = run_autoscaler(PLAN, trace, 3.5)
    assert not outcome.unanswered and len(outcome.missed) <= 1 and outcome.direction_changes <= 2
    oracle = find_oracle(PLAN, trace, 3.5)
    assert abs(outcome.requests - oracle.requests) < 20 and outcome.worker_s < 1.6 * oracle.worker_s


def test_too_few_workers_miss_the_slo_and_enough_do_not() -> None:
    trace = LoadTrace("constant", ConstantRate(6.0), 120.0)
    assert run_schedule(PLAN, trace, [1, 1]).missed == [0, 1]
    enough = run_schedule(PLAN, trace, [3, 3])
    assert not enough.missed and enough.worker_s == pytest.approx(3 * 120, rel=0.01)


def test_bursts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="must fit into 600 s"):
        RampedBurstRate(1.0, 600.0, 4)
    rate = RampedBurstRate(2.0, 3600.0, 2, (2.0, 3.0), (600.0, 900.0), 60.0)
    rates = [rate.at(time) for time in range(0, 3600, 10)]
    assert min(rates) == 2.0 and 4.0 <= max(rates) <= rate.peak
