"""RetainedBlocks: blocks that outlive their request, as they are pinned or a pull may still write to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emberline.kv.pool import BlockPool

if TYPE_CHECKING:  # imports numpy, which would delay the start of a GPU engine
    from emberline.kv.pulls import Pull


class RetainedBlocks:
    def __init__(self, pool: BlockPool, release: Callable[[Sequence[int]], None]) -> None:
        """`release` removes one holder from each of the blocks that it gets."""
        self._pool = pool
        self._release = release
        self._pin_counts: Counter[int] = Counter()  # pins of each block
        # Block tables of freed requests whose pull may still write to them.
        self._quarantined: list[tuple[Pull, list[int]]] = []

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep the blocks from being freed or overwritten until `unpin` was called once for each `pin`."""
        self._pin_counts.update(blocks)
        for block in blocks:
            self._pool.add_holder(block)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks and return their ids. Each has a pin count of one, which `unpin` reduces."""
        blocks = [self._pool.allocate_block(0) for _ in range(count)]
        self._pin_counts.update(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        assert all(self._pin_counts[block] for block in blocks)
        self._pin_counts.subtract(blocks)
        self._pin_counts = +self._pin_counts
        self._release(blocks)

    @property
    def has_pinned(self) -> bool:
        return bool(self._pin_counts)

    def quarantine(self, pull: Pull, table: list[int], holder: int) -> None:
        """Keep the blocks of a freed request until its pull of KV blocks from a peer can no longer write to them."""
        self._quarantined.append((pull, table))
        for block in table:
            self._pool.make_holder_anonymous(block, holder)

    def unpin_after(self, pull: Pull, blocks: list[int]) -> None:
        """Unpin the blocks as soon as a pull can no longer write to them."""
        self._pin_counts.subtract(blocks)
        self._pin_counts = +self._pin_counts
        self._quarantined.append((pull, blocks))

    def release_ended(self) -> None:
        """Release the quarantined blocks to which no pull can write any more."""
        released = [table for pull, table in self._quarantined if pull.ended]
        self._quarantined = [(pull, table) for pull, table in self._quarantined if not pull.ended]
        for table in released:
            self._release(table)

    @property
    def num_quarantined(self) -> int:
        return sum(len(table) for _, table in self._quarantined)

    def count_holders(self) -> Counter[int]:
        """Return, for each kept block, how many pins and quarantined block tables keep it."""
        return self._pin_counts + Counter(block for _, table in self._quarantined for block in table)
