"""The autoscaler in control of a simulated cluster whose workers fail to start, and whose GPUs are limited."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings
from emberline.core.slo import LatencyTargets
from emberline.sim.autoscaled import AutoscaledCluster
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.sim_fleet import SimStart
from emberline.sim.workloads.arrivals import ConstantRate
from emberline.sim.workloads.requests import RequestWorkload

GOOD, FAILING, ENDLESS = SimStart(10.0), SimStart(math.inf, 3.0), SimStart(math.inf)
# 8,000 prompt tokens: a worker serves about 3.5 requests per second within the SLO.
CAPACITY = 3.5 * 1.13 * (8000 + 4 * 100)
SETTINGS = AutoscalerSettings(
    LatencyTargets(3.0, 0.1), (PoolSettings("both", 1, 8, capacity=CAPACITY),), start_seconds=10.0, period=0.0
)


class Run:
    """One simulated run, and what it has used at each second."""

    def __init__(self, settings: AutoscalerSettings, starts: Iterable[SimStart] = (), **workers: int) -> None:
        self.cluster = SimCluster(SimClusterConfig(max_running=64, detail="runs", **({"workers": 1} | workers)))
        later = iter(starts)
        self.scaled = AutoscaledCluster(self.cluster, settings, lambda: next(later, GOOD))
        self.gpus: list[int] = []
        self.unanswered = 0
        self._gpus_of = {pool.role: pool.gpus for pool in settings.pools}
        self.cluster.call_every(1.0, lambda: self.gpus.append(self.count_gpus()))
        self.cluster.observers.append(
            lambda record: setattr(self, "unanswered", self.unanswered + (record.outcome != "answered"))
        )

    def count_gpus(self) -> int:
        return sum(self._gpus_of[worker.role] for worker in self.cluster.workers.values())

    def simulate(self, rate: float, seconds: float) -> None:
        workload = RequestWorkload(ConstantRate(rate), seconds, 8000, 100, 0.5)
        self.scaled.run(workload.sessions(1), seconds)

    def ready(self, role: str = "both") -> int:
        return sum(worker.state == "ready" and worker.role == role for worker in self.cluster.workers.values())

    def start_times(self) -> list[float]:
        return [time for time, _, change in self.scaled.trace.changes if change > 0]


def test_starts_that_fail_are_repeated_with_growing_delays_until_one_works() -> None:
    run = Run(replace(SETTINGS, pools=(PoolSettings("both", 2, 8, capacity=CAPACITY),)), [FAILING] * 5)
    run.simulate(1.0, 150.0)
    times = run.start_times()
    delays = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == 6 and delays == sorted(delays) and delays[0] == 10.0 and delays[-1] >= 20.0
    assert run.scaled.autoscaler.metrics.failed_starts == 5 and run.ready() == 2 and not run.unanswered


def test_workers_that_fail_together_delay_the_next_start_like_one() -> None:
    run = Run(replace(SETTINGS, pools=(PoolSettings("both", 6, 8, capacity=CAPACITY),)), [FAILING] * 5)
    run.simulate(1.0, 60.0)
    first, second, *_ = run.start_times()
    assert second - first == 10.0 and run.scaled.autoscaler.metrics.failed_starts == 5 and run.ready() == 6


def test_the_time_of_a_start_is_measured_from_its_order_on() -> None:
    pools = (PoolSettings("both", 2, 8, capacity=CAPACITY),)
    for start_s in (20.0, 3.0):  # the second one is never seen while it starts
        run = Run(replace(SETTINGS, start_seconds=60.0, pools=pools), [SimStart(start_s)])
        run.simulate(0.5, 60.0)
        assert run.scaled.autoscaler.metrics.usual_start_s == pytest.approx(60 - 0.3 * (60 - max(start_s, 5.0)))


def test_a_start_that_never_ends_is_replaced_after_ten_minutes() -> None:
    run = Run(replace(SETTINGS, pools=(PoolSettings("both", 2, 8, capacity=CAPACITY),)), [ENDLESS])
    run.simulate(0.5, 630.0)
    first, second = run.start_times()
    assert 600.0 < second - first <= 610.0 and run.ready() == 2 and max(run.gpus) == 2
    assert run.scaled.autoscaler.metrics.usual_start_s == pytest.approx(10.0, abs=1.0)


def test_a_budget_of_gpus_holds_at_all_times_and_both_pools_get_a_share() -> None:
    pools = (PoolSettings("both", 1, 8, gpus=2, capacity=CAPACITY), PoolSettings("prefill", 1, 8, gpus=1))
    run = Run(replace(SETTINGS, pools=pools, max_gpus=7), prefill_workers=1)
    run.simulate(20.0, 120.0)
    assert max(run.gpus) == run.count_gpus() == 7
    assert run.ready("both") >= 2 and run.ready("prefill") >= 1


def test_a_replaced_start_keeps_its_gpu_within_the_budget() -> None:
    settings = replace(SETTINGS, max_gpus=2)
    run = Run(settings, [ENDLESS, FAILING])
    run.simulate(5.0, 640.0)
    assert max(run.gpus) == 2 and run.ready() == 2
