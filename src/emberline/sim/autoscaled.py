"""AutoscaledCluster: the production autoscaler in control of a simulated cluster.

Every interval the autoscaler makes one decision, with all of its parts: observer, policy, start tracker and budgets.
It adds workers, which take some time to start, or fail to, and drains workers, whose requests move."""

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
    """Stand for a call to a simulated worker, which listens nowhere."""
    return ProbeResult.REFUSED


class AutoscaledCluster:
    def __init__(self, cluster: SimCluster, settings: AutoscalerSettings, choose_start: Callable[[], SimStart]) -> None:
        """`cluster` has its first workers already. `choose_start`: called for each worker that is started."""
        self._cluster = cluster
        self.trace = ScalingTrace()
        fleet, routers = SimFleet(cluster, choose_start, self.trace), SimRouters(cluster, self.trace)
        self.autoscaler = Autoscaler(settings, routers, fleet, cluster.clock, probe=_refuse_call)
        cluster.every(settings.interval, self._step)

    def run(self, sessions: Iterable[SimSession], until: float) -> SimResult:
        with asyncio.Runner() as self._runner:
            return self._cluster.run(sessions, until)

    def _step(self) -> None:
        self._runner.run(self.autoscaler.step())
