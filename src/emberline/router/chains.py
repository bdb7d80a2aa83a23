"""PrefixBlockMap: maps a prefix of a prompt's bytes to the KV block in which it ends.

A worker reports the last full block of each prompt it has computed. The block of a shorter prefix is estimated: it lies
at the same fraction of the block chain as the prefix does of the bytes, but not beyond the blocks that all prompts with
this prefix have in common. The map is bounded; the least recently recorded prefix is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from emberline.router.prefixmap import Point

LONGEST = 1 << 24

Parent = Callable[[bytes], bytes | None]


class Link(NamedTuple):
    """A block: its hash, and the number of blocks from the start of the prompt up to it."""

    digest: bytes
    blocks: int

    def __str__(self) -> str:
        return f"{self.digest.hex()} {self.blocks}"

    @staticmethod
    def read(text: str) -> Link:
        digest, blocks = text.split()
        if not 0 < int(blocks) <= LONGEST:
            raise ValueError(f"the block count {blocks} is not between 1 and {LONGEST}")
        return Link(bytes.fromhex(digest), int(blocks))


class Chains:
    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._ends: OrderedDict[bytes, Link] = OrderedDict()  # by the prefix's digest

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, point: Point) -> Link | None:
        return self._ends.get(point.digest)

    def told(self, point: Point, link: Link) -> None:
        """Record the block in which this prefix ends."""
        self._ends[point.digest] = link
        self._ends.move_to_end(point.digest)
        while len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def spread(self, points: Sequence[Point], size: int, link: Link, parent: Parent) -> None:
        """Record the blocks of all prefixes of a prompt that ends at `position`.

        Nothing is recorded unless all blocks before it are known."""
        chain = _line(link, parent)
        for point in points:
            blocks = link.blocks * point.length // size
            if chain and blocks:
                recorded = self._ends.get(point.digest)
                common = _common(recorded, chain, parent) if recorded is not None else None
                self.told(point, common or Link(chain[blocks - 1], blocks))


def _line(link: Link, parent: Parent) -> list[bytes]:
    """Return the hashes of all blocks up to this one, or [] if one of them is unknown."""
    chain = [link.digest]
    while len(chain) < link.blocks:
        digest = parent(chain[-1])
        if digest is None:
            return []
        chain.append(digest)
    return chain[::-1]


def _common(link: Link, line: Sequence[bytes], parent: Parent) -> Link | None:
    """Return the last block that both chains contain.

    Return None if there is none or a block on the way is unknown."""
    digest: bytes | None = link.digest
    for blocks in range(link.blocks, 0, -1):
        if digest is None:
            return None
        if blocks <= len(line) and line[blocks - 1] == digest:
            return Link(digest, blocks)
        digest = parent(digest)
    return None
