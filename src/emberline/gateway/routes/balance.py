"""Balance: which member of a pool is asked first, and which after it. Pure: time and chance are handed in, and what was
seen of each member is all it knows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.gateway.routes.pool import Member, Pool

WEIGHT = 0.2  # of the newest time in the average
EXPLORED = 0.05  # of calls go elsewhere, so that who was slow once is seen again
RECENT = 128  # times a percentile is made of
ENOUGH = 20  # of them
SLOW = 0.95  # of all are faster
LONGEST_REST = 30.0  # seconds
MOST = 10_000  # members remembered
OWN_FAULT = (400, 413, 422)  # what a request brought upon itself

Place = tuple[str, str, str]  # provider, model, alias of the key


@dataclass(slots=True)
class Times:
    """Seconds to the first content of a stream, or to the end of a whole reply."""

    average: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float) -> None:
        self.average = seconds if self.average is None else self.average + WEIGHT * (seconds - self.average)
        self.recent.append(seconds)

    @property
    def slow(self) -> float | None:
        """None: too little is known."""
        if len(self.recent) < ENOUGH:
            return None
        return sorted(self.recent)[math.ceil(SLOW * len(self.recent)) - 1]


@dataclass(slots=True)
class Health:
    whole: Times = field(default_factory=Times)
    streamed: Times = field(default_factory=Times)
    failures: int = 0  # in a row
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
        """`costs`: micro-dollars of this call at each member, None where it is not known. `chance`: from 0 up to 1."""
        shuffled = sorted(range(len(members)), key=lambda i: _lot(members[i].weight, chance()))
        match pool.choose:
            case "cheapest":
                shuffled.sort(key=lambda i: math.inf if (cost := costs[i]) is None else cost)
            case "fastest" if chance() >= EXPLORED:
                shuffled.sort(key=lambda i: self._average(members[i], stream))
        shuffled.sort(key=lambda i: self._rest(members[i], now))
        return [members[i] for i in shuffled]

    def slow(self, member: Member, stream: bool) -> float | None:
        """Seconds by which it has answered nearly always."""
        seen = self._seen.get(member.place)
        return None if seen is None else seen.times(stream).slow

    def answered(self, place: Place, seconds: float, *, stream: bool) -> None:
        health = self._of(place)
        health.failures, health.rests_until = 0, 0.0
        health.times(stream).add(seconds)

    def failed(self, place: Place, status: int, now: float) -> None:
        """`status` of its refusal; 0: there was none."""
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
        """Who was never asked comes first."""
        seen = self._seen.get(member.place)
        average = None if seen is None else seen.times(stream).average
        return -1.0 if average is None else average

    def _rest(self, member: Member, now: float) -> float:
        """How long it should be left alone: who failed is asked last."""
        seen = self._seen.get(member.place)
        return 0.0 if seen is None else max(0.0, seen.rests_until - now)


def _lot(weight: float, chance: float) -> float:
    """The smallest comes first: each member as often as it weighs."""
    return -math.log(1.0 - chance) / weight if weight else math.inf
