"""Rollups: counters over a minute, an hour or a day, for all of a gateway and for each value of a dimension. They are
added up when records are appended, so a page that shows a month reads a few hundred cells and no rows.

Latencies are histograms of five buckets a decade, from which percentiles are read with an error below a bucket's width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import Literal, TypeVar

from emberline.gateway.record import Record

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
WIDE: tuple[Dimension, ...] = ("all", "provider", "model")  # have histograms

EDGES = tuple(round(10 ** (i / 5), 3) for i in range(1, 25))  # ms: a bucket's upper end; one more is for what is longer
BUCKETS = len(EDGES) + 1
SUMS = (
    "requests",
    "errors",
    "cached",
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


@dataclass(frozen=True, slots=True)
class Cell:
    start: int  # ms; of the query's `since` if the time is not kept apart
    value: str
    counts: tuple[int, ...]  # in the order of COUNTERS, or of SUMS

    def __getitem__(self, counter: str) -> int:
        return self.counts[COUNTERS.index(counter)]

    def percentile(self, share: float, of: slice = DURATIONS) -> float | None:
        """Milliseconds; None if there was nothing."""
        counts = self.counts[of]
        rank = share * sum(counts)
        if not rank:
            return None
        for i, count in enumerate(counts):
            if count and rank <= count:
                low, high = EDGES[i - 1] if i else 0.0, EDGES[i] if i < len(EDGES) else EDGES[-1]
                return low + (high - low) * rank / count
            rank -= count
        raise AssertionError("the rank is within the sum")


def tally(records: Iterable[Record]) -> dict[Place, list[int]]:
    """What a batch adds to which cells. Most records of a batch are alike in all but key and user: those are added up
    first, and their sums are then spread over the dimensions."""
    alike: dict[_Alike, list[int]] = {}
    cells: dict[Place, list[int]] = {}
    for record in records:
        start = record.created
        counted = _counted(record)
        where = (start - start % MS["minute"], record.account, record.gateway)
        same = (*where, record.provider, record.model, record.status, record.error)
        _add(alike, same, counted, len(COUNTERS))
        del counted[-2:]  # the buckets
        for dimension, value in zip(_APART, (record.key_id, record.user), strict=True):
            if value:
                _add(cells, _place(dimension, *where, value), counted, len(SUMS))
    for (start, account, gateway, provider, model, status, error), counts in alike.items():
        values = (provider, f"{provider}/{model}" if model else "", str(status), error)
        for dimension, value in zip(_SPREAD, ("", *values), strict=True):
            if value or dimension == "all":
                size = len(COUNTERS) if dimension in WIDE else len(SUMS)
                _add(cells, _place(dimension, start, account, gateway, value), enumerate(counts[:size]), size)
    return _coarser(cells)


_Alike = tuple[int, str, str, str, str, int, str]
_APART: tuple[Dimension, ...] = ("key", "user")
_SPREAD: tuple[Dimension, ...] = ("all", "provider", "model", "status", "error")
_K = TypeVar("_K")


def _place(dimension: Dimension, start: int, account: str, gateway: str, value: str) -> Place:
    """The cell of the smallest unit that the dimension has."""
    unit = DIMENSIONS[dimension][0]
    return (unit, start - start % MS[unit], account, gateway, dimension, value)


def _add(cells: dict[_K, list[int]], place: _K, counted: Iterable[tuple[int, int]], size: int) -> None:
    cell = cells.get(place)
    if cell is None:
        cell = cells[place] = [0] * size
    for index, amount in counted:
        cell[index] += amount


def _coarser(finest: dict[Place, list[int]]) -> dict[Place, list[int]]:
    """With the larger units, which are sums of the smallest."""
    cells = dict(finest)
    for (_, start, account, gateway, dimension, value), counts in finest.items():
        for unit in DIMENSIONS[dimension][1:]:
            place: Place = (unit, start - start % MS[unit], account, gateway, dimension, value)
            cell = cells.get(place)
            cells[place] = counts if cell is None else list(map(add, cell, counts))
    return cells


def _counted(record: Record) -> list[tuple[int, int]]:
    """The counters that are not 0, by their index; at the end its two buckets, the second maybe with nothing."""
    usage, first = record.usage, record.first_byte_ms
    sums = (
        1,
        not record.success,
        record.cached,
        record.micros is None,
        record.micros or 0,
        usage.input,
        usage.cached_read,
        usage.cache_write,
        usage.output,
        usage.reasoning,
        record.duration_ms,
        first is not None,
    )
    counted = [(index, int(amount)) for index, amount in enumerate(sums) if amount]
    counted.append((DURATIONS.start + bisect_left(EDGES, record.duration_ms), 1))
    counted.append((FIRSTS.start + bisect_left(EDGES, first or 0), int(first is not None)))
    return counted
