"""Rollups: sums by minute, hour and day, for a whole gateway and for each value of a dimension.

A dimension is an attribute of requests, such as the model or the key. A rollup row is called a cell. Cells are updated
when records are appended, so a page about a month reads a few hundred cells and no records. Latencies are histograms
with five buckets per decade; the error of a percentile is below the width of a bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Literal

from emberline.gateway.core.cost import LOCAL_PROVIDERS
from emberline.gateway.core.log_record import LogRecord

RollupUnit = Literal["minute", "hour", "day"]
Dimension = Literal["all", "provider", "model", "status", "error", "key", "user"]

UNIT_MS: dict[RollupUnit, int] = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
# Dimensions that may have very many values have no cells by minute and no histograms.
DIMENSION_UNITS: dict[Dimension, tuple[RollupUnit, ...]] = {
    "all": ("minute", "hour", "day"),
    "provider": ("minute", "hour", "day"),
    "model": ("minute", "hour", "day"),
    "status": ("hour", "day"),
    "error": ("hour", "day"),
    "key": ("hour", "day"),
    "user": ("day",),
}
HOURLY_CELLS_KEPT_DAYS = 90  # after their records are deleted
HISTOGRAM_DIMENSIONS: tuple[Dimension, ...] = ("all", "provider", "model")
HIGH_CARDINALITY_DIMENSIONS: tuple[Dimension, ...] = ("key", "user")  # thousands of values are possible
OTHER_USERS = "\u2026"  # value of the cell that merges small users: see daily_users.py

BUCKET_EDGES_MS = tuple(
    round(10 ** (i / 5), 3) for i in range(1, 25)
)  # upper ends; one more bucket has all longer times
BUCKET_COUNT = len(BUCKET_EDGES_MS) + 1
SUMS = (
    "requests",
    "errors",
    "cached",
    "rescued",  # answered by a fallback
    "unpriced",  # requests whose cost is unknown, so that `micros` does not include it
    "micros",
    "tokens_in",
    "cached_read",
    "cache_write",
    "tokens_out",
    "reasoning",
    "duration_ms",
    "first_bytes",  # requests with a time to the first byte: streams
)
COUNTERS = (*SUMS, *(f"duration_{i}" for i in range(BUCKET_COUNT)), *(f"first_{i}" for i in range(BUCKET_COUNT)))
DURATION_BUCKETS = slice(len(SUMS), len(SUMS) + BUCKET_COUNT)
FIRST_BYTE_BUCKETS = slice(len(SUMS) + BUCKET_COUNT, len(SUMS) + 2 * BUCKET_COUNT)

CellKey = tuple[RollupUnit, int, str, str, Dimension, str]  # unit, start, account, gateway, dimension, value


@dataclass(frozen=True, slots=True)
class RollupQuery:
    account: str
    unit: RollupUnit
    since: int  # ms since 1970, inclusive, rounded down to a whole unit
    until: int  # ms since 1970, exclusive, rounded up to a whole unit
    gateway: str = ""  # empty: all gateways of the account together
    dimension: Dimension = "all"
    value: str = ""  # of the dimension; empty: all values
    over_time: bool = True  # a cell for each unit of time; else one for the whole time
    limit: int = 10_000  # cells; without over_time, those with the highest cost

    def split_by_unit(self) -> list[tuple[RollupUnit, int, int]]:
        """Split the query's time range into ranges of minutes, hours or days, so that few cells are read.

        Return (unit, since, until) of each range.
        """
        size = UNIT_MS[self.unit]
        units = DIMENSION_UNITS[self.dimension]
        since, until = self.since - self.since % size, -(-self.until // size) * size
        return _split_by_unit(units[units.index(self.unit) :], since, until)


def _split_by_unit(units: Sequence[RollupUnit], since: int, until: int) -> list[tuple[RollupUnit, int, int]]:
    if since >= until:
        return []
    unit, *larger = units
    if larger:
        size = UNIT_MS[larger[0]]
        low, high = -(-since // size) * size, until - until % size
        if low < high:
            return [
                *_split_by_unit([unit], since, low),
                *_split_by_unit(larger, low, high),
                *_split_by_unit([unit], high, until),
            ]
    return [(unit, since, until)]


@dataclass(frozen=True, slots=True)
class RollupCell:
    start: int  # ms since 1970; without over_time, the query's `since`
    value: str
    counts: tuple[int, ...]  # in the order of COUNTERS, or of SUMS

    def __getitem__(self, counter: str) -> int:
        return self.counts[COUNTERS.index(counter)]

    def percentiles(self, shares: Sequence[float], buckets: slice = DURATION_BUCKETS) -> list[float | None]:
        """Return latency percentiles in milliseconds, for shares such as 0.99.

        They are None if the histogram is empty.
        """
        counts = self.counts[buckets]
        cumulative = list(accumulate(counts))
        total = cumulative[-1]
        return [_interpolate_percentile_ms(share * total, counts, cumulative) if total else None for share in shares]


def _interpolate_percentile_ms(rank: float, counts: Sequence[int], cumulative: Sequence[int]) -> float:
    i = bisect_left(cumulative, rank)
    low, high = BUCKET_EDGES_MS[i - 1] if i else 0.0, BUCKET_EDGES_MS[min(i, len(BUCKET_EDGES_MS) - 1)]
    return low + (high - low) * (rank - cumulative[i] + counts[i]) / counts[i]


def count_records(records: Iterable[LogRecord]) -> dict[CellKey, Sequence[int]]:
    """Return the counts that a batch of records adds to each rollup cell.

    Most records of a batch differ only in key and user. So the counts of records that are equal in all other dimensions
    are summed up first, and the sums are added to the cells of these dimensions.
    """
    groups: dict[_Group, list[int]] = {}
    cells: dict[CellKey, Sequence[int]] = {}
    for record in records:
        start = record.created_ms
        sums = _record_sums(record)
        where = (start - start % UNIT_MS["minute"], record.account, record.gateway)
        for dimension, value in zip(_UNGROUPED, (record.key_id, record.user), strict=True):
            if value:
                _add_counts(cells, _smallest_cell_key(dimension, *where, value), sums)
        group = (*where, record.provider, record.model, record.status, record.error)
        counts = groups.get(group)
        if counts is None:
            counts = groups[group] = [0] * len(COUNTERS)
        counts[: len(SUMS)] = map(add, counts, sums)
        counts[DURATION_BUCKETS.start + bisect_left(BUCKET_EDGES_MS, record.duration_ms)] += 1
        if record.first_byte_ms is not None:
            counts[FIRST_BYTE_BUCKETS.start + bisect_left(BUCKET_EDGES_MS, record.first_byte_ms)] += 1
    for (start, account, gateway, provider, model, status, error), counts in groups.items():
        values = (provider, f"{provider}/{model}" if model else "", str(status), error)
        for dimension, value in zip(_GROUPED, ("", *values), strict=True):
            if value or dimension == "all":
                cell_counts = counts if dimension in HISTOGRAM_DIMENSIONS else counts[: len(SUMS)]
                _add_counts(cells, _smallest_cell_key(dimension, start, account, gateway, value), cell_counts)
    return _add_larger_units(cells)


_Group = tuple[int, str, str, str, str, int, str]  # minute, account, gateway, provider, model, status, error
_UNGROUPED: tuple[Dimension, ...] = ("key", "user")
_GROUPED: tuple[Dimension, ...] = ("all", "provider", "model", "status", "error")


def _smallest_cell_key(dimension: Dimension, start: int, account: str, gateway: str, value: str) -> CellKey:
    """Return the key of the cell in the smallest unit (minute, hour or day) that the dimension has."""
    unit = DIMENSION_UNITS[dimension][0]
    return (unit, start - start % UNIT_MS[unit], account, gateway, dimension, value)


def _add_counts(cells: dict[CellKey, Sequence[int]], key: CellKey, counts: Sequence[int]) -> None:
    before = cells.get(key)
    cells[key] = counts if before is None else list(map(add, before, counts))


def _add_larger_units(smallest_cells: dict[CellKey, Sequence[int]]) -> dict[CellKey, Sequence[int]]:
    """Return the cells together with the cells of larger units (hour, day), which are their sums."""
    cells = dict(smallest_cells)
    for (_, start, account, gateway, dimension, value), counts in smallest_cells.items():
        for unit in DIMENSION_UNITS[dimension][1:]:
            _add_counts(cells, (unit, start - start % UNIT_MS[unit], account, gateway, dimension, value), counts)
    return cells


def _has_unknown_cost(record: LogRecord) -> bool:
    """Return whether a provider may have charged an amount that is not in the record.

    A failed request without usage costs nothing, and neither does a request to a local provider.
    """
    may_cost = record.success or record.usage.total > 0
    return record.micros is None and may_cost and record.provider not in LOCAL_PROVIDERS


def _record_sums(record: LogRecord) -> tuple[int, ...]:
    """Return the counts that one record adds to a rollup cell, in the order of the column names in SUMS."""
    usage = record.usage
    return (
        1,
        not record.success,
        record.cached,
        record.answered_by_fallback,
        _has_unknown_cost(record),
        record.micros or 0,
        usage.input,
        usage.cached_read,
        usage.cache_write,
        usage.output,
        usage.reasoning,
        record.duration_ms,
        record.first_byte_ms is not None,
    )
