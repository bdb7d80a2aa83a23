"""LoadBalancer: decides in which order the members of a pool are tried.

Time and randomness are parameters, so that tests control them. A failed member is tried after all other members during
a back-off, which doubles with each failure up to 30 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.gateway.core.pool import ModelPool, PoolMember

NEWEST_SAMPLE_WEIGHT = 0.2  # in the moving average of latencies
EXPLORATION_SHARE = 0.05  # fraction of calls that try another member first, so that one that was slow is measured again
MAX_SAMPLES = 128  # latencies kept for the quantile
MIN_SAMPLES = 20  # latencies needed for a quantile
SLOW_QUANTILE = 0.95
MAX_BACKOFF_S = 30.0
MAX_MEMBERS = 10_000  # members with statistics
REQUEST_FAULT_STATUSES = (400, 413, 422)  # the request caused them: they do not count as failures of the member

MemberKey = tuple[str, str, str]  # provider, model, alias of the key


@dataclass(slots=True)
class LatencySamples:
    """Latencies in seconds.

    The latency of a stream is the time to its first content. The latency of any other reply is the time to its end.
    """

    average: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def add(self, seconds: float) -> None:
        self.average = (
            seconds if self.average is None else self.average + NEWEST_SAMPLE_WEIGHT * (seconds - self.average)
        )
        self.recent.append(seconds)

    @property
    def slow_quantile(self) -> float | None:
        """Return a latency in seconds that few replies exceed, or None with too few samples."""
        if len(self.recent) < MIN_SAMPLES:
            return None
        return sorted(self.recent)[math.ceil(SLOW_QUANTILE * len(self.recent)) - 1]


@dataclass(slots=True)
class MemberHealth:
    whole_replies: LatencySamples = field(default_factory=LatencySamples)
    streams: LatencySamples = field(default_factory=LatencySamples)
    failures: int = 0  # consecutive
    backoff_until: float = 0.0

    def latencies(self, is_streamed: bool) -> LatencySamples:
        return self.streams if is_streamed else self.whole_replies


class LoadBalancer:
    def __init__(self) -> None:
        self._health_by_member: dict[MemberKey, MemberHealth] = {}

    def order_members(
        self,
        pool: ModelPool,
        members: Sequence[PoolMember],
        costs: Sequence[int | None],
        draw_fraction: Callable[[], float],
        *,
        is_streamed: bool,
        now: float,
    ) -> list[PoolMember]:
        """Return the members in the order in which to try them.

        `costs`: the cost of this request at each member in micro-dollars, None if unknown. `draw_fraction` returns a
        random number in [0, 1).
        """
        order = sorted(range(len(members)), key=lambda i: _weighted_sort_key(members[i].weight, draw_fraction()))
        match pool.choose:
            case "cheapest":
                order.sort(key=lambda i: math.inf if (cost := costs[i]) is None else cost)
            case "fastest" if draw_fraction() >= EXPLORATION_SHARE:
                order.sort(key=lambda i: self._average_latency(members[i], is_streamed))
        order.sort(key=lambda i: self._backoff_left_s(members[i], now))
        return [members[i] for i in order]

    def hedge_delay_s(self, member: PoolMember, is_streamed: bool) -> float | None:
        """Return the seconds to wait before a second member is called, or None with too few latency samples."""
        health = self._health_by_member.get(member.member_key)
        return None if health is None else health.latencies(is_streamed).slow_quantile

    def record_success(self, member_key: MemberKey, seconds: float, *, is_streamed: bool) -> None:
        health = self._health_of(member_key)
        health.failures, health.backoff_until = 0, 0.0
        health.latencies(is_streamed).add(seconds)

    def record_failure(self, member_key: MemberKey, status: int, now: float) -> None:
        """Start or extend the back-off of a member, unless the HTTP status shows that the request is invalid.

        `status` is 0 if there was no HTTP response.
        """
        if status not in REQUEST_FAULT_STATUSES:
            health = self._health_of(member_key)
            health.failures += 1
            health.backoff_until = now + min(MAX_BACKOFF_S, 2.0 ** min(health.failures - 1, 10))

    def _health_of(self, member_key: MemberKey) -> MemberHealth:
        if member_key not in self._health_by_member:
            while len(self._health_by_member) >= MAX_MEMBERS:
                del self._health_by_member[next(iter(self._health_by_member))]
            self._health_by_member[member_key] = MemberHealth()
        return self._health_by_member[member_key]

    def _average_latency(self, member: PoolMember, is_streamed: bool) -> float:
        """Return the average latency, or -1 for a member without samples, so that this member is tried first."""
        health = self._health_by_member.get(member.member_key)
        average = None if health is None else health.latencies(is_streamed).average
        return -1.0 if average is None else average

    def _backoff_left_s(self, member: PoolMember, now: float) -> float:
        """Return the remaining seconds of the member's back-off. Members in back-off are tried last."""
        health = self._health_by_member.get(member.member_key)
        return 0.0 if health is None else max(0.0, health.backoff_until - now)


def _weighted_sort_key(weight: float, random_fraction: float) -> float:
    """Return a random sort key for a pool member.

    The probability that a member is sorted first is proportional to its weight.
    """
    return -math.log(1.0 - random_fraction) / weight if weight else math.inf
