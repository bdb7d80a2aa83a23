"""AutoscaledCluster: a simulated cluster whose number of workers the production autoscaler controls.

The autoscaler makes one decision in each interval, with its observer, policy, start tracker and budgets. The workers
that it adds take some time to start, or fail to start. The workers that it removes are drained: their requests move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from emberline.autoscaler.controller import Autoscaler
from emberline.autoscaler.settings import AutoscalerSettings
from emberline.autoscaler.worker_probe import ProbeResult
from emberline.sim.cluster import SimCluster
from emberline.sim.result import SimResult
from emberline.sim.sessions import SimSession
from emberline.sim.sim_fleet import ScalingTrace, SimFleet, SimRouters, SimStart


async def _refuse_call(url: str) -> ProbeResult:
    """Return the result of a call to a simulated worker, which has no process that listens at its URL."""
    return ProbeResult.REFUSED


class AutoscaledCluster:
    def __init__(self, cluster: SimCluster, settings: AutoscalerSettings, choose_start: Callable[[], SimStart]) -> None:
        """`cluster` already contains the workers with which the run begins.

        `choose_start` is called for each worker that the autoscaler adds. It determines after how long that worker
        becomes ready, or ends without becoming ready."""
        self._cluster = cluster
        self.trace = ScalingTrace()
        fleet, routers = SimFleet(cluster, choose_start, self.trace), SimRouters(cluster, self.trace)
        self.autoscaler = Autoscaler(settings, routers, fleet, cluster.clock, probe=_refuse_call)
        cluster.call_every(settings.interval, self._step)

    def run(self, sessions: Iterable[SimSession], until: float) -> SimResult:
        with asyncio.Runner() as self._runner:
            return self._cluster.run(sessions, until)

    def _step(self) -> None:
        self._runner.run(self.autoscaler.step())
