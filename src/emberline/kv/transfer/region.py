"""Region: the blocks of a cache as transfers see them, wherever they lie, and the generation of each.

The owner of the cache calls `renew` when a block is to hold something new, before it writes. A reader that saw the same
generation before and after it read has read one content.

Pieces are read and written in the order of the wire: by layer, part, block as the sender has it. In main memory, where
blocks lie side by side or are large, that is done in place; small ones strewn about pass through a staging buffer,
which costs less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.piece import Piece

Ids = NDArray[np.int64]  # of blocks
Marks = NDArray[np.uint64]  # generations
Buffer = bytes | bytearray | memoryview  # or anything else that memoryview takes
LONG = 32 << 10  # bytes in one place that are worth a call of their own


class Region(ABC):
    def __init__(self, layout: Layout, blocks: int, generations: Marks | None = None) -> None:
        """`generations`: where they are kept, if others read them too."""
        self.layout = layout
        self.blocks = blocks
        self.generations = np.zeros(blocks, np.uint64) if generations is None else generations
        assert len(self.generations) == blocks

    def renew(self, block: int) -> None:
        self.generations[block] += 1

    def current(self, blocks: Ids) -> Marks:
        """Their generations now."""
        return self.generations[blocks]

    def holds(self, blocks: Ids, generations: Marks) -> bool:
        """Whether no block has been renewed since."""
        return self.generations[blocks].tobytes() == generations.tobytes()

    @abstractmethod
    def fence(self) -> None:
        """For the owner: what is scattered from now on comes after all that it has begun to do with its cache."""

    def in_place(self, piece: Piece, blocks: Ids) -> list[memoryview] | None:
        """A piece of `blocks` where it lies; None: it had better be gathered and scattered."""
        return None

    @abstractmethod
    def gather(self, piece: Piece, blocks: Ids, wire: Layout, out: memoryview) -> None:
        """A piece, as a sender of layout `wire` would send what these blocks hold."""

    @abstractmethod
    def scatter(self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview) -> None:
        """The way back. All of it is there when this returns."""

    def places(self, piece: Piece, blocks: Ids, wire: Layout, part: int) -> tuple[int, Ids]:
        """A plane as a row of elements of so many bytes, and which of them the piece is made of, in order."""
        ours, theirs = self.layout.tokens, wire.tokens
        if ours == theirs:
            return self.layout.plane_bytes, blocks[piece.first : piece.last]
        count, width = self.layout.strips(part)
        grain = min(ours, theirs)  # tokens of one strip that lie side by side in both
        first = np.arange(piece.first * theirs, piece.last * theirs, grain).reshape(-1, 1, theirs // grain)
        block, token = np.divmod(first, ours)
        strip = np.arange(count).reshape(1, -1, 1)
        index = (blocks[block] * count + strip) * (ours // grain) + token // grain
        return grain * width, index.ravel()


class HostRegion(Region):
    """In main memory."""

    def __init__(self, layout: Layout, parts: Sequence[Buffer], generations: Marks | None = None) -> None:
        """`parts`: layers x blocks x plane bytes each."""
        assert len(parts) == layout.parts
        flat = [memoryview(part).cast("B") for part in parts]
        each = len(flat[0]) // layout.layers
        assert all(len(part) == each * layout.layers for part in flat) and each % layout.plane_bytes == 0
        super().__init__(layout, each // layout.plane_bytes, generations)
        self.parts = flat
        self._planes = [[part[each * i : each * (i + 1)] for part in flat] for i in range(layout.layers)]

    def fence(self) -> None:
        """A step is over before the next is planned."""

    def views(self, piece: Piece, blocks: Ids) -> list[memoryview]:
        """A piece of `blocks` where it lies."""
        return self._views(piece, runs(blocks[piece.first : piece.last]))

    def in_place(self, piece: Piece, blocks: Ids) -> list[memoryview] | None:
        found = runs(blocks[piece.first : piece.last])
        strewn = self.layout.plane_bytes * (piece.last - piece.first) < LONG * len(found)
        return None if strewn else self._views(piece, found)

    def gather(self, piece: Piece, blocks: Ids, wire: Layout, out: memoryview) -> None:
        for plane, row, size, index in self._rows(piece, blocks, wire, out):
            np.take(np.frombuffer(plane, f"V{size}"), index, out=row, mode="clip")  # clip: unbuffered; none is outside

    def scatter(self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview) -> None:
        for plane, row, size, index in self._rows(piece, blocks, wire, data):
            np.frombuffer(plane, f"V{size}")[index] = row

    def _rows(
        self, piece: Piece, blocks: Ids, wire: Layout, data: memoryview
    ) -> Iterator[tuple[memoryview, NDArray[np.void], int, Ids]]:
        """Each plane with its part of the data. Both are made of elements of so many bytes; which of the plane's, says
        the index."""
        places = [self.places(piece, blocks, wire, part) for part in range(self.layout.parts)]
        length = len(data) // ((piece.bottom - piece.top) * self.layout.parts)
        for i, plane in enumerate(self._of(piece)):
            size, index = places[i % len(places)]
            yield plane, np.frombuffer(data[i * length : (i + 1) * length], f"V{size}"), size, index

    def _views(self, piece: Piece, found: list[tuple[int, int]]) -> list[memoryview]:
        size = self.layout.plane_bytes
        return [plane[size * a : size * b] for plane in self._of(piece) for a, b in found]

    def _of(self, piece: Piece) -> Iterator[memoryview]:
        for planes in self._planes[piece.top : piece.bottom]:
            yield from planes


class Staging:
    """Memory that is used again and again by one thread at a time: fresh pages would cost as much as a copy."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def room(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = memoryview(bytearray(size))
        return self._memory[:size]


def move(piece: Piece, source: Region, blocks: Ids, target: Region, into: Ids, staging: Staging) -> None:
    """From cache to cache, with other threads running meanwhile."""
    wire = source.layout
    here = target.in_place(piece, into) if wire.tokens == target.layout.tokens else None
    there = source.in_place(piece, blocks) if here else None
    if here and there:
        _copy(there, here)
    else:
        room = staging.room(piece.size(wire))
        source.gather(piece, blocks, wire, room)
        target.scatter(piece, into, wire, room)


def runs(blocks: Ids) -> list[tuple[int, int]]:
    """Neighbours in memory, as half-open ranges."""
    cuts = ((blocks[1:] - blocks[:-1] != 1).nonzero()[0] + 1).tolist()
    return [(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in pairwise([0, *cuts, len(blocks)])]


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """The same bytes, which the two sides may have cut differently."""
    sources, targets = iter(source), iter(target)
    have = want = memoryview(b"")
    while True:
        have = have or next(sources, have)
        want = want or next(targets, want)
        size = min(len(have), len(want))
        if not size:
            assert not have and not want
            return
        np.copyto(np.frombuffer(want[:size], np.uint8), np.frombuffer(have[:size], np.uint8))
        have, want = have[size:], want[size:]
