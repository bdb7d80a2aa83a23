"""AutoscaledCluster: the production autoscaler's policy and observer, in control of a simulated cluster.

Every interval, the router's status is built from the simulated workers and observed as the real autoscaler does; the
decisions add workers, which take some time to start, and drain workers, whose requests move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emberline.autoscaler.fleet import FleetWorker
from emberline.autoscaler.observer import StatusObserver
from emberline.autoscaler.policy import PolicyState, decide
from emberline.autoscaler.pool_workers import group_workers
from emberline.autoscaler.settings import AutoscalerSettings
from emberline.router.http.router_metrics import TOKEN_LATENCY_BUCKETS_S, build_status
from emberline.server.metrics import Histogram
from emberline.sim.cluster import SimCluster
from emberline.sim.result import Distribution, RequestRecord, SimResult
from emberline.sim.sessions import SimSession


@dataclass(slots=True)
class ScalingTrace:
    """What happened during a run, for reports."""

    changes: list[tuple[float, str, int]] = field(default_factory=list)  # time, role, added workers (negative: removed)

    def count_direction_changes(self) -> int:
        """Return how often a pool changed from adding workers to removing them, or back."""
        count = 0
        last: dict[str, int] = {}
        for _, role, change in self.changes:
            count += last.get(role, change) * change < 0
            last[role] = change
        return count


class AutoscaledCluster:
    def __init__(self, cluster: SimCluster, settings: AutoscalerSettings, start_seconds: float) -> None:
        """`cluster` has its first workers already. `start_seconds`: how long a worker takes to be ready."""
        self._cluster = cluster
        self._settings = settings
        self._start_seconds = start_seconds
        self._observer = StatusObserver()
        self._state = PolicyState()
        self._refused = 0
        self._token_times = Histogram("token_times", "Between two tokens.", TOKEN_LATENCY_BUCKETS_S)
        self._seen_token_times: tuple[Distribution, Mapping[float, int]] = (Distribution(), {})
        self.trace = ScalingTrace()
        cluster.observers.append(self._record_request)
        cluster.every(settings.interval, self._step)

    def run(self, sessions: Iterable[SimSession], until: float) -> SimResult:
        return self._cluster.run(sessions, until)

    def _record_request(self, record: RequestRecord) -> None:
        if record.first_token_at is not None:
            self._cluster.dispatch.metrics.first_token_seconds.observe(record.first_token_at - record.arrived_at)
        self._refused += record.outcome == "refused"

    def _step(self) -> None:
        cluster = self._cluster
        workers = [FleetWorker(each.name, each.role) for each in cluster.workers.values()]
        status = self._build_status()
        pools = group_workers(status, workers, [pool.role for pool in self._settings.pools])
        observations = self._observer.observe(status, pools, cluster.now)
        decision = decide(observations, self._state, cluster.now, self._settings)
        self._state = decision.state
        for pool in self._settings.pools:
            change = decision.desired[pool.role] - pools[pool.role].serving_count
            for _ in range(change):
                cluster.add_worker(pool.role, start_seconds=self._start_seconds)  # type: ignore[arg-type]
            for name in pools[pool.role].choose_removals(max(-change, 0)):
                cluster.drain_worker(name, move=True)
            if change:
                self.trace.changes.append((cluster.now, pool.role, change))

    def _build_status(self) -> dict[str, Any]:
        dispatch, now = self._cluster.dispatch, self._cluster.now
        views = []
        for worker in dispatch.workers.values():
            member = dispatch.membership.get(worker.name)
            assert member is not None
            views.append((worker, member, dispatch.health(worker)))
        status = build_status(views, dispatch.metrics, now)
        self._take_token_times()
        # The router measures times between tokens when they are relayed; simulated workers report many tokens at once.
        latency = {**status["latency"], "inter_token": self._token_times.counts}
        return {
            **status,
            "latency": latency,
            "refused": self._refused,
            "waiting_requests": self._cluster.num_waiting,
        }

    def _take_token_times(self) -> None:
        """Add the times between tokens since the last call to the histogram that the observer sees."""
        seen, before = self._cluster.result.inter_token_seconds, self._seen_token_times
        bins = dict(seen.counts_by_value())
        earlier = before[1] if before[0] is seen else {}
        for seconds, count in bins.items():
            self._token_times.observe(seconds, count - earlier.get(seconds, 0))
        self._seen_token_times = seen, bins
