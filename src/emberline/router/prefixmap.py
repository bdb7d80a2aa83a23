"""PrefixMap: which workers saw a beginning of a prompt last. Bounded; the least recently seen is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

HOLDERS = 4  # workers remembered for one beginning


class Point(NamedTuple):
    """A beginning of a prompt: a hash of its bytes, and how many they are."""

    digest: bytes
    length: int


class PrefixMap:
    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._seen: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # workers, latest first

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, points: Sequence[Point], worker: str) -> None:
        for point in reversed(points):  # so that the shortest, which most share, is the last to be forgotten
            others = (name for name in self._seen.get(point.digest, ()) if name != worker)
            self._seen[point.digest] = (worker, *others)[:HOLDERS]
            self._seen.move_to_end(point.digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def known(self, points: Sequence[Point]) -> dict[str, int]:
        """Workers and the bytes of this prompt they saw; the one that saw most, and of those the latest, first."""
        found: dict[str, int] = {}
        for point in reversed(points):
            for worker in self._seen.get(point.digest, ()):
                found.setdefault(worker, point.length)
        return found
