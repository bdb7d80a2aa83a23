"""PrefixMap: which workers last received a prompt with a given prefix.

It is bounded; the least recently seen prefix is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

HOLDERS = 4


class Point(NamedTuple):
    """A prefix of a prompt: the hash of its bytes, and their number."""

    digest: bytes
    length: int


class Seen(NamedTuple):
    workers: tuple[str, ...] = ()  # workers that received the prefix, latest first
    ends: bool = False  # a prompt ended here and no other has continued it yet: a conversation's next request will


class PrefixMap:
    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, points: Sequence[Point], worker: str) -> None:
        continued = self._deepest(points)
        for point in reversed(points):  # the shortest prefix, which most prompts share, is then evicted last
            entry = self._seen.get(point.digest, Seen())
            others = (name for name in entry.workers if name != worker)
            ends = point is not continued and (entry.ends or point is points[-1])
            self._seen[point.digest] = Seen((worker, *others)[:HOLDERS], ends)
            self._seen.move_to_end(point.digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def known(self, points: Sequence[Point]) -> dict[str, int]:
        """Return worker ids with the bytes of this prompt they received, most and then latest first."""
        cached_bytes: dict[str, int] = {}
        for point in reversed(points):
            for worker in self._seen.get(point.digest, Seen()).workers:
                cached_bytes.setdefault(worker, point.length)
        return cached_bytes

    def continues(self, points: Sequence[Point]) -> bool:
        """Whether this prompt continues exactly one earlier prompt, as a conversation does.

        If not, its known prefix may be shared by many prompts, as a system prompt is."""
        deepest = self._deepest(points)
        return deepest is not None and self._seen[deepest.digest].ends

    def _deepest(self, points: Sequence[Point]) -> Point | None:
        return next((point for point in reversed(points) if point.digest in self._seen), None)
