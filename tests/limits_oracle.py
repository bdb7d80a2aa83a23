"""An oracle for limits, which computes usage from a list of all events, and steps to compare a limiter with."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from hypothesis import strategies as st

from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.rule import LimitRule

START = 1_767_225_590_000  # ten seconds before the end of 2025


@dataclass(slots=True)
class Event:
    at: int
    amount: int
    expires: int
    held: bool = True


@dataclass(slots=True)
class Oracle:
    rule: LimitRule
    events: list[Event] = field(default_factory=list)

    def counts(self, at: int, now: int) -> bool:
        """Return whether usage at time `at` still counts now."""
        per = self.rule.per
        if per == "month" and self.rule.technique == "fixed":
            then, today = (datetime.fromtimestamp(t / 1000, UTC) for t in (at, now))
            return (then.year, then.month) == (today.year, today.month)
        length = 1000 * per if isinstance(per, int) else {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}[per]
        if self.rule.technique == "fixed":
            return at // length == now // length
        slot = -(-length // 60)
        return now // slot - at // slot <= -(-length // slot)

    def used(self, now: int) -> int:
        return sum(event.amount for event in self.events if self._is_counted(event, now) and self.counts(event.at, now))

    def reserve(self, amount: int, now: int, hold: int) -> int | None:
        left = self.rule.limit - self.used(now)
        is_alone = not any(event.held and event.expires > now for event in self.events)
        granted = amount if amount <= left else left if left > 0 and is_alone else None
        if granted is not None:
            self.events.append(Event(now, granted, now + hold))
        return granted

    def settle(self, event: Event, actual: int) -> None:
        event.amount, event.held = actual, False

    @staticmethod
    def _is_counted(event: Event, now: int) -> bool:
        return not event.held or event.expires > now


RULES = st.builds(
    LimitRule,
    name=st.just("r"),
    limit=st.integers(0, 30),
    amount=st.just("tokens"),
    per=st.sampled_from([1, 7, 60, 100, "minute", "hour", "month"]),
    technique=st.sampled_from(["fixed", "sliding"]),
).filter(lambda rule: not (rule.per == "month" and rule.technique == "sliding"))
# (action, amount, milliseconds to hold or to wait, index of the reservation)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "wait"]),
        st.integers(0, 12),
        st.sampled_from([1, 16, 400, 999, 1000, 1001, 3000, 59_000, 61_000, 4_000_000]),
        st.integers(0, 5),
    ),
    max_size=40,
)


async def compare(
    limiter: Limiter, rule: LimitRule, steps: list[tuple[str, int, int, int]], set_time: object = None
) -> None:
    """Assert that limiter and oracle agree at every step. `set_time` sets the clock of a limiter that has its own."""
    oracle, now = Oracle(rule), START
    open_reservations: list[tuple[Reservation, Event]] = []
    for action, amount, ms, which in steps:
        if callable(set_time):
            await set_time(now)
        (usage,) = await limiter.read_bucket_usage([rule.make_claim({}, 0)], now / 1000)
        assert usage.used == oracle.used(now) and oracle.counts(now, now + usage.resets_in_ms - 1)
        if action == "wait":
            now += ms
        elif action == "settle" and open_reservations:
            reservation, event = open_reservations.pop(which % len(open_reservations))
            limiter.settle(reservation, {"tokens": amount})
            oracle.settle(event, amount)
        elif action == "reserve":
            left = rule.limit - oracle.used(now)
            expected = oracle.reserve(amount, now, ms)
            try:
                reservation = await limiter.reserve([rule.make_claim({}, amount)], now / 1000, ms / 1000)
            except LimitExceeded as e:
                assert expected is None and e.remaining == max(0, left)
            else:
                assert reservation.grants[0].amount == expected
                assert reservation.grants[0].remaining == rule.limit - oracle.used(now)
                open_reservations.append((reservation, oracle.events[-1]))
