"""DemandForecast: predicts a pool's demand a short time ahead, from its trend and from earlier periods.

Demand is smoothed exponentially with three time constants, which gives a fast, a usual and a slow value. A smoothed
value lags behind a steady rise by its time constant, so the difference of two values gives the slope of the rise. The
forecast normally follows from the usual and the slow value, which noise changes little. If the fast value differs from
the usual value by more than noise explains, the load has changed: both slower values are set to the fast value. While
the fast value itself rises by more than noise explains, the forecast follows the slope of the fast value.

If the load repeats, for example every day, the period is divided into buckets, and the mean demand in each of them is
kept. The forecast is then at least the present demand times the ratio of the bucket ahead to the present bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FAST_S, USUAL_S, SLOW_S = 20.0, 90.0, 300.0  # time constants
FIRST_NOISE = 0.15  # standard deviation of one observation, as a share of the demand, before it was measured
# If the fast value differs from the usual value by more standard deviations than this, the load has changed.
CHANGE_DEVIATIONS = 3.0
RISE_DEVIATIONS = 2.0  # standard deviations of lag of the fast value, above which the load rises fast
MIN_CHANGE_RATIO = 0.05  # smaller changes are left to the usual value, however small the noise is
MAX_TREND_RATIO = 2.0  # a trend may double the demand, and not more
BUCKETS_PER_PERIOD = 288  # five minutes of a day
NEW_PERIOD_WEIGHT = 0.5  # weight of the last period, against all earlier ones
MAX_PERIODIC_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class DemandForecast:
    period_s: float = 86400.0  # 0: the load does not repeat
    fast: float = 0.0  # demand, smoothed with each of the time constants
    fast_again: float = 0.0  # `fast`, smoothed a second time
    usual: float = 0.0
    slow: float = 0.0
    variance: float = 0.0  # variance of single observations of the demand
    deviation: float = 0.0  # standard deviation of `fast`
    updated_at: float | None = None
    buckets: tuple[float, ...] = ()  # mean demand by time of the period; negative: not known yet
    bucket_index: int = -1  # number of the bucket that is being filled; -1: none
    bucket_sum: float = 0.0  # sum of demand times seconds in this bucket
    bucket_seconds: float = 0.0

    @property
    def current_demand(self) -> float:
        """The demand now, without most of its noise."""
        return self.usual

    def with_demand(self, demand: float, now: float) -> DemandForecast:
        """Return the forecast, updated with an observed demand. `demand`: the mean since the previous observation."""
        if self.updated_at is None:
            empty = (-1.0,) * (BUCKETS_PER_PERIOD if self.period_s else 0)
            noise = (FIRST_NOISE * demand) ** 2
            return DemandForecast(self.period_s, demand, demand, demand, demand, noise, updated_at=now, buckets=empty)
        seconds = max(now - self.updated_at, 0.0)
        fast = _smooth(self.fast, demand, seconds, FAST_S)
        fast_again = _smooth(self.fast_again, fast, seconds, FAST_S)
        usual, slow = _smooth(self.usual, demand, seconds, USUAL_S), _smooth(self.slow, demand, seconds, SLOW_S)
        largest = 9 * max(self.variance, (FIRST_NOISE * self.usual) ** 2)
        surprise = min((demand - self.usual) ** 2, largest)  # a burst is no noise
        variance = _smooth(self.variance, surprise, seconds, SLOW_S)
        deviation = math.sqrt(variance * seconds / (2 * FAST_S))  # standard deviation of the fast value
        if abs(fast - usual) > max(CHANGE_DEVIATIONS * deviation, MIN_CHANGE_RATIO * usual):
            variance *= (fast / usual) if usual else 1.0  # more requests have more noise
            usual = slow = fast
        smoothed = replace(
            self,
            fast=fast,
            fast_again=fast_again,
            usual=usual,
            slow=slow,
            variance=variance,
            deviation=deviation,
            updated_at=now,
        )
        return smoothed._with_bucket(demand, seconds, now) if self.period_s else smoothed

    def predict(self, now: float, ahead_s: float) -> float:
        """Return the demand that is expected at `now + ahead_s`."""
        lag = self.fast - self.fast_again
        expected = self.usual
        if lag > 0:  # the slower slope goes on for minutes after a rise has ended
            expected += max(self.usual - self.slow, 0.0) / (SLOW_S - USUAL_S) * (USUAL_S + ahead_s)
        if lag > max(RISE_DEVIATIONS * self.deviation, MIN_CHANGE_RATIO * self.usual):
            expected = max(expected, self.fast + lag / FAST_S * (FAST_S + ahead_s))
        trend = min(expected, MAX_TREND_RATIO * self.current_demand)
        return max(trend, self._predict_by_period(now, ahead_s))

    def _predict_by_period(self, now: float, ahead_s: float) -> float:
        if not self.period_s or not self.buckets:
            return 0.0
        before, after = self.buckets[self._bucket_at(now)], self.buckets[self._bucket_at(now + ahead_s)]
        if before <= 0 or after < 0:
            return 0.0
        return self.current_demand * min(after / before, MAX_PERIODIC_RATIO)

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


def _smooth(value: float, new_value: float, seconds: float, time_constant_s: float) -> float:
    return value + (1 - math.exp(-seconds / time_constant_s)) * (new_value - value)
