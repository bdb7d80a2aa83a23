"""plan_decode_work: splits the attention of decode rows into work items for the GPU.

It runs on the host. A decode row is a sequence with one new token, or with a few new tokens, whose queries share one
read of the keys. A row's keys are cut at multiples of TILE_KEYS into parts, whose sizes differ by at most one tile and
do not exceed the maximum part size. That maximum is chosen for each forward pass by estimated time: small parts balance
the load among CTAs, but each part has a fixed cost, and the parts of a row must be merged. The last bits of a row's
result may depend on where its keys are cut, and so on the other rows of the batch. With fixed cuts, all rows are cut at
the same positions, whatever their lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from emberline.kernels.work_limits import CTAS_PER_SM, MAX_HEADS_OF_SMALL_CTA, MAX_ROW_HEADS, MAX_SMALL_HEAD_DIM

IntArray = NDArray[np.int32]

TILE_KEYS = 64
MAX_NEW_TOKENS = 32  # new tokens of a sequence in decode rows, if any row has several queries
PART_SIZES = sorted({c << i for i in range(24) for c in (1, 3)})  # tiles in a part: 1 2 3 4 6 8 12 ..
SIZES_BELOW_SHARE, SIZES_ABOVE_SHARE = 4, 2  # candidates: sizes below the fair share, and sizes from there on
# Costs in tiles, fitted to timings of 26 batches on an H200: the fixed cost of a part; the merge of one more partial
# result of a row; the share of the last part's time during which other CTAs are idle. Up to MAX_ROUNDS_IN_STEP
# rounds, all CTAs wait for each other after every round, which makes a round ROUND_FACTOR times as long as its parts.
PART_COST, MERGE_COST, LAST_PART_WEIGHT, ROUND_FACTOR = 0.3, 0.3, 0.25, 1.05
MAX_ROUNDS_IN_STEP = 3
MIN_WINDOW_PART_TILES = 2  # tiles in a part of a window; shorter parts take longer to merge than to compute
# Fixed cuts, in keys: every 512 up to 4,096, from there on 4 parts for each doubling. 512 keys take longer than the
# fixed cost of a part, and are few enough for a single row.
FIXED_CUTS = np.array([*range(0, 4096, 512), *(c << i for i in range(12) for c in range(4096, 8192, 1024)), 1 << 24])
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


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows, in the order of their tokens. A sequence may be split into several rows."""

    sequences: NDArray[np.int64]  # index of the row's sequence
    context: IntArray  # keys before the row's tokens; for a later row of a sequence, these include new tokens
    counts: IntArray  # number of new tokens; 0 for padding


def max_row_heads(head_dim: int) -> int:
    """Return the largest product of queries and query heads per KV head that a row of the CUDA kernel may have."""
    return MAX_ROW_HEADS if head_dim <= MAX_SMALL_HEAD_DIM else MAX_HEADS_OF_SMALL_CTA


