"""Tier: a place where blocks lie by their hash. A hash names tokens, all that came before them, the cache's layout and
the tenant's salt (tokens/blockhash.py), so whoever has the hash may have the block, and nobody else can ask for it.

Blocks are only worth something from the first of a prefix on: answers are counts of leading blocks. A tier never
raises for what happens to it: a block that cannot be had is a miss, and recomputing is always allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emberline.core.events import TierStats

PAGE = 4096  # buffers begin and end on pages, so that devices and disks can reach them directly


def buffer_size(block_bytes: int) -> int:
    """Of the buffer that a block travels in."""
    return -(-block_bytes // PAGE) * PAGE


class Tier(Protocol):
    name: str

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain are known to be here, from the first on. Never waits, so the engine's loop may ask."""
        ...

    def guess(self, hashes: Sequence[bytes]) -> int:
        """How many it is worth trying to load. Never waits either; more than `lookup` where only a look would tell."""
        ...

    def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copies blocks to buffers, and says how many could be, from the first on. What lies in the others' buffers
        means nothing."""
        ...

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Keeps copies; says of how many. Others may have to go for them."""
        ...

    def forget(self, hashes: Sequence[bytes]) -> None: ...

    def refresh(self) -> None:
        """Sees what others did to a place that is shared."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
