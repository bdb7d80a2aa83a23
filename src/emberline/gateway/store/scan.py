"""scan_records: reads a page of the log, newest record first, in bounded time.

A day is searched in intervals of time whose length is adapted to how long the last one took. So a filter that almost no
record matches cannot delay a page: after the timeout the records found so far are returned with a cursor to continue.
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
SHORTEST = 1000
QUICK = 0.02  # duration of one query
END = 1 << 48

Newest = Callable[[date, bytes, bytes], Awaitable[bytes | None]]  # returns the newest id between two ids
Select = Callable[[date, Filters, bytes, bytes, int], Awaitable[Sequence[Record]]]


def day_start(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000


def bound(ms: int) -> bytes:
    """Return the lowest possible id of this millisecond."""
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
    """Return a page. `days`: the days that have records, in any order."""
    deadline = clock.now() + patience
    high = bytes.fromhex(before) if before else bound(END)
    if filters.until is not None:
        high = min(high, bound(filters.until))
    low = bound(filters.since or 0)
    found: list[Record] = []
    interval = FIRST_STRETCH
    ranges = _ranges(days, low, high)
    while ranges:  # skip the time without records: the rest of today, and days that were created in advance
        day, floor, upper = ranges[0]
        if (last := await newest(day, floor, upper)) is not None:
            ranges[0] = (day, floor, last + b"\0")
            break
        del ranges[0]
    for day, floor, upper in ranges:
        while floor < upper:
            lower = max(floor, bound(created(upper.hex()) - interval))
            started = clock.now()
            found += await select(day, filters, lower, upper, limit + 1 - len(found))
            now = clock.now()
            if len(found) > limit:
                return Page(found[:limit], True, found[limit - 1].id)
            interval, upper = _next_interval(interval, now - started, deadline - now), lower
            if now > deadline and lower > ranges[-1][1]:
                return Page(found, True, lower.hex(), complete=False)
    return Page(found)


def _ranges(days: Sequence[date], low: bytes, high: bytes) -> list[tuple[date, bytes, bytes]]:
    """Return the part of each day that lies between two ids, newest first."""
    ranges = []
    for day in sorted(days, reverse=True):
        first = day_start(day)
        floor, upper = max(low, bound(first)), min(high, bound(first + MS["day"]))
        if floor < upper:
            ranges.append((day, floor, upper))
    return ranges


def _next_interval(interval: int, took: float, left: float) -> int:
    """Return the length of the next interval, from the last one's duration and the time that is left."""
    target = max(min(QUICK, left), QUICK / 4)
    return min(max(round(interval * min(target / max(took, 1e-6), 4.0)), SHORTEST), MS["day"])
