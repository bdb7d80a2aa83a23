"""Rollups compared with direct counts, and percentiles with the values themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from gateway_records import NOON, make_record
from hypothesis import given
from hypothesis import strategies as st

from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.store import rollup
from emberline.wire.usage import Usage


def record(parts: tuple[Any, ...]) -> LogRecord:
    at, model, status, key, user, micros, duration, first = parts
    return make_record(
        NOON + at,
        model=model,
        status=status,
        success=status < 400,
        error="upstream_failed" if status >= 400 else "",
        key_id=key,
        user=user,
        micros=micros,
        usage=Usage(input=7, cached_read=3, output=micros or 0) if key else Usage(),
        duration_ms=duration,
        first_byte_ms=first,
    )


RECORDS = st.lists(
    st.tuples(
        st.integers(0, 3 * rollup.UNIT_MS["hour"]),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([200, 500]),
        st.sampled_from(["", "k"]),
        st.sampled_from(["", "ann", "bob"]),
        st.none() | st.integers(0, 9),
        st.integers(0, 100_000),
        st.none() | st.integers(0, 100_000),
    ).map(record),
    max_size=30,
)


@given(RECORDS)
def test_cells_equal_direct_counts(records: list[LogRecord]) -> None:
    counted: dict[tuple[Any, ...], Counter[str]] = {}
    for each in records:
        model = f"openai/{each.model}" if each.model else ""
        values = {"all": "", "provider": "openai", "model": model, "status": str(each.status), "error": each.error}
        values |= {"key": each.key_id, "user": each.user}
        for dimension, units in rollup.DIMENSION_UNITS.items():
            if values[dimension] or dimension == "all":
                for unit in units:
                    start = each.created_ms // rollup.UNIT_MS[unit] * rollup.UNIT_MS[unit]
                    place = (unit, start, "acme", "main", dimension, values[dimension])
                    counts = counted.setdefault(place, Counter())
                    counts["requests"] += 1
                    counts["errors"] += not each.success
                    counts["micros"] += each.micros or 0
                    is_known_cost = each.micros is not None or (not each.success and not each.usage.total)
                    counts["unpriced"] += not is_known_cost
                    counts["tokens_in"] += each.usage.input
                    counts["tokens_out"] += each.usage.output
                    counts["duration_ms"] += each.duration_ms
                    counts["first_bytes"] += each.first_byte_ms is not None
    cells = {
        place: rollup.RollupCell(place[1], place[5], tuple(counts))
        for place, counts in rollup.count_records(records).items()
    }
    assert cells.keys() == counted.keys()
    for place, cell in cells.items():
        assert {name: cell[name] for name in counted[place]} == dict(counted[place])
        assert len(cell.counts) == (
            len(rollup.COUNTERS) if place[4] in rollup.HISTOGRAM_DIMENSIONS else len(rollup.SUMS)
        )
        if place[4] in rollup.HISTOGRAM_DIMENSIONS:
            assert sum(cell.counts[rollup.DURATION_BUCKETS]) == cell["requests"]
            assert sum(cell.counts[rollup.FIRST_BYTE_BUCKETS]) == cell["first_bytes"]


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_percentile_is_in_the_right_bucket(durations: list[int], share: float) -> None:
    cells = rollup.count_records(make_record(NOON, duration_ms=each) for each in durations)
    cell = rollup.RollupCell(
        0, "", tuple(cells["day", NOON // rollup.UNIT_MS["day"] * rollup.UNIT_MS["day"], "acme", "main", "all", ""])
    )
    (found,) = cell.percentiles([share])
    rank = share * len(durations)
    exact = sorted(durations)[max(0, -int(-rank // 1) - 1)]
    bucket = next((i for i, edge in enumerate(rollup.BUCKET_EDGES_MS) if exact <= edge), rollup.BUCKET_COUNT - 1)
    assert (
        found is not None
        and (rollup.BUCKET_EDGES_MS[bucket - 1] if bucket else 0)
        <= found
        <= rollup.BUCKET_EDGES_MS[min(bucket, len(rollup.BUCKET_EDGES_MS) - 1)]
    )


def test_empty_histogram_has_no_percentile() -> None:
    assert rollup.RollupCell(0, "", (0,) * len(rollup.COUNTERS)).percentiles([0.5]) == [None]
    cells = rollup.count_records([make_record()])
    cell = rollup.RollupCell(
        0, "", tuple(cells["day", NOON // rollup.UNIT_MS["day"] * rollup.UNIT_MS["day"], "acme", "main", "all", ""])
    )
    assert cell.percentiles([0.5, 0.9], rollup.FIRST_BYTE_BUCKETS) == [None, None]


@given(
    st.sampled_from([(dimension, unit) for dimension, units in rollup.DIMENSION_UNITS.items() for unit in units]),
    st.integers(0, 3 * rollup.UNIT_MS["day"]),
    st.integers(0, 3 * rollup.UNIT_MS["day"]),
)
def test_time_range_is_split_without_gaps(which: tuple[Any, Any], since: int, length: int) -> None:
    dimension, unit = which
    query = rollup.RollupQuery("acme", unit, NOON + since, NOON + since + length, dimension=dimension)
    pieces, size = query.split_by_unit(), rollup.UNIT_MS[unit]
    low, high = (NOON + since) // size * size, -(-(NOON + since + length) // size) * size
    assert [each[1] for each in pieces] + [high] == [low] + [each[2] for each in pieces] if pieces else low >= high
    for kind, start, end in pieces:
        assert start % rollup.UNIT_MS[kind] == end % rollup.UNIT_MS[kind] == 0 and start < end
    most = 2 * 59 + 2 * 23 + 4  # at most: partial units at both ends, and days between
    assert sum((end - start) // rollup.UNIT_MS[kind] for kind, start, end in pieces) <= most or unit == "day"


@pytest.mark.parametrize(
    ("fields", "unpriced"),
    [
        ({"status": 200}, 1),
        ({"status": 502, "success": False}, 0),
        ({"status": 502, "success": False, "usage": Usage(input=5)}, 1),
        ({"status": 200, "provider": "emberline", "usage": Usage(input=5)}, 0),
        ({"status": 200, "provider": "ollama"}, 0),
        ({"status": 200, "micros": 0}, 0),
    ],
)
def test_failed_and_local_requests_are_not_counted_as_unpriced(fields: dict[str, Any], unpriced: int) -> None:
    cells = rollup.count_records([make_record(**fields)])
    assert {cell[rollup.COUNTERS.index("unpriced")] for cell in cells.values()} == {unpriced}
