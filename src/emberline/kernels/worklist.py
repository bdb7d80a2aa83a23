"""plan: how the keys of rows that decode one token each are shared out over the GPU. Made on the host for every step.

A row's keys are cut at multiples of TILE into parts of equal size, give or take a tile, of at most `chunk` tiles. The
chunk is the one, of a few around a CTA's share of all tiles, with which the device should be done first: small parts
share the work evenly, but each costs something, and those of a row must be merged. So where a row is cut depends on its
own length and the chunk. A row that is cut elsewhere may differ in its last bits.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]

TILE = 64
PARTS = 2  # at a time on a multiprocessor: it holds two CTAs
SIZES = sorted({c << i for i in range(24) for c in (1, 3)})  # of a chunk: 1 2 3 4 6 8 12 ..
BELOW, ABOVE = 4, 2  # of these, how many below a share and how many from there on are looked at
# What chunks cost, in tiles, as timings of 26 batches on an H200 have it: a part, besides its tiles; one more partial
# of a row to be merged; of the last part, which some wait for, how much. Up to FEW_ROUNDS, all wait for every round: it
# takes ROUND times what its parts do.
EACH, MERGE, WAIT, ROUND = 0.3, 0.3, 0.25, 1.05
FEW_ROUNDS = 3
HEAD = 4  # ints before the items, which are read 16 bytes at a time


@dataclass(frozen=True, slots=True)
class WorkList:
    """`data` is what travels: the count of items, the items, where each row's partials begin.

    An item is (row, first key, end key, index of its partial, or -1 if it is all of its row); the longest come first,
    give or take a tile.
    Partials of row r are [row_parts[r], row_parts[r + 1]), in the order of their keys; none for a row of one item.
    """

    data: Ints
    rows: int
    capacity: int

    @property
    def count(self) -> int:
        return int(self.data[0])

    @property
    def items(self) -> Ints:
        """All `capacity` of them; those past `count` mean nothing."""
        return self.data[HEAD : HEAD + 4 * self.capacity].reshape(-1, 4)

    @property
    def row_parts(self) -> Ints:
        return self.data[HEAD + 4 * self.capacity :]


def capacity(rows: int, kv_heads: int, sms: int) -> int:
    """Items that `rows` rows of any lengths never exceed: one each, and what the chunk cuts off beyond. Four sizes
    below a share of total * kv_heads / (PARTS * sms) is at least a quarter of it, less one."""
    return rows + -(-5 * PARTS * sms // kv_heads)


def ints(rows: int, capacity: int) -> int:
    """Of `WorkList.data`."""
    return HEAD + 4 * capacity + rows + 1


def plan(
    lengths: ArrayLike, kv_heads: int, sms: int, capacity: int, *, beside: bool = False, chunk: int | None = None
) -> WorkList:
    """For rows that see `lengths` keys, their own included. A row of length 0 has no item, and its output stays as it
    is. `beside`: some of the device comes free later than the rest. `chunk`, one of SIZES, overrides the choice, for
    measurements."""
    end = np.asarray(lengths, np.int32)
    tiles = (end + (TILE - 1)) // TILE
    size = SIZES.index(chunk) if chunk else _chunk(tiles, kv_heads, PARTS * sms, 0 if beside else FEW_ROUNDS)
    parts = -(-tiles // SIZES[size])
    while (count := int(parts.sum())) > capacity:  # only where the caller has less room than `capacity` says
        assert int((tiles > 0).sum()) <= capacity, "there must be room for an item of each row"
        size += 1
        parts = -(-tiles // SIZES[size])
    made = WorkList(np.zeros(ints(len(end), capacity), np.int32), len(end), capacity)
    made.data[:HEAD] = count, 0, 0, 0
    if parts.max() <= 1:
        _whole(made, count, end, tiles)
    else:
        _cut(made, count, end, tiles, parts)
    return made


def _chunk(tiles: Ints, kv_heads: int, slots: int, few: int) -> int:
    """Which of SIZES. Parts are handed out to `slots`, the longest first, so a few rounds take what their number says,
    and many what their sum says."""
    total, longest = int(tiles.sum()) * kv_heads, int(tiles.max())
    share = bisect_left(SIZES, total / slots)
    looked_at = range(max(0, share - BELOW), share + ABOVE)
    parts = -(-tiles // np.array([SIZES[size] for size in looked_at], np.int32)[:, None])
    counts, mosts = parts.sum(1).tolist(), parts.max(1).tolist()

    def cost(count: int, most: int) -> float:
        units, part = count * kv_heads, -(-longest // max(1, most))
        work, rounds = total + EACH * units, -(-units // slots)
        merging = MERGE * most if most > 1 else 0.0
        if units <= few * slots:
            return max((ROUND if rounds > 1 else 1.0) * rounds * work / max(1, units), part + EACH) + merging
        return work / slots + WAIT * part + merging

    costs = [cost(count, most) for count, most in zip(counts, mosts, strict=True)]
    return looked_at[costs.index(min(costs))]


def _whole(made: WorkList, count: int, end: Ints, tiles: Ints) -> None:
    """Every row in one item."""
    row = np.argsort(-tiles, kind="stable")[:count]
    item = made.items[:count]
    item[:, 0], item[:, 1], item[:, 2], item[:, 3] = row, 0, end[row], -1


def _cut(made: WorkList, count: int, end: Ints, tiles: Ints, parts: Ints) -> None:
    """Rows by the size of their parts; part i of n has tiles [i * tiles // n, (i + 1) * tiles // n) of its row."""
    rows = np.argsort(-(tiles // np.maximum(parts, 1)), kind="stable")
    some = parts[rows]
    row = np.repeat(rows, some)
    index = np.arange(count) - np.repeat(np.cumsum(some) - some, some)
    np.cumsum(np.where(parts > 1, parts, 0), out=made.row_parts[1:])
    of, pieces = tiles[row], parts[row]
    item = made.items[:count]
    item[:, 0] = row
    item[:, 1] = index * of // pieces * TILE
    np.minimum((index + 1) * of // pieces * TILE, end[row], out=item[:, 2], casting="unsafe")
    item[:, 3] = np.where(pieces > 1, made.row_parts[row] + index, -1)
