"""The meaning of a limit, spelled out with a list of everything that ever happened; and steps to try a limiter with."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from hypothesis import strategies as st

from emberline.gateway.errors import LimitExceeded
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.rule import Rule

START = 1_767_225_590_000  # ten seconds before the end of 2025


@dataclass(slots=True)
class Event:
    at: int
    amount: int
    expires: int
    held: bool = True


@dataclass(slots=True)
class Oracle:
    rule: Rule
    events: list[Event] = field(default_factory=list)

    def counts(self, at: int, now: int) -> bool:
        """Whether something of the moment `at` still counts now."""
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
        return sum(event.amount for event in self.events if self._there(event, now) and self.counts(event.at, now))

    def reserve(self, amount: int, now: int, hold: int) -> int | None:
        left = self.rule.limit - self.used(now)
        alone = not any(event.held and event.expires > now for event in self.events)
        granted = amount if amount <= left else left if left > 0 and alone else None
        if granted is not None:
            self.events.append(Event(now, granted, now + hold))
        return granted

    def settle(self, event: Event, actual: int) -> None:
        event.amount, event.held = actual, False

    @staticmethod
    def _there(event: Event, now: int) -> bool:
        return not event.held or event.expires > now


RULES = st.builds(
    Rule,
    name=st.just("r"),
    limit=st.integers(0, 30),
    amount=st.just("tokens"),
    per=st.sampled_from([1, 7, 60, 100, "minute", "hour", "month"]),
    technique=st.sampled_from(["fixed", "sliding"]),
).filter(lambda rule: not (rule.per == "month" and rule.technique == "sliding"))
# (what, amount, milliseconds held or passed, which reservation)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "wait"]),
        st.integers(0, 12),
        st.sampled_from([1, 16, 400, 999, 1000, 1001, 3000, 59_000, 61_000, 4_000_000]),
        st.integers(0, 5),
    ),
    max_size=40,
)


async def compare(limiter: Limiter, rule: Rule, steps: list[tuple[str, int, int, int]], move: object = None) -> None:
    """The limiter and the oracle say the same at every step. `move` tells time to a limiter with its own clock."""
    oracle, now = Oracle(rule), START
    kept: list[tuple[Reservation, Event]] = []
    for what, amount, ms, which in steps:
        if callable(move):
            await move(now)
        (spent,) = await limiter.spent([rule.claim({}, 0)], now / 1000)
        assert spent.used == oracle.used(now) and oracle.counts(now, now + spent.resets - 1)
        if what == "wait":
            now += ms
        elif what == "settle" and kept:
            reservation, event = kept.pop(which % len(kept))
            limiter.settle(reservation, {"tokens": amount})
            oracle.settle(event, amount)
        elif what == "reserve":
            left = rule.limit - oracle.used(now)
            expected = oracle.reserve(amount, now, ms)
            try:
                made = await limiter.reserve([rule.claim({}, amount)], now / 1000, ms / 1000)
            except LimitExceeded as e:
                assert expected is None and e.remaining == max(0, left)
            else:
                assert made.grants[0].amount == expected
                assert made.grants[0].remaining == rule.limit - oracle.used(now)
                kept.append((made, oracle.events[-1]))
