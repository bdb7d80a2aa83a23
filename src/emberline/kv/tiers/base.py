"""Tier: the interface of a store of KV blocks, addressed by block hash.

A block hash covers the block's tokens, all tokens before them, the cache's layout and the tenant's salt
(tokens/blockhash.py). So only a request of the same tenant with the same prefix can name a block, and a tier needs no
other access check.

A block is only usable together with all blocks before it, so lookups and loads return counts of leading blocks. A tier
never raises for its own failures: a block that cannot be read is a miss, and the engine computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emberline.core.events import TierStats

PAGE_BYTES = 4096  # buffers start and end on page boundaries, for pinning and for direct disk I/O


def buffer_bytes_for(block_bytes: int) -> int:
    """Return the size of a buffer for one block: its bytes rounded up to whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class Tier(Protocol):
    name: str

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain the tier is known to hold. Never blocks."""
        ...

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are worth trying to load. Never blocks.

        This exceeds `lookup` for a tier that must be queried over the network to know what it holds.
        """
        ...

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Copy blocks into the buffers and return how many leading ones were copied; the rest is undefined."""
        ...

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Store copies of the blocks, evicting others if needed, and return how many were stored."""
        ...

    def discard(self, hashes: Sequence[bytes]) -> None: ...

    def refresh(self) -> None:
        """Update the tier's index with changes that other processes made to shared storage."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
