"""Work lists cover every key once, cut rows by length and part size only, and balance the load."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kernels import work_limits, worklist
from emberline.kernels.worklist import (
    MAX_NEW_TOKENS,
    PART_SIZES,
    TILE_KEYS,
    WorkList,
    ctas_per_sm,
    max_row_queries,
    num_data_ints,
    plan_decode_work,
    split_decode_rows,
)

SMS = 132


def plan_for(lengths: list[int], kv_heads: int = 8) -> WorkList:
    return plan_decode_work(
        np.array(lengths, np.int32), kv_heads, SMS, work_limits.max_work_items(len(lengths), kv_heads, SMS)
    )


def spans(work: WorkList, row: int) -> list[tuple[int, int, int]]:
    """Return (first, end, partial) of a row's items, sorted by key."""
    return sorted((first, end, partial) for r, first, end, partial in work.items[: work.count].tolist() if r == row)


@given(
    st.lists(st.integers(0, 40_000) | st.integers(0, 300), min_size=1, max_size=40),
    st.sampled_from([1, 2, 3, 8, 32]),
)
def test_every_key_is_in_one_item(lengths: list[int], kv_heads: int) -> None:
    work = plan_for(lengths, kv_heads)
    assert work.partial_starts[0] == 0 and len(work.partial_starts) == len(lengths) + 1
    for row, length in enumerate(lengths):
        parts = spans(work, row)
        edges = [0, *(end for _, end, _ in parts)]
        assert [first for first, _, _ in parts] == edges[:-1] and edges[-1] == length
        assert all(edge % TILE_KEYS == 0 for edge in edges[1:-1]) and bool(parts) == (length > 0)
        begin, end = work.partial_starts[row : row + 2].tolist()
        indices = [partial for _, _, partial in parts]
        assert indices == (list(range(begin, end)) if len(parts) > 1 else [-1] * len(parts))
        assert len(parts) > 1 or begin == end
    assert work.count == sum(len(spans(work, row)) for row in range(len(lengths))) <= work.capacity


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 5000))
def test_cuts_depend_on_length_and_part_size(lengths: list[int], other: int) -> None:
    """Rows of equal length are cut equally, and another row's length matters only through the part size."""
    work = plan_for([*lengths, lengths[0], other])
    chunk = part_size_of([*lengths, lengths[0], other], work)
    assert [s[:2] for s in spans(work, 0)] == [s[:2] for s in spans(work, len(lengths))]
    for row, length in enumerate(lengths):
        tiles = -(-length // TILE_KEYS)
        parts = -(-tiles // chunk)
        assert [s[0] for s in spans(work, row)] == [i * tiles // parts * TILE_KEYS for i in range(parts)]


def part_size_of(lengths: list[int], work: WorkList) -> int:
    """Return the part size that explains how all rows were cut."""
    tiles = [-(-length // TILE_KEYS) for length in lengths]
    parts = [len(spans(work, row)) for row in range(len(lengths))]
    return next(c for c in PART_SIZES if [-(-t // c) for t in tiles] == parts)


@pytest.mark.parametrize(
    "lengths", [[640], [640] * 8, [640] * 32, [640] * 256, [30_000], [300] * 255 + [30_000], [100] * 63 + [30_000]]
)
def test_load_is_balanced(lengths: list[int]) -> None:
    """If free CTAs take items in order, two per SM, none gets much more than its share."""
    kv_heads = 8
    work = plan_for(lengths, kv_heads)
    sizes = [-(-end // TILE_KEYS) - first // TILE_KEYS for _, first, end, _ in work.items[: work.count].tolist()]
    assert all(later <= size + 1 for size, later in pairwise(sizes))
    loads = np.zeros(2 * SMS)
    for size in np.repeat(sizes, kv_heads):
        loads[loads.argmin()] += size
    share = sum(sizes) * kv_heads / len(loads)
    assert loads.max() <= 1.35 * share + 2
    assert len(sizes) <= max(1.2 * len(lengths), 4 * 2 * SMS / kv_heads), "each part costs something"


def test_short_rows_are_not_cut() -> None:
    work = plan_for([640] * 128)
    assert work.count == 128 and (work.items[:128, 3] == -1).all() and not work.partial_starts.any()


def test_small_capacity_gives_larger_parts() -> None:
    lengths = np.array([5000, 1, 700], np.int32)
    work = plan_decode_work(lengths, 8, SMS, 4)
    assert len(work.data) == num_data_ints(3, 4) and work.count == 4
    assert sum(end - first for _, first, end, _ in work.items.tolist()) == lengths.sum()
    with pytest.raises(AssertionError):
        plan_decode_work(lengths, 8, SMS, 2)


def test_part_size_is_about_the_fastest_measured() -> None:
    """The chosen part size is about as fast as the fastest in worklist_timings.json.

    The file has rows as (length, count), and for each part size the microseconds of decode attention of one layer of
    Llama 8B on an H200, measured by `emberline.bench.gpu.worklist_sweep`, the lesser of two runs.
    """
    timings = json.loads((Path(__file__).parent / "worklist_timings.json").read_text("utf-8"))
    lost = {}
    for name, case in timings.items():
        lengths = [length for length, count in case["rows"] for _ in range(count)]
        chunk = part_size_of(lengths, plan_for(lengths))
        lost[name] = case["us"][str(chunk)] / min(case["us"].values())
    assert max(lost.values()) < 1.05, lost
    assert sum(lost.values()) / len(lost) < 1.015, lost


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, MAX_NEW_TOKENS)), min_size=1, max_size=20),
    st.integers(1, 32),
)
def test_every_new_token_is_in_one_row(sequences: list[tuple[int, int]], max_queries: int) -> None:
    """Rows have the tokens of each sequence in order, after the keys that precede them."""
    before, counts = zip(*sequences, strict=True)
    rows = split_decode_rows(before, counts, max_queries)
    found = [
        (sequence, context + j)
        for sequence, context, count in zip(rows.sequences, rows.context, rows.counts, strict=True)
        for j in range(count)
    ]
    assert found == [(i, past + j) for i, (past, count) in enumerate(sequences) for j in range(count)]
    assert rows.counts.max() <= max_queries and rows.context.dtype == rows.counts.dtype == np.int32
    assert len(rows.counts) == sum(max(1, -(-count // max_queries)) for count in counts)
    assert all(count for i, count in zip(rows.sequences, rows.counts, strict=True) if counts[i]), "padding only as such"


def test_too_many_new_tokens_are_rejected() -> None:
    """Behind MAX_NEW_TOKENS keys, the kernel may read keys that the same step writes."""
    with pytest.raises(AssertionError, match="new tokens"):
        split_decode_rows([100], [MAX_NEW_TOKENS + 1], 8)


def test_short_drafts_use_small_ctas() -> None:
    """With 4 query heads per KV head, up to 4 queries fit into a small CTA."""
    assert [work_limits.list_row_queries(5, group, 128) for group in (1, 4, 8, 16)] == [(5,), (4, 5), (2, 5), (5,)]
    assert work_limits.list_row_queries(4, 4, 128) == (4,) and work_limits.list_row_queries(5, 4, 256) == (5,)
    assert all(ctas_per_sm(4, queries, 128) == count for queries, count in zip((4, 5), (2, 1), strict=True))


def test_queries_of_a_row_are_limited_by_heads() -> None:
    assert [max_row_queries(group) for group in (1, 2, 4, 7, 8, 11, 16)] == [32, 16, 8, 4, 4, 2, 2]
    assert all(max_row_queries(group) * group <= 32 for group in range(1, 17)) and max_row_queries(64) == 1
    assert [ctas_per_sm(4, queries, 128) for queries in (1, 4, 5, 8)] == [2, 2, 1, 1] and ctas_per_sm(2, 1, 256) == 1
    lengths, room = np.array([645], np.int32), work_limits.max_work_items(1, 32, SMS)
    small, large = (plan_decode_work(lengths, 32, SMS, room, ctas_per_sm=ctas).count for ctas in (2, 1))
    assert small > large, "with half as many CTAs, a row is cut into fewer parts"


def test_rows_are_cut_finer_beside_prefill() -> None:
    """SMs that become free later must find work left."""
    lengths, room = np.array([4131] * 32, np.int32), work_limits.max_work_items(32, 8, SMS)
    alone, beside = (plan_decode_work(lengths, 8, SMS, room, overlaps_prefill=beside).count for beside in (False, True))
    assert alone == 32 and beside >= 64


def test_the_parts_of_windows_fit_into_the_capacity() -> None:
    for rows in (1, 2, 7, 64, 500):
        for kv_heads in (1, 2, 8, 32):
            for window in (1, 128, 1024, 8192, 1 << 20):
                parts = worklist.count_window_parts(rows, kv_heads, 264, window)
                assert parts >= 1 and rows * parts <= work_limits.max_work_items(rows, kv_heads, 132)
    assert worklist.count_window_parts(1, 8, 264, 128) == 1, "a short window is not worth a merge"
    assert worklist.count_window_parts(1, 8, 264, 8192) > 16, "one row uses many SMs"
    assert worklist.count_window_parts(64, 8, 264, 8192) == 1
