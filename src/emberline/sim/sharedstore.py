"""SharedStore: a simulated KV store with LRU eviction. It stores the hashes of blocks, but not their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from emberline.core.events import TierStats


class SharedStore:
    name = "store"

    def __init__(self, blocks: int) -> None:
        self._max_blocks = blocks
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._stats = TierStats(capacity=blocks)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        for count, digest in enumerate(hashes):
            if digest not in self._stored:
                return count
        return len(hashes)

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        count = self.lookup(hashes)
        for digest in hashes[:count]:
            self._stored.move_to_end(digest)
        self._stats.loaded_blocks += count
        return count

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        for digest in hashes:
            self._stored[digest] = None
        self._stats.stored_blocks += len(hashes)
        while len(self._stored) > self._max_blocks:
            self._stored.popitem(last=False)
            self._stats.evicted_blocks += 1
        return len(hashes)

    def discard(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._stored.pop(digest, None)

    def refresh(self) -> None:
        pass

    def stats(self) -> TierStats:
        stats = self._stats.copy()
        stats.blocks = len(self._stored)
        return stats

    def close(self) -> None:
        pass
