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


class Seen(NamedTuple):
    workers: tuple[str, ...] = ()  # that had it, latest first
    ends: bool = False  # a prompt ended there, and no other has gone on from it: a conversation's next turn will


class PrefixMap:
    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, points: Sequence[Point], worker: str) -> None:
        before = self._deepest(points)
        for point in reversed(points):  # so that the shortest, which most share, is the last to be forgotten
            seen = self._seen.get(point.digest, Seen())
            others = (name for name in seen.workers if name != worker)
            ends = point is not before and (seen.ends or point is points[-1])
            self._seen[point.digest] = Seen((worker, *others)[:HOLDERS], ends)
            self._seen.move_to_end(point.digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def known(self, points: Sequence[Point]) -> dict[str, int]:
        """Workers and the bytes of this prompt they saw; the one that saw most, and of those the latest, first."""
        found: dict[str, int] = {}
        for point in reversed(points):
            for worker in self._seen.get(point.digest, Seen()).workers:
                found.setdefault(worker, point.length)
        return found

    def continues(self, points: Sequence[Point]) -> bool:
        """Whether this prompt goes on from where one other ended, as the next turn of a conversation does. If not, what
        is known of it may be the beginning of many, such as a system prompt."""
        deepest = self._deepest(points)
        return deepest is not None and self._seen[deepest.digest].ends

    def _deepest(self, points: Sequence[Point]) -> Point | None:
        return next((point for point in reversed(points) if point.digest in self._seen), None)