def max_row_queries(group: int) -> int:
    """Return the number of queries that a decode row may have, for `group` query heads per KV head."""
    return max(1, MAX_ROW_HEADS // group)


def split_decode_rows(context: ArrayLike, counts: ArrayLike, max_queries: int) -> DecodeRows:
    """Return decode rows of at most `max_queries` queries each for sequences with `counts` new tokens.

    `context` has the number of keys of each sequence before its new tokens. A sequence without new tokens gets one row
    without queries.
    """
    before, tokens = np.asarray(context, np.int32), np.asarray(counts, np.int32)
    assert not len(tokens) or tokens.max() <= MAX_NEW_TOKENS, f"a sequence has more than {MAX_NEW_TOKENS} new tokens"
    pieces = np.maximum(1, -(-tokens // max_queries))
    sequences = np.repeat(np.arange(len(tokens)), pieces)
    first = (np.arange(len(sequences)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_queries
    row_counts = np.minimum(tokens[sequences] - first, max_queries)
    return DecodeRows(sequences, (before[sequences] + first).astype(np.int32), row_counts.astype(np.int32))


def ctas_per_sm(group: int, max_queries: int, head_dim: int) -> int:
    """Return how many CTAs an SM computes at the same time if rows have up to `max_queries` queries."""
    is_small = group * max_queries <= MAX_HEADS_OF_SMALL_CTA and head_dim <= MAX_SMALL_HEAD_DIM
    return CTAS_PER_SM if is_small else CTAS_PER_SM // 2


def count_window_parts(rows: int, kv_heads: int, num_ctas: int, window: int) -> int:
    """Return into how many parts the keys of each decode row are cut in a layer with a window.

    `num_ctas`: CTAs that the GPU computes at the same time. The parts of all rows fit into `max_work_items`. The
    number does not depend on the lengths of rows, because with a window no row has many keys to read.
    """
    parts = -(-num_ctas // (rows * kv_heads))
    return max(1, min(parts, window // (MIN_WINDOW_PART_TILES * TILE_KEYS)))


def max_fixed_work_items(rows: int, max_length: int) -> int:
    """Return an upper bound of the work items of `rows` rows of at most `max_length` keys with fixed cuts."""
    return rows * int(np.searchsorted(FIXED_CUTS, max_length))


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
    ctas_per_sm: int = CTAS_PER_SM,
    fixed_cuts: bool = False,
    merge_cost: float = MERGE_COST,
) -> WorkList:
    """Return the work items for rows of `lengths` keys. The keys of a row's new tokens are included.

    A row of length 0 has no item, and its output stays unchanged. `overlaps_prefill`: prefill attention runs at the
    same time, so some SMs become free later than others. `part_tiles`, one of PART_SIZES, is a fixed maximum part size
    for benchmarks. `ctas_per_sm`: see the function of this name. `fixed_cuts`: cut all rows at the same positions;
    `capacity` must be at least `max_fixed_work_items`. `merge_cost`: the time of merging one more part, in tiles.
    """
    end = np.asarray(lengths, np.int32)
    tiles = (end + (TILE_KEYS - 1)) // TILE_KEYS
    if fixed_cuts:
        return _plan_fixed_cuts(end, capacity)
    size = (
        PART_SIZES.index(part_tiles)
        if part_tiles
        else _choose_part_size(
            tiles, kv_heads, ctas_per_sm * num_sms, 0 if overlaps_prefill else MAX_ROUNDS_IN_STEP, merge_cost
        )
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


def _plan_fixed_cuts(end: IntArray, capacity: int) -> WorkList:
    """Return the work items of rows that are all cut at FIXED_CUTS, those with the most keys first."""
    parts = np.searchsorted(FIXED_CUTS, end)
    count = int(parts.sum())
    assert count <= capacity, "the capacity must be at least max_fixed_work_items"
    work = WorkList(np.zeros(num_data_ints(len(end), capacity), np.int32), len(end), capacity)
    work.data[:HEADER_INTS] = count, 0, 0, 0
    rows = np.argsort(-end, kind="stable")
    row = np.repeat(rows, parts[rows])
    index = np.arange(count) - np.repeat(np.cumsum(parts[rows]) - parts[rows], parts[rows])
    np.cumsum(np.where(parts > 1, parts, 0), out=work.partial_starts[1:])
    item = work.items[:count]
    item[:, 0], item[:, 1] = row, FIXED_CUTS[index]
    np.minimum(FIXED_CUTS[index + 1], end[row], out=item[:, 2], casting="unsafe")
    item[:, 3] = np.where(parts[row] > 1, work.partial_starts[row] + index, -1)
    return work


def _choose_part_size(tiles: IntArray, kv_heads: int, num_ctas: int, max_rounds_in_step: int, merge_cost: float) -> int:
    """Return the index in PART_SIZES of the size with the least estimated time.

    Each of `num_ctas` CTAs takes one part after the other, the longest first. If each takes at most
    `max_rounds_in_step` parts, the time is estimated from the number of parts that a CTA takes, otherwise from the
    total work.
    """
    total, longest = int(tiles.sum()) * kv_heads, int(tiles.max())
    share = bisect_left(PART_SIZES, total / num_ctas)
    candidates = range(max(0, share - SIZES_BELOW_SHARE), share + SIZES_ABOVE_SHARE)
    parts = -(-tiles // np.array([PART_SIZES[size] for size in candidates], np.int32)[:, None])
    counts, max_counts = parts.sum(1).tolist(), parts.max(1).tolist()

    def estimate_cost(count: int, max_parts: int) -> float:
        units, part = count * kv_heads, -(-longest // max(1, max_parts))
        work, rounds = total + PART_COST * units, -(-units // num_ctas)
        merging = merge_cost * max_parts if max_parts > 1 else 0.0
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
