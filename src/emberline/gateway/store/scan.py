"""Scan: a page of the log, from the newest record to the oldest, in bounded time.

Days are looked at one after the other, and each in stretches of time that are as long as was quick before, so that a
filter which almost nothing passes cannot hold a page up: what was found until then is returned, with where to go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime

from emberline.core.clock import Clock
from emberline.gateway.logs.record import Record, created
from emberline.gateway.store.base import Page
from emberline.gateway.store.filters import Filters
from emberline.gateway.store.rollup import MS

FIRST_STRETCH = 10 * MS["minute"]
SHORTEST = 1000  # ms
QUICK = 0.02  # seconds that a stretch should take
END = 1 << 48

Newest = Callable[[date, bytes, bytes], Awaitable[bytes | None]]  # the id of the last record between two
Select = Callable[[date, Filters, bytes, bytes, int], Awaitable[Sequence[Record]]]


def day_start(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000


def bound(ms: int) -> bytes:
    """Not after any id of this millisecond, and after all of the one before."""
    return min(max(ms, 0), END - 1).to_bytes(6) + bytes(10)


async def scan(
    newest: Newest,
    select: Select,
    days: Sequence[date],
    filters: Filters,
    before: str,
    limit: int,
    patience: float,
    clock: Clock,
) -> Page:
    """`days`: those there are, in any order."""
    deadline = clock.now() + patience
    high = bytes.fromhex(before) if before else bound(END)
    if filters.until is not None:
        high = min(high, bound(filters.until))
    low = bound(filters.since or 0)
    found: list[Record] = []
    stretch = FIRST_STRETCH
    ranges = _ranges(days, low, high)
    while ranges:  # today has hours to come, and tomorrow may be prepared: there is nothing to look for
        day, floor, upper = ranges[0]
        if (last := await newest(day, floor, upper)) is not None:
            ranges[0] = (day, floor, last + b"\0")
            break
        del ranges[0]
    for day, floor, upper in ranges:
        while floor < upper:
            lower = max(floor, bound(created(upper.hex()) - stretch))
            began = clock.now()
            found += await select(day, filters, lower, upper, limit + 1 - len(found))
            now = clock.now()
            if len(found) > limit:
                return Page(found[:limit], True, found[limit - 1].id)
            stretch, upper = _next(stretch, now - began, deadline - now), lower
            if now > deadline and lower > ranges[-1][1]:
                return Page(found, True, lower.hex(), complete=False)
    return Page(found)


def _ranges(days: Sequence[date], low: bytes, high: bytes) -> list[tuple[date, bytes, bytes]]:
    """The part of each day that is asked for, newest first."""
    ranges = []
    for day in sorted(days, reverse=True):
        first = day_start(day)
        floor, upper = max(low, bound(first)), min(high, bound(first + MS["day"]))
        if floor < upper:
            ranges.append((day, floor, upper))
    return ranges


def _next(stretch: int, took: float, left: float) -> int:
    """As much as should be quick, judged by the last one, and fits into the time that is left."""
    aim = max(min(QUICK, left), QUICK / 4)
    return min(max(round(stretch * min(aim / max(took, 1e-6), 4.0)), SHORTEST), MS["day"])
