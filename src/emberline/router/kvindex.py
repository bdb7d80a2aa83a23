"""KVIndex: which workers hold a prompt's KV blocks now.

It answers only for workers of which it has every batch; for the others, routing falls back to what was inferred from
requests (`router/prefixmap.py`). No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from emberline.core.blockbatch import BlockBatch
from emberline.router.chains import Chains, Link
from emberline.router.kvfeed import KVFeed
from emberline.router.prefixmap import Point


class State(Enum):
    EXACT = "exact"  # every batch of the worker was applied
    DEGRADED = "degraded"  # a batch is missing, or the connection is down
    FALLBACK = "fallback"  # the worker sends no batches, or more blocks than the index can hold


class KVIndex:
    def __init__(self, most_blocks: int, most_chains: int) -> None:
        """`max_blocks` counts the blocks of all workers together.

        A worker whose blocks exceed what is left of it is no longer indexed."""
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
        """Return the number of blocks that the worker holds; 0 if they are not known exactly."""
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
        """Return the engine's incarnation and the number of the last batch applied.

        ("", 0) means that a snapshot is needed."""
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
        """Whether all blocks that this worker reported fit in the index."""
        return worker not in self._too_large

    def cut(self, worker: str) -> None:
        """Record that the connection to this worker's block events is down."""
        if (feed := self._feeds.get(worker)) is not None:
            feed.cut()

    def forget(self, worker: str) -> None:
        self._feeds.pop(worker, None)
        self._too_large.discard(worker)

    def told(self, points: Sequence[Point], link: Link) -> None:
        """Record the last block of a prompt, as the worker that computed it reported."""
        if points:
            self.chains.told(points[-1], link)

    def read(self, worker: str, points: Sequence[Point], link: Link) -> None:
        """Record the blocks of a prompt's prefixes, if this worker holds the prompt's last block."""
        held = self.holdings(worker)
        if points and link.digest in held:
            size = points[-1].length
            self.chains.spread(points, size, link, lambda digest: held.get(digest) or self._parent(digest))

    def known(self, points: Sequence[Point], seen: Mapping[str, int]) -> dict[str, int]:
        """Return worker ids with the bytes of this prompt that they hold, most first.

        `inferred` is the same as inferred from requests. It counts for workers that are not indexed exactly, and for
        prefixes whose last block no worker has reported yet."""
        positions = [(point.length, link) for point in reversed(points) if (link := self.chains.get(point)) is not None]
        lengths = {length for length, _ in positions}
        cached_bytes: dict[str, int] = {}
        for worker, feed in self._feeds.items():
            if feed.exact:
                cached_bytes[worker] = next((length for length, link in positions if link.digest in feed.held), 0)
        for worker, length in seen.items():
            if worker not in cached_bytes or length not in lengths:
                cached_bytes[worker] = max(cached_bytes.get(worker, 0), length)
        order = {worker: i for i, worker in enumerate(seen)}
        ranked = sorted(cached_bytes.items(), key=lambda item: (-item[1], order.get(item[0], len(order))))
        return {worker: length for worker, length in ranked if length}

    def _parent(self, digest: bytes) -> bytes | None:
        return next((feed.held[digest] for feed in self._feeds.values() if digest in feed.held), None)
