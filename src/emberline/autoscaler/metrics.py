"""AutoscalerMetrics: what the autoscaler saw and decided, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from emberline.autoscaler.observation import PoolObservation
from emberline.autoscaler.policy import PoolState, ScalingDecision
from emberline.server.metrics import MetricFamily

PREFIX = "emberline:autoscaler"
OBSERVATION_GAUGES: tuple[tuple[str, str, Callable[[PoolObservation], float]], ...] = (
    ("waiting_requests", "Requests without a slot.", lambda each: each.waiting_requests),
    ("ttft_p90_seconds", "Time to first token, of the last half minute.", lambda each: each.ttft_s or 0.0),
    ("itl_p90_seconds", "Time between tokens, of the last half minute.", lambda each: each.itl_s or 0.0),
)
STATE_GAUGES: tuple[tuple[str, str, Callable[[PoolState], float]], ...] = (
    ("demand", "Work per second that arrives, in tokens.", lambda each: each.forecast.current_demand),
    ("capacity", "Work per second of one worker within the SLO.", lambda each: each.capacity.work_per_s or 0.0),
    ("slo_unreachable", "1 while the SLO is missed with one request per worker.", lambda each: each.is_slo_unreachable),
)


class AutoscalerMetrics:
    def __init__(self) -> None:
        self.decisions = 0
        self.errors: Counter[str] = Counter()  # calls of the router or the fleet that failed, by error code
        self.failed_starts = 0
        self.usual_start_s = 0.0
        self.silent_routers = 0
        self._replaced: Counter[tuple[str, str]] = Counter()  # replaced workers by pool and reason
        # Started and removed workers by pool, direction and reason.
        self._changes: Counter[tuple[str, str, str]] = Counter()
        self._direction_changes: Counter[str] = Counter()  # changes between starting and removing workers, by pool
        self._last_direction: dict[str, str] = {}
        self._desired: Mapping[str, int] = {}
        self._observations: Mapping[str, PoolObservation] = {}
        self._pools: Mapping[str, PoolState] = {}

    def record_decision(self, decision: ScalingDecision, observations: Mapping[str, PoolObservation]) -> None:
        self.decisions += 1
        self._desired, self._observations, self._pools = decision.desired, observations, decision.state.pools

    def record_change(self, role: str, direction: str, reason: str, count: int) -> None:
        """Record that `count` workers are started (direction up) or removed (down)."""
        if not count:
            return
        self._changes[role, direction, reason] += count
        self._direction_changes[role] += self._last_direction.get(role, direction) != direction
        self._last_direction[role] = direction

    def record_replacement(self, role: str, reason: str) -> None:
        """Record that a worker that hangs is replaced. `reason`: start (it never became ready), lost or stuck."""
        self._replaced[role, reason] += 1

    def metric_families(self) -> Iterator[MetricFamily]:
        samples = [
            (f'pool="{role}",direction="{direction}",reason="{reason}"', count)
            for (role, direction, reason), count in sorted(self._changes.items())
        ]
        yield MetricFamily.from_samples(
            f"{PREFIX}_workers_changed_total", "Workers started and removed, by reason.", "counter", samples
        )
        replaced = [(f'pool="{role}",reason="{reason}"', count) for (role, reason), count in self._replaced.items()]
        yield MetricFamily.from_samples(
            f"{PREFIX}_workers_replaced_total", "Workers that hung and were replaced, by reason.", "counter", replaced
        )
        errors = [(f'code="{code}"', count) for code, count in sorted(self.errors.items())]
        yield MetricFamily.from_samples(
            f"{PREFIX}_errors_total", "Calls of the router or of the fleet that failed.", "counter", errors
        )
        for name, help_, kind, value in (
            ("decisions_total", "Decisions made.", "counter", float(self.decisions)),
            ("failed_starts_total", "Workers that ended before they were ready.", "counter", float(self.failed_starts)),
            ("silent_routers", "Routers that do not answer.", "gauge", float(self.silent_routers)),
            ("start_seconds", "Time from the start of a worker until it is ready.", "gauge", self.usual_start_s),
        ):
            yield MetricFamily(f"{PREFIX}_{name}", help_, kind, [f"{PREFIX}_{name} {value:g}"])
        yield from self._build_pool_gauges()

    def _build_pool_gauges(self) -> Iterator[MetricFamily]:
        workers = [
            (f'pool="{role}",state="{state}"', float(count))
            for role, each in self._observations.items()
            for state, count in (("ready", each.ready), ("starting", each.starting), ("asleep", each.asleep))
        ]
        yield MetricFamily.from_samples(f"{PREFIX}_workers", "Workers of the pool by state.", "gauge", workers)
        changes = [(f'pool="{role}"', float(count)) for role, count in self._direction_changes.items()]
        yield MetricFamily.from_samples(
            f"{PREFIX}_direction_changes_total", "Changes between adding and removing workers.", "counter", changes
        )
        desired = [(f'pool="{role}"', float(count)) for role, count in self._desired.items()]
        yield MetricFamily.from_samples(
            f"{PREFIX}_desired_workers", "Workers that the pool should have.", "gauge", desired
        )
        for name, help_, read_observation in OBSERVATION_GAUGES:
            samples = [(f'pool="{role}"', float(read_observation(each))) for role, each in self._observations.items()]
            yield MetricFamily.from_samples(f"{PREFIX}_{name}", help_, "gauge", samples)
        for name, help_, read_state in STATE_GAUGES:
            samples = [(f'pool="{role}"', float(read_state(each))) for role, each in self._pools.items()]
            yield MetricFamily.from_samples(f"{PREFIX}_{name}", help_, "gauge", samples)
