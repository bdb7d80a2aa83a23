"""Rollups: counters over a minute, an hour or a day, for all of a gateway and for each value of a dimension. They are
added up when records are appended, so a page that shows a month reads a few hundred cells and no rows.

Latencies are histograms of five buckets a decade, from which percentiles are read with an error below a bucket's width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Literal

from emberline.gateway.logs.record import Record

Unit = Literal["minute", "hour", "day"]
Dimension = Literal["all", "provider", "model", "status", "error", "key", "user"]

MS: dict[Unit, int] = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
# What may have very many values is not kept by the minute, and without histograms.
DIMENSIONS: dict[Dimension, tuple[Unit, ...]] = {
    "all": ("minute", "hour", "day"),
    "provider": ("minute", "hour", "day"),
    "model": ("minute", "hour", "day"),
    "status": ("hour", "day"),
    "error": ("hour", "day"),
    "key": ("hour", "day"),
    "user": ("day",),
}
HOURS_KEPT = 90  # days that cells by the hour outlast their records
WIDE: tuple[Dimension, ...] = ("all", "provider", "model")  # have histograms
MANY: tuple[Dimension, ...] = ("key", "user")  # may have thousands of values
OTHERS = "\u2026"  # the value under which users are counted together: see crowd.py

EDGES = tuple(round(10 ** (i / 5), 3) for i in range(1, 25))  # ms: a bucket's upper end; one more is for what is longer
BUCKETS = len(EDGES) + 1
SUMS = (
    "requests",
    "errors",
    "cached",
    "rescued",  # answered by a later step of a chain
    "unpriced",  # requests whose price is not known: `micros` is without them
    "micros",
    "tokens_in",
    "cached_read",
    "cache_write",
    "tokens_out",
    "reasoning",
    "duration_ms",
    "first_bytes",  # requests that had one: streams
)
COUNTERS = (*SUMS, *(f"duration_{i}" for i in range(BUCKETS)), *(f"first_{i}" for i in range(BUCKETS)))
DURATIONS = slice(len(SUMS), len(SUMS) + BUCKETS)
FIRSTS = slice(len(SUMS) + BUCKETS, len(SUMS) + 2 * BUCKETS)

Place = tuple[Unit, int, str, str, Dimension, str]  # unit, start, account, gateway, dimension, value


@dataclass(frozen=True, slots=True)
class RollupQuery:
    account: str
    unit: Unit
    since: int  # ms, itself included; cells are whole, so it counts from the start of its unit
    until: int  # ms, itself not
    gateway: str = ""  # empty: all of the account together
    dimension: Dimension = "all"
    value: str = ""  # of the dimension; empty: each
    over_time: bool = True  # a cell for each start; else one for the whole time
    limit: int = 10_000  # cells; if time is not kept apart, those that cost most

    def pieces(self) -> list[tuple[Unit, int, int]]:
        """The stretch of time, as cells to be added up: the largest that lie in it whole."""
        size = MS[self.unit]
        units = DIMENSIONS[self.dimension]
        return _pieces(units[units.index(self.unit) :], self.since - self.since % size, -(-self.until // size) * size)


def _pieces(units: Sequence[Unit], since: int, until: int) -> list[tuple[Unit, int, int]]:
    if since >= until:
        return []
    unit, *larger = units
    if larger:
        size = MS[larger[0]]
        low, high = -(-since // size) * size, until - until % size
        if low < high:
            return [*_pieces([unit], since, low), *_pieces(larger, low, high), *_pieces([unit], high, until)]
    return [(unit, since, until)]


@dataclass(frozen=True, slots=True)
class Cell:
    start: int  # ms; of the query's `since` if the time is not kept apart
    value: str
    counts: tuple[int, ...]  # in the order of COUNTERS, or of SUMS

    def __getitem__(self, counter: str) -> int:
        return self.counts[COUNTERS.index(counter)]

    def percentiles(self, shares: Sequence[float], of: slice = DURATIONS) -> list[float | None]:
        """Milliseconds; None if there was nothing."""
        counts = self.counts[of]
        below = list(accumulate(counts))  # and in the bucket itself
        return [_at(share * below[-1], counts, below) if below[-1] else None for share in shares]


def _at(rank: float, counts: Sequence[int], below: Sequence[int]) -> float:
    i = bisect_left(below, rank)
    low, high = EDGES[i - 1] if i else 0.0, EDGES[min(i, len(EDGES) - 1)]
    return low + (high - low) * (rank - below[i] + counts[i]) / counts[i]


def tally(records: Iterable[Record]) -> dict[Place, Sequence[int]]:
    """What a batch adds to which cells. Most records of a batch are alike in all but key and user: those are added up
    first, and their sums are then spread over the dimensions."""
    alike: dict[_Alike, list[int]] = {}
    cells: dict[Place, Sequence[int]] = {}
    for record in records:
        start = record.created
        sums = _sums(record)
        where = (start - start % MS["minute"], record.account, record.gateway)
        for dimension, value in zip(_APART, (record.key_id, record.user), strict=True):
            if value:
                _add(cells, _place(dimension, *where, value), sums)
        same = (*where, record.provider, record.model, record.status, record.error)
        counts = alike.get(same)
        if counts is None:
            counts = alike[same] = [0] * len(COUNTERS)
        counts[: len(SUMS)] = map(add, counts, sums)
        counts[DURATIONS.start + bisect_left(EDGES, record.duration_ms)] += 1
        if record.first_byte_ms is not None:
            counts[FIRSTS.start + bisect_left(EDGES, record.first_byte_ms)] += 1
    for (start, account, gateway, provider, model, status, error), counts in alike.items():
        values = (provider, f"{provider}/{model}" if model else "", str(status), error)
        for dimension, value in zip(_SPREAD, ("", *values), strict=True):
            if value or dimension == "all":
                spread = counts if dimension in WIDE else counts[: len(SUMS)]
                _add(cells, _place(dimension, start, account, gateway, value), spread)
    return _coarser(cells)


_Alike = tuple[int, str, str, str, str, int, str]
_APART: tuple[Dimension, ...] = ("key", "user")
_SPREAD: tuple[Dimension, ...] = ("all", "provider", "model", "status", "error")


def _place(dimension: Dimension, start: int, account: str, gateway: str, value: str) -> Place:
    """The cell of the smallest unit that the dimension has."""
    unit = DIMENSIONS[dimension][0]
    return (unit, start - start % MS[unit], account, gateway, dimension, value)


def _add(cells: dict[Place, Sequence[int]], place: Place, counts: Sequence[int]) -> None:
    before = cells.get(place)
    cells[place] = counts if before is None else list(map(add, before, counts))


def _coarser(finest: dict[Place, Sequence[int]]) -> dict[Place, Sequence[int]]:
    """With the larger units, which are sums of the smallest."""
    cells = dict(finest)
    for (_, start, account, gateway, dimension, value), counts in finest.items():
        for unit in DIMENSIONS[dimension][1:]:
            _add(cells, (unit, start - start % MS[unit], account, gateway, dimension, value), counts)
    return cells


def _sums(record: Record) -> tuple[int, ...]:
    """In the order of SUMS."""
    usage = record.usage
    return (
        1,
        not record.success,
        record.cached,
        record.rescued,
        record.micros is None,
        record.micros or 0,
        usage.input,
        usage.cached_read,
        usage.cache_write,
        usage.output,
        usage.reasoning,
        record.duration_ms,
        record.first_byte_ms is not None,
    )
