"""KVIndex: which workers hold a prompt's blocks now. It knows only of workers whose batches it has all of; of the
others it says nothing, and what was inferred from requests (`router/prefixmap.py`) has to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from emberline.core.blockbatch import BlockBatch
from emberline.router.chains import Chains, Link
from emberline.router.kvfeed import KVFeed
from emberline.router.prefixmap import Point


class State(Enum):
    EXACT = "exact"  # all that the worker said is known
    DEGRADED = "degraded"  # something is missing
    FALLBACK = "fallback"  # it says nothing, or too much


class KVIndex:
    def __init__(self, most_blocks: int, most_chains: int) -> None:
        """`most_blocks`: of all workers together; who has more than is left is not followed."""
        self._most = most_blocks
        self._feeds: dict[str, KVFeed] = {}
        self._too_large: set[str] = set()
        self.chains = Chains(most_chains)

    def __len__(self) -> int:
        return sum(len(feed.held) for feed in self._feeds.values())

    def state(self, worker: str) -> State:
        feed = self._feeds.get(worker)
        if feed is None:
            return State.FALLBACK
        return State.EXACT if feed.exact else State.DEGRADED

    def held(self, worker: str) -> int:
        """Blocks, if all are known."""
        feed = self._feeds.get(worker)
        return len(feed.held) if feed is not None and feed.exact else 0

    def facts(self, worker: str) -> dict[str, Any]:
        return {
            "kv_index": self.state(worker).value,
            "kv_blocks": self.held(worker),
            "kv_seq": self.position(worker)[1],
        }

    def holdings(self, worker: str) -> dict[bytes, bytes]:
        feed = self._feeds.get(worker)
        return feed.held if feed is not None else {}

    def position(self, worker: str) -> tuple[str, int]:
        """Incarnation and number of the last batch: those after it are wanted."""
        feed = self._feeds.get(worker)
        return (feed.incarnation, feed.seq) if feed is not None and feed.whole else ("", 0)

    def apply(self, worker: str, batch: BlockBatch) -> State:
        if worker not in self._too_large:
            self._feeds.setdefault(worker, KVFeed()).take(batch)
            if len(self) > self._most:
                del self._feeds[worker]
                self._too_large.add(worker)
        return self.state(worker)

    def follows(self, worker: str) -> bool:
        """Whether there was room for all that it said."""
        return worker not in self._too_large

    def cut(self, worker: str) -> None:
        """Nothing is heard of it."""
        if (feed := self._feeds.get(worker)) is not None:
            feed.cut()

    def forget(self, worker: str) -> None:
        self._feeds.pop(worker, None)
        self._too_large.discard(worker)

    def told(self, points: Sequence[Point], link: Link) -> None:
        """Where a prompt ends, by who has read it."""
        if points:
            self.chains.told(points[-1], link)

    def read(self, worker: str, points: Sequence[Point], link: Link) -> None:
        """A prompt that ends there is in this worker's cache: so are its beginnings."""
        held = self.holdings(worker)
        if points and link.digest in held:
            size = points[-1].length
            self.chains.spread(points, size, link, lambda digest: held.get(digest) or self._parent(digest))

    def known(self, points: Sequence[Point], seen: Mapping[str, int]) -> dict[str, int]:
        """Workers and the bytes of this prompt they hold, most first. `seen`: the same, inferred. That counts for
        workers that are not followed exactly, and for beginnings which nobody has read to the end yet."""
        linked = [(point.length, link) for point in reversed(points) if (link := self.chains.get(point)) is not None]
        lengths = {length for length, _ in linked}
        found: dict[str, int] = {}
        for worker, feed in self._feeds.items():
            if feed.exact:
                found[worker] = next((length for length, link in linked if link.digest in feed.held), 0)
        for worker, length in seen.items():
            if worker not in found or length not in lengths:
                found[worker] = max(found.get(worker, 0), length)
        order = {worker: i for i, worker in enumerate(seen)}
        best = sorted(found.items(), key=lambda each: (-each[1], order.get(each[0], len(order))))
        return {worker: length for worker, length in best if length}

    def _parent(self, digest: bytes) -> bytes | None:
        return next((feed.held[digest] for feed in self._feeds.values() if digest in feed.held), None)
