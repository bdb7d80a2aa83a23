"""plan_decode_work: splits the attention of decode rows into work items for the GPU.

It runs on the host. A decode row is a sequence with one new token. Its keys are cut at multiples of TILE_KEYS into
parts, whose sizes differ by at most one tile and do not exceed the maximum part size. That maximum is chosen for each
forward pass by estimated time: small parts balance the load among CTAs, but each part has a fixed cost, and the parts
of a row must be merged. The last bits of a row's result may depend on where its keys are cut, and so on the other rows
of the batch. With fixed cuts, the positions of the cuts depend on nothing but the length of the row.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int32]

TILE_KEYS = 64
CTAS_PER_SM = 2  # CTAs, and so parts, that a multiprocessor (SM) computes at the same time
PART_SIZES = sorted({c << i for i in range(24) for c in (1, 3)})  # tiles in a part: 1 2 3 4 6 8 12 ..
SIZES_BELOW_SHARE, SIZES_ABOVE_SHARE = 4, 2  # candidates: sizes below the fair share, and sizes from there on
# Costs in tiles, fitted to timings of 26 batches on an H200: the fixed cost of a part; the merge of one more partial
# result of a row; the share of the last part's time during which other CTAs are idle. Up to MAX_ROUNDS_IN_STEP
# rounds, all CTAs wait for each other after every round, which makes a round ROUND_FACTOR times as long as its parts.
PART_COST, MERGE_COST, LAST_PART_WEIGHT, ROUND_FACTOR = 0.3, 0.3, 0.25, 1.05
MAX_ROUNDS_IN_STEP = 3
# Fixed cuts: tiles in a part, and the maximum number of parts of a row. Longer rows have parts of 2, 4, 8 .. times the
# size. A part of 512 keys takes longer than its fixed cost and is short enough for a single row.
FIXED_PART_TILES, MAX_FIXED_PARTS = 8, 16
HEADER_INTS = 4  # ints before the items: kernels read items 16 bytes at a time


@dataclass(frozen=True, slots=True)
class WorkList:
    """The attention work items of all decode rows in one forward pass.

    `data` is what the device reads: the number of items, the items, and `partial_starts`.

    An item is (row, first key, end key, index of its partial result); the index is -1 if the item covers its whole row.
    The longest items come first. The partial results of row r have the indices [partial_starts[r],
    partial_starts[r + 1]), in the order of their keys; a row with only one item has no partial results.
    """

    data: IntArray
    rows: int
    capacity: int

    @property
    def count(self) -> int:
        return int(self.data[0])

    @property
    def items(self) -> IntArray:
        """All `capacity` items. The items from index `count` on are undefined."""
        return self.data[HEADER_INTS : HEADER_INTS + 4 * self.capacity].reshape(-1, 4)

    @property
    def partial_starts(self) -> IntArray:
        return self.data[HEADER_INTS + 4 * self.capacity :]


def max_work_items(rows: int, kv_heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` rows of any lengths.

    Each row has one item, and cutting adds more. The maximum part size is at least about a quarter of a CTA's fair
    share of all tiles, which bounds the number of cuts.
    """
    return rows + -(-5 * CTAS_PER_SM * num_sms // kv_heads)


def max_fixed_work_items(rows: int) -> int:
    """Return an upper bound of the work items of `rows` rows with fixed cuts."""
    return rows * MAX_FIXED_PARTS


def num_data_ints(rows: int, capacity: int) -> int:
    """Return the length of `WorkList.data` for this many rows and at most `capacity` items."""
    return HEADER_INTS + 4 * capacity + rows + 1


def plan_decode_work(
    lengths: ArrayLike,
    kv_heads: int,
    num_sms: int,
    capacity: int,
    *,
    overlaps_prefill: bool = False,
    part_tiles: int | None = None,
    fixed_cuts: bool = False,
) -> WorkList:
    """Return the work items for rows that attend to `lengths` keys, including that of the new token.

    A row of length 0 has no item, and its output stays unchanged. `overlaps_prefill`: prefill attention runs at the
    same time, so some SMs become free later than others. `part_tiles`, one of PART_SIZES, is a fixed maximum part size
    for benchmarks. `fixed_cuts`: cut each row at multiples of a size that depends on its length only; `capacity` must
    be at least `max_fixed_work_items`.
    """
    end = np.asarray(lengths, np.int32)
    tiles = (end + (TILE_KEYS - 1)) // TILE_KEYS
    if fixed_cuts:
        return _plan_fixed_cuts(end, tiles, capacity)
    size = (
        PART_SIZES.index(part_tiles)
        if part_tiles
        else _choose_part_size(tiles, kv_heads, CTAS_PER_SM * num_sms, 0 if overlaps_prefill else MAX_ROUNDS_IN_STEP)
    )
    parts = -(-tiles // PART_SIZES[size])
    while (count := int(parts.sum())) > capacity:  # only if `capacity` is less than `max_work_items`
        assert int((tiles > 0).sum()) <= capacity, "the capacity must hold one item for each row"
        size += 1
        parts = -(-tiles // PART_SIZES[size])
    work = WorkList(np.zeros(num_data_ints(len(end), capacity), np.int32), len(end), capacity)
    work.data[:HEADER_INTS] = count, 0, 0, 0
    if parts.max() <= 1:
        _fill_whole_rows(work, count, end, tiles)
    else:
        _fill_cut_rows(work, count, end, tiles, parts)
    return work


def _plan_fixed_cuts(end: IntArray, tiles: IntArray, capacity: int) -> WorkList:
    """Return the work items of rows that are cut at multiples of their own part size."""
    sizes = np.full(len(tiles), FIXED_PART_TILES, np.int32)
    while (is_long := tiles > MAX_FIXED_PARTS * sizes).any():
        sizes[is_long] *= 2
    parts = -(-tiles // sizes)
    count = int(parts.sum())
    assert count <= capacity, "the capacity must be at least max_fixed_work_items"
    work = WorkList(np.zeros(num_data_ints(len(end), capacity), np.int32), len(end), capacity)
    work.data[:HEADER_INTS] = count, 0, 0, 0
    rows = np.argsort(-np.minimum(tiles, sizes), kind="stable")
    row = np.repeat(rows, parts[rows])
    index = np.arange(count) - np.repeat(np.cumsum(parts[rows]) - parts[rows], parts[rows])
    np.cumsum(np.where(parts > 1, parts, 0), out=work.partial_starts[1:])
    item, part_keys = work.items[:count], sizes[row] * TILE_KEYS
    item[:, 0], item[:, 1] = row, index * part_keys
    np.minimum((index + 1) * part_keys, end[row], out=item[:, 2], casting="unsafe")
    item[:, 3] = np.where(parts[row] > 1, work.partial_starts[row] + index, -1)
    return work


def _choose_part_size(tiles: IntArray, kv_heads: int, num_ctas: int, max_rounds_in_step: int) -> int:
    """Return the index in PART_SIZES of the size with the least estimated time.

    Each of `num_ctas` CTAs takes one part after the other, the longest first. If each takes only a few parts, the time
    follows from that number, otherwise from the total work.
    """
    total, longest = int(tiles.sum()) * kv_heads, int(tiles.max())
    share = bisect_left(PART_SIZES, total / num_ctas)
    candidates = range(max(0, share - SIZES_BELOW_SHARE), share + SIZES_ABOVE_SHARE)
    parts = -(-tiles // np.array([PART_SIZES[size] for size in candidates], np.int32)[:, None])
    counts, max_counts = parts.sum(1).tolist(), parts.max(1).tolist()

    def estimate_cost(count: int, max_parts: int) -> float:
        units, part = count * kv_heads, -(-longest // max(1, max_parts))
        work, rounds = total + PART_COST * units, -(-units // num_ctas)
        merging = MERGE_COST * max_parts if max_parts > 1 else 0.0
        if units <= max_rounds_in_step * num_ctas:
            return (
                max((ROUND_FACTOR if rounds > 1 else 1.0) * rounds * work / max(1, units), part + PART_COST) + merging
            )
        return work / num_ctas + LAST_PART_WEIGHT * part + merging

    costs = [estimate_cost(*pair) for pair in zip(counts, max_counts, strict=True)]
    return candidates[costs.index(min(costs))]


def _fill_whole_rows(work: WorkList, count: int, end: IntArray, tiles: IntArray) -> None:
    """Fill the list with one item for each row."""
    row = np.argsort(-tiles, kind="stable")[:count]
    item = work.items[:count]
    item[:, 0], item[:, 1], item[:, 2], item[:, 3] = row, 0, end[row], -1


def _fill_cut_rows(work: WorkList, count: int, end: IntArray, tiles: IntArray, parts: IntArray) -> None:
    """Fill the list with the parts of each row, rows with the largest parts first.

    Part i of n has the tiles [i * tiles // n, (i + 1) * tiles // n) of its row.
    """
    rows = np.argsort(-(tiles // np.maximum(parts, 1)), kind="stable")
    row_counts = parts[rows]
    row = np.repeat(rows, row_counts)
    index = np.arange(count) - np.repeat(np.cumsum(row_counts) - row_counts, row_counts)
    np.cumsum(np.where(parts > 1, parts, 0), out=work.partial_starts[1:])
    row_tiles, pieces = tiles[row], parts[row]
    item = work.items[:count]
    item[:, 0] = row
    item[:, 1] = index * row_tiles // pieces * TILE_KEYS
    np.minimum((index + 1) * row_tiles // pieces * TILE_KEYS, end[row], out=item[:, 2], casting="unsafe")
    item[:, 3] = np.where(pieces > 1, work.partial_starts[row] + index, -1)
