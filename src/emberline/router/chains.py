"""Chains: which block of tokens a beginning of a prompt's bytes comes to. A worker that has read a prompt tells its
last full block; that of a shorter beginning is one of the blocks before it: about as far along as its bytes are, and
not beyond what prompts with that beginning have in common. Bounded; the least recently told is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from emberline.router.prefixmap import Point

LONGEST = 1 << 24  # blocks of one prompt

Parent = Callable[[bytes], bytes | None]


class Link(NamedTuple):
    """A block, by its hash, and how many there are up to it."""

    digest: bytes
    blocks: int

    def __str__(self) -> str:
        return f"{self.digest.hex()} {self.blocks}"

    @staticmethod
    def read(text: str) -> Link:
        digest, blocks = text.split()
        if not 0 < int(blocks) <= LONGEST:
            raise ValueError(f"{blocks} blocks")
        return Link(bytes.fromhex(digest), int(blocks))


class Chains:
    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._ends: OrderedDict[bytes, Link] = OrderedDict()  # by the beginning's digest

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, point: Point) -> Link | None:
        return self._ends.get(point.digest)

    def told(self, point: Point, link: Link) -> None:
        """Where a whole prompt ends."""
        self._ends[point.digest] = link
        self._ends.move_to_end(point.digest)
        while len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def spread(self, points: Sequence[Point], size: int, link: Link, parent: Parent) -> None:
        """To the beginnings of a prompt of `size` bytes that ends there, if the blocks before are known."""
        line = _line(link, parent)
        for point in points:
            blocks = link.blocks * point.length // size
            if line and blocks:
                known = self._ends.get(point.digest)
                common = _common(known, line, parent) if known is not None else None
                self.told(point, common or Link(line[blocks - 1], blocks))


def _line(link: Link, parent: Parent) -> list[bytes]:
    """All blocks up to this one, or nothing."""
    line = [link.digest]
    while len(line) < link.blocks:
        digest = parent(line[-1])
        if digest is None:
            return []
        line.append(digest)
    return line[::-1]


def _common(link: Link, line: Sequence[bytes], parent: Parent) -> Link | None:
    """The last block that both have; None: there is none, or it cannot be told any more."""
    digest: bytes | None = link.digest
    for blocks in range(link.blocks, 0, -1):
        if digest is None:
            return None
        if blocks <= len(line) and line[blocks - 1] == digest:
            return Link(digest, blocks)
        digest = parent(digest)
    return None
