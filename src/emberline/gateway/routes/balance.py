"""LoadBalancer: the order in which the members of a pool are tried.

It is pure: time and randomness are passed in. A failed member is skipped for a back-off that doubles up to 30 s, unless
every member is in back-off."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.gateway.routes.pool import Member, Pool

WEIGHT = 0.2  # in the moving average of latencies
EXPLORED = 0.05  # fraction of calls that try another member first, so that one that was slow is measured again
RECENT = 128  # latencies kept for the quantile
ENOUGH = 20  # latencies needed for a quantile
SLOW = 0.95
LONGEST_REST = 30.0
MOST = 10_000  # members with statistics
OWN_FAULT = (400, 413, 422)  # the request caused them: they do not count as failures of the member

Place = tuple[str, str, str]  # provider, model, alias of the key


@dataclass(slots=True)
class Times:
    """Latencies in seconds: to the first content of a stream, or to the end of a whole reply."""

    average: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float) -> None:
        self.average = seconds if self.average is None else self.average + WEIGHT * (seconds - self.average)
        self.recent.append(seconds)

    @property
    def slow(self) -> float | None:
        """The latency that few replies exceed, in seconds; None with too few samples."""
        if len(self.recent) < ENOUGH:
            return None
        return sorted(self.recent)[math.ceil(SLOW * len(self.recent)) - 1]


@dataclass(slots=True)
class Health:
    whole: Times = field(default_factory=Times)
    streamed: Times = field(default_factory=Times)
    failures: int = 0  # consecutive
    rests_until: float = 0.0

    def times(self, stream: bool) -> Times:
        return self.streamed if stream else self.whole


class Balance:
    def __init__(self) -> None:
        self._seen: dict[Place, Health] = {}

    def order(
        self,
        pool: Pool,
        members: Sequence[Member],
        costs: Sequence[int | None],
        chance: Callable[[], float],
        *,
        stream: bool,
        now: float,
    ) -> list[Member]:
        """Return the members in the order in which to try them.

        `costs` are the micro-dollars of this call at each member, None if unknown. `draw` returns a random number in
        [0, 1).
        """
        order = sorted(range(len(members)), key=lambda i: _lot(members[i].weight, chance()))
        match pool.choose:
            case "cheapest":
                order.sort(key=lambda i: math.inf if (cost := costs[i]) is None else cost)
            case "fastest" if chance() >= EXPLORED:
                order.sort(key=lambda i: self._average(members[i], stream))
        order.sort(key=lambda i: self._rest(members[i], now))
        return [members[i] for i in order]

    def slow(self, member: Member, stream: bool) -> float | None:
        """Return the seconds after which a second member is called, or None with too few samples."""
        health = self._seen.get(member.place)
        return None if health is None else health.times(stream).slow

    def answered(self, place: Place, seconds: float, *, stream: bool) -> None:
        health = self._of(place)
        health.failures, health.rests_until = 0, 0.0
        health.times(stream).add(seconds)

    def failed(self, place: Place, status: int, now: float) -> None:
        """Start or extend the back-off of a member. `status` is 0 if there was no HTTP response."""
        if status not in OWN_FAULT:
            health = self._of(place)
            health.failures += 1
            health.rests_until = now + min(LONGEST_REST, 2.0 ** min(health.failures - 1, 10))

    def _of(self, place: Place) -> Health:
        if place not in self._seen:
            while len(self._seen) >= MOST:
                del self._seen[next(iter(self._seen))]
            self._seen[place] = Health()
        return self._seen[place]

    def _average(self, member: Member, stream: bool) -> float:
        """Return the average latency, or -1 for a member without samples, so that it is tried first."""
        health = self._seen.get(member.place)
        average = None if health is None else health.times(stream).average
        return -1.0 if average is None else average

    def _rest(self, member: Member, now: float) -> float:
        """Return the seconds of back-off left; members in back-off are tried last."""
        health = self._seen.get(member.place)
        return 0.0 if health is None else max(0.0, health.rests_until - now)


def _lot(weight: float, chance: float) -> float:
    """Return a sort key by which each member comes first in proportion to its weight."""
    return -math.log(1.0 - chance) / weight if weight else math.inf
