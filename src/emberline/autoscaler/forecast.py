"""DemandForecast: predicts a pool's demand a short time ahead, from its trend and from earlier periods.

Demand is smoothed exponentially with three time constants. A smoothed value lags behind a steady rise by its time
constant, so the difference of two of them gives the slope. The slow ones, which noise changes little, give the usual
forecast; the fast one counts when it is so far above that it is a burst and not noise.

If the load repeats, for example every day, the mean demand of each bucket of the period is kept too, and the forecast
is the present demand times the ratio of two buckets of the last period."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FAST_S, USUAL_S, SLOW_S = 15.0, 60.0, 240.0  # time constants
BURST_RATIO = 1.15  # of the fast to the usual value, above which demand has jumped
MAX_TREND_RATIO = 2.0  # a trend may double the demand, and not more
BUCKETS_PER_PERIOD = 288  # five minutes of a day
NEW_PERIOD_WEIGHT = 0.5  # of the last period against all earlier ones
MAX_PERIODIC_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class DemandForecast:
    period_s: float = 86400.0  # 0: the load does not repeat
    fast: float = 0.0  # demand, smoothed with each of the time constants
    usual: float = 0.0
    slow: float = 0.0
    updated_at: float | None = None
    buckets: tuple[float, ...] = ()  # mean demand by time of the period; negative: not known yet
    bucket_index: int = -1  # of the bucket that is being filled
    bucket_sum: float = 0.0  # of demand times seconds
    bucket_seconds: float = 0.0

    @property
    def is_burst(self) -> bool:
        return self.fast > BURST_RATIO * self.usual

    @property
    def present(self) -> float:
        """The demand now, without most of its noise."""
        has_dropped = self.usual > BURST_RATIO * self.fast
        return self.fast if self.is_burst or has_dropped else self.usual

    def with_demand(self, demand: float, now: float) -> DemandForecast:
        """Return the forecast after a demand was observed. `demand`: mean since the observation before."""
        if self.updated_at is None:
            empty = (-1.0,) * (BUCKETS_PER_PERIOD if self.period_s else 0)
            return replace(self, fast=demand, usual=demand, slow=demand, updated_at=now, buckets=empty)
        seconds = max(now - self.updated_at, 0.0)
        fast, usual, slow = (
            value + (1 - math.exp(-seconds / constant)) * (demand - value)
            for value, constant in ((self.fast, FAST_S), (self.usual, USUAL_S), (self.slow, SLOW_S))
        )
        smoothed = replace(self, fast=fast, usual=usual, slow=slow, updated_at=now)
        return smoothed._with_bucket(demand, seconds, now) if self.period_s else smoothed

    def predict(self, now: float, ahead_s: float) -> float:
        """Return the demand that is expected at `now + ahead_s`."""
        recent_slope = (self.fast - self.usual) / (USUAL_S - FAST_S)
        if self.is_burst:
            expected = self.fast + recent_slope * (FAST_S + ahead_s)
        else:  # the slower slope goes on for minutes after a rise has ended
            slope = max(min((self.usual - self.slow) / (SLOW_S - USUAL_S), recent_slope), 0.0)
            expected = self.present + slope * (USUAL_S + ahead_s)
        trend = min(expected, MAX_TREND_RATIO * self.present)
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
