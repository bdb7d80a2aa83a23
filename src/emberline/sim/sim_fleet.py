"""SimFleet and SimRouters: the interfaces through which the production autoscaler controls a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from emberline.autoscaler.fleet import FleetWorker
from emberline.core.config import Role
from emberline.router.http.router_metrics import TOKEN_LATENCY_BUCKETS_S, build_status
from emberline.server.metrics import Histogram
from emberline.sim.cluster import SimCluster
from emberline.sim.result import Distribution, RequestRecord


@dataclass(frozen=True, slots=True)
class SimStart:
    """The seconds from a worker's start until it becomes ready, or ends without becoming ready."""

    ready_after_s: float  # infinite: it never becomes ready
    ends_after_s: float | None = None  # seconds until its process ends, if it is not ready then; None: it does not


@dataclass(slots=True)
class ScalingTrace:
    """The workers that the autoscaler has added and removed during a run, for reports."""

    changes: list[tuple[float, str, int]] = field(default_factory=list)  # time, role, added workers (negative: removed)

    def count_direction_changes(self) -> int:
        """Return how often a pool changed from adding workers to removing them, or back."""
        count = 0
        last: dict[str, int] = {}
        for _, role, change in self.changes:
            count += last.get(role, change) * change < 0
            last[role] = change
        return count


class SimFleet:
    """The WorkerFleet of a simulated cluster. All workers of the cluster belong to it."""

    def __init__(self, cluster: SimCluster, choose_start: Callable[[], SimStart], trace: ScalingTrace) -> None:
        """`choose_start` determines, for each new worker, after how long the worker becomes ready or ends."""
        self._cluster = cluster
        self._choose_start = choose_start
        self._trace = trace

    async def list_workers(self) -> list[FleetWorker]:
        return [FleetWorker(each.name, each.role) for each in self._cluster.workers.values()]

    async def start_workers(self, role: str, count: int) -> None:
        cluster = self._cluster
        for _ in range(count):
            start = self._choose_start()
            name = cluster.add_worker(cast("Role", role), start_seconds=start.ready_after_s)
            if start.ends_after_s is not None:
                cluster.call_at(cluster.now + start.ends_after_s, partial(self._end_if_starting, name))
        self._trace.changes.append((cluster.now, role, count))

    def _end_if_starting(self, name: str) -> None:
        if (worker := self._cluster.workers.get(name)) is not None and worker.state == "starting":
            self._cluster.kill_worker(name)

    async def stop_worker(self, name: str) -> None:
        if name in self._cluster.workers:  # a drained worker of a simulated cluster ends by itself
            self._cluster.drain_worker(name, move=True)

    async def replace_worker(self, name: str) -> bool:
        self._cluster.kill_worker(name)
        return False

    async def close(self, *, stop_workers: bool) -> None:
        """Do nothing: the workers of a simulated cluster end with its run."""


class SimRouters:
    """The routers of a simulated cluster: its dispatcher, and the latencies that clients saw."""

    silent_count = 0

    def __init__(self, cluster: SimCluster, trace: ScalingTrace) -> None:
        self._cluster = cluster
        self._trace = trace
        self._refused = 0
        self._token_times = Histogram("token_times", "Between two tokens.", TOKEN_LATENCY_BUCKETS_S)
        self._seen_token_times: tuple[Distribution, Mapping[float, int]] = (Distribution(), {})
        cluster.observers.append(self._record_request)

    async def fetch_status(self) -> dict[str, Any]:
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

    async def drain(self, name: str, *, on: bool = True) -> bool:
        worker = self._cluster.workers.get(name)
        if worker is None or worker.state == "starting":
            if worker is not None:
                self._trace.changes.append((self._cluster.now, worker.role, -1))
            return False
        if on:
            self._cluster.drain_worker(name, move=True)
        else:
            self._cluster.resume_worker(name)
        self._trace.changes.append((self._cluster.now, worker.role, -1 if on else 1))
        return True

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        return False

    async def announce_models(self, names: Collection[str], seconds: float) -> None:
        """Do nothing: in a simulated cluster, requests wait for a worker even if their model was not announced."""

    def _record_request(self, record: RequestRecord) -> None:
        if record.first_token_at is not None:
            self._cluster.dispatch.metrics.first_token_seconds.observe(record.first_token_at - record.arrived_at)
        self._refused += record.outcome == "refused"

    def _take_token_times(self) -> None:
        """Add the times between tokens since the last call to the histogram that the observer sees."""
        seen, before = self._cluster.result.inter_token_seconds, self._seen_token_times
        bins = dict(seen.counts_by_value())
        earlier = before[1] if before[0] is seen else {}
        for seconds, count in bins.items():
            self._token_times.observe(seconds, count - earlier.get(seconds, 0))
        self._seen_token_times = seen, bins
