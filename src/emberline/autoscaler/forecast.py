"""DemandForecast: predicts a pool's demand a short time ahead, from its trend and from earlier periods.

Demand is smoothed exponentially, once and twice (Brown's method); the difference of the two gives the trend. If the
load repeats, for example every day, the mean demand of each bucket of the period is kept too, and the forecast is the
present demand times the ratio of two buckets of the last period."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FAST_SMOOTHING_S = 20.0  # time constant of the demand that counts as present
TREND_SMOOTHING_S = 120.0
BUCKETS_PER_PERIOD = 288  # five minutes of a day
NEW_PERIOD_WEIGHT = 0.5  # of the last period against all earlier ones
MAX_PERIODIC_RATIO = 10.0
MAX_TREND_RATIO = 2.0  # a trend may double the demand, and not more: it is noisy


@dataclass(frozen=True, slots=True)
class DemandForecast:
    period_s: float = 86400.0  # 0: the load does not repeat
    present: float = 0.0  # smoothed over FAST_SMOOTHING_S
    once: float = 0.0  # smoothed over TREND_SMOOTHING_S
    twice: float = 0.0  # `once`, smoothed again
    updated_at: float | None = None
    buckets: tuple[float, ...] = ()  # mean demand by time of the period; negative: not known yet
    bucket_index: int = -1  # of the bucket that is being filled
    bucket_sum: float = 0.0  # of demand times seconds
    bucket_seconds: float = 0.0

    def with_demand(self, demand: float, now: float) -> DemandForecast:
        """Return the forecast after a demand was observed. `demand`: mean since the observation before."""
        if self.updated_at is None:
            empty = (-1.0,) * (BUCKETS_PER_PERIOD if self.period_s else 0)
            return replace(self, present=demand, once=demand, twice=demand, updated_at=now, buckets=empty)
        seconds = max(now - self.updated_at, 0.0)
        fast, slow = (1 - math.exp(-seconds / each) for each in (FAST_SMOOTHING_S, TREND_SMOOTHING_S))
        once = self.once + slow * (demand - self.once)
        twice = self.twice + slow * (once - self.twice)
        present = self.present + fast * (demand - self.present)
        smoothed = replace(self, present=present, once=once, twice=twice, updated_at=now)
        return smoothed._with_bucket(demand, seconds, now) if self.period_s else smoothed

    def predict(self, now: float, ahead_s: float) -> float:
        """Return the demand that is expected at `now + ahead_s`."""
        slope = (self.once - self.twice) / TREND_SMOOTHING_S
        # `twice` lags behind by two time constants, of which `present` already made up most.
        trend = min(max(self.present + slope * ahead_s, 0.0), MAX_TREND_RATIO * self.present)
        return max(trend, self._predict_by_period(now, ahead_s))

    def _predict_by_period(self, now: float, ahead_s: float) -> float:
        if not self.period_s or not self.buckets:
            return 0.0
        before, after = self.buckets[self._bucket_at(now)], self.buckets[self._bucket_at(now + ahead_s)]
        if before <= 0 or after < 0:
            return 0.0
        return self.present * min(after / before, MAX_PERIODIC_RATIO)

    def _bucket_at(self, now: float) -> int:
        return int(now % self.period_s / self.period_s * BUCKETS_PER_PERIOD) % BUCKETS_PER_PERIOD

    def _with_bucket(self, demand: float, seconds: float, now: float) -> DemandForecast:
        index = self._bucket_at(now)
        if index == self.bucket_index:
            added = self.bucket_sum + demand * seconds, self.bucket_seconds + seconds
            return replace(self, bucket_sum=added[0], bucket_seconds=added[1])
        buckets = self.buckets
        if self.bucket_seconds:
            mean, last = self.bucket_sum / self.bucket_seconds, buckets[self.bucket_index]
            mean = mean if last < 0 else last + NEW_PERIOD_WEIGHT * (mean - last)
            buckets = (*buckets[: self.bucket_index], mean, *buckets[self.bucket_index + 1 :])
        return replace(self, buckets=buckets, bucket_index=index, bucket_sum=demand * seconds, bucket_seconds=seconds)
