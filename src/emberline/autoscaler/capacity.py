"""CapacityEstimate: how much work per second one worker of a pool serves within the SLO.

Work is counted in tokens: prompt tokens to compute, plus generated tokens times a weight. The estimate rises slowly
while workers reach the planned load and latencies are low. It falls when latencies have exceeded the SLO for some time
although the load was below the estimate. That load is remembered as a ceiling, so that the estimate does not soon rise
to it again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LOW_PRESSURE = 0.8  # latency as a share of its SLO up to which more load may be tried
RISE_PER_S = 0.001
FALL_FACTOR = 0.93
MISSED_BEFORE_FALL_S = 60.0  # seconds of missed SLOs before a reduction: short peaks say nothing about capacity
MISSED_MEMORY_S = 900.0  # time constant after which missed SLOs are forgotten
CEILING_SHARE = 0.95  # highest capacity, as a share of the load at which the SLO was missed
CEILING_RISE_PER_S = 1e-5  # 3.6 % an hour: models and prompts change
MIN_SHARE_OF_STATED = 0.5


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    work_per_s: float | None = None  # None: nothing is known yet
    stated: float | None = None  # what the operator stated; the estimate stays between half of it and all of it
    ceiling: float | None = None  # load per worker at which the SLO was missed
    missed_s: float = 0.0  # seconds in which latencies exceeded the SLO below this capacity, recently
    updated_at: float | None = None

    @staticmethod
    def from_stated(stated: float | None) -> CapacityEstimate:
        return CapacityEstimate(work_per_s=stated, stated=stated)

    def with_load(self, load: float, pressure: float | None, utilisation: float, now: float) -> CapacityEstimate:
        """Return the estimate, updated after the workers of a stable pool had `load` work per second each.

        `pressure`: the worst latency as a share of its SLO; None: there were no requests. `utilisation`: the planned
        load of a worker, as a share of the estimate."""
        seconds = 0.0 if self.updated_at is None else max(now - self.updated_at, 0.0)
        ceiling = None if self.ceiling is None else self.ceiling * (1 + CEILING_RISE_PER_S * seconds)
        missed_s = self.missed_s * math.exp(-seconds / MISSED_MEMORY_S)
        updated = replace(self, ceiling=ceiling, missed_s=missed_s, updated_at=now)
        if pressure is None or load <= 0:
            return updated
        known = updated.work_per_s
        if known is None:
            return replace(updated, work_per_s=load if pressure > 1 else load / utilisation)
        if pressure > 1 and load < known:
            return updated._record_miss(load, known, seconds)
        if pressure < LOW_PRESSURE and load > 0.97 * utilisation * known:
            higher = known * (1 + RISE_PER_S * seconds)
            limits = (higher, updated.stated, None if ceiling is None else CEILING_SHARE * ceiling)
            return replace(updated, work_per_s=max(known, min(each for each in limits if each is not None)))
        return updated

    def _record_miss(self, load: float, known: float, seconds: float) -> CapacityEstimate:
        if (missed_s := self.missed_s + seconds) < MISSED_BEFORE_FALL_S:
            return replace(self, missed_s=missed_s)
        lowest = 0.0 if self.stated is None else MIN_SHARE_OF_STATED * self.stated
        ceiling = load if self.ceiling is None else min(load, self.ceiling)
        return replace(self, work_per_s=max(FALL_FACTOR * known, lowest), ceiling=ceiling, missed_s=0.0)
