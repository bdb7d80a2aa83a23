"""scan_records: reads a page of log records, newest first, in bounded time.

Each query searches one time interval of a day. The length of the next interval depends on how long the last query took.
So a filter that matches almost no record cannot delay a page: after the timeout, the records found until then are
returned with a cursor to continue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime

from emberline.core.clock import Clock
from emberline.gateway.core.log_record import LogRecord, parse_created_ms
from emberline.gateway.store.base import RecordPage
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.rollup import UNIT_MS

FIRST_INTERVAL_MS = 10 * UNIT_MS["minute"]
MIN_INTERVAL_MS = 1000
INTERVAL_TARGET_S = 0.02  # duration of one query
MAX_TIME_MS = 1 << 48

FindNewest = Callable[[date, bytes, bytes], Awaitable[bytes | None]]  # returns the newest id between two ids
SelectRecords = Callable[[date, LogFilters, bytes, bytes, int], Awaitable[Sequence[LogRecord]]]


def day_start_ms(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000


def lowest_id_at(time_ms: int) -> bytes:
    """Return the lowest id that a record of this millisecond can have."""
    return min(max(time_ms, 0), MAX_TIME_MS - 1).to_bytes(6) + bytes(10)


async def scan_records(
    find_newest_id: FindNewest,
    select_records: SelectRecords,
    days: Sequence[date],
    filters: LogFilters,
    before: str,
    limit: int,
    timeout_s: float,
    clock: Clock,
) -> RecordPage:
    """Return a page of log records. `days` are the days that have records, in any order."""
    deadline = clock.now() + timeout_s
    high = bytes.fromhex(before) if before else lowest_id_at(MAX_TIME_MS)
    if filters.until is not None:
        high = min(high, lowest_id_at(filters.until))
    low = lowest_id_at(filters.since or 0)
    found: list[LogRecord] = []
    interval = FIRST_INTERVAL_MS
    ranges = _id_ranges_by_day(days, low, high)
    while ranges:  # skip the time without records: the rest of today, and days that were created in advance
        day, floor, upper = ranges[0]
        if (last := await find_newest_id(day, floor, upper)) is not None:
            ranges[0] = (day, floor, last + b"\0")
            break
        del ranges[0]
    for day, floor, upper in ranges:
        while floor < upper:
            lower = max(floor, lowest_id_at(parse_created_ms(upper.hex()) - interval))
            started = clock.now()
            found += await select_records(day, filters, lower, upper, limit + 1 - len(found))
            now = clock.now()
            if len(found) > limit:
                return RecordPage(found[:limit], True, found[limit - 1].id)
            interval, upper = _next_interval_ms(interval, now - started, deadline - now), lower
            if now > deadline and lower > ranges[-1][1]:
                return RecordPage(found, True, lower.hex(), complete=False)
    return RecordPage(found)


def _id_ranges_by_day(days: Sequence[date], first_id: bytes, end_id: bytes) -> list[tuple[date, bytes, bytes]]:
    """Return (day, first id, end id) for each day between two ids, newest day first."""
    ranges = []
    for day in sorted(days, reverse=True):
        first = day_start_ms(day)
        floor, upper = max(first_id, lowest_id_at(first)), min(end_id, lowest_id_at(first + UNIT_MS["day"]))
        if floor < upper:
            ranges.append((day, floor, upper))
    return ranges


def _next_interval_ms(interval_ms: int, query_s: float, remaining_s: float) -> int:
    """Return the length of the next interval from the last query's duration and the time that is left."""
    target = max(min(INTERVAL_TARGET_S, remaining_s), INTERVAL_TARGET_S / 4)
    return min(max(round(interval_ms * min(target / max(query_s, 1e-6), 4.0)), MIN_INTERVAL_MS), UNIT_MS["day"])
