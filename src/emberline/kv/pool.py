"""BlockPool: tracks which blocks are free, used or idle, and evicts idle blocks.

A used block has at least one holder. Free and idle blocks have none; an idle block still has content that can be
reused. Every block is in exactly one of these states.

Each request is a holder with its own number. All other holders share the number 0. For each block the pool keeps the
sum of its holders' numbers. When one holder is left, the sum is that holder's number. So the pool can count the blocks
that one holder has exclusively without scanning block tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from emberline.kv.residency import ResidencySampler


class BlockPool:
    def __init__(
        self,
        total: int,
        on_evict: Callable[[int], None],
        residency: ResidencySampler,
        on_allocate: Callable[[int, int], None] = lambda block, group: None,
    ) -> None:
        """Create a pool of `total` free blocks.

        `on_allocate` is called with each block that will get new content, and with the group of layers that the content
        belongs to, before anything is written to the block.
        """
        self.total = total
        self._on_evict = on_evict
        self._on_allocate = on_allocate
        self._residency = residency
        self._holders = [0] * total
        self._holder_sums = [0] * total  # of the holders' numbers
        self._exclusive: Counter[int] = Counter()  # number of blocks without another holder, by holder
        self._free = list(range(total - 1, -1, -1))  # a stack: the most recently freed block may still be in CPU cache
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def num_holders(self, block: int) -> int:
        return self._holders[block]

    def count_holders(self) -> dict[int, int]:
        """Return the number of holders of every block that has any."""
        return {block: count for block, count in enumerate(self._holders) if count}

    def num_exclusive_blocks(self, holder: int) -> int:
        """Return how many blocks have this holder and no other."""
        return self._exclusive[holder]

    def allocate_block(self, holder: int = 0, group: int = 0) -> int:
        """Return a block for new content of a group of layers.

        If no block is free, the block that was idle longest is evicted."""
        assert self.num_available, "the caller checks `available`"
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._on_evict(block)
            self._residency.record_eviction(block)
        self._residency.record_allocation(block)
        self._on_allocate(block, group)
        assert self._holders[block] == 0
        self._holders[block] = 1
        self._holder_sums[block] = holder
        self._exclusive[holder] += 1
        return block

    def add_holder(self, block: int, holder: int = 0) -> None:
        """Add a holder to a block whose content is reused."""
        count = self._holders[block]
        if count == 0:
            del self._idle[block]
            self._residency.record_reuse(block)
            self._exclusive[holder] += 1
        elif count == 1:
            self._exclusive[self._holder_sums[block]] -= 1
        self._holders[block] = count + 1
        self._holder_sums[block] += holder

    def make_holder_anonymous(self, block: int, holder: int) -> None:
        """Let the holder keep this block, but count it under the shared holder number 0 from now on."""
        if self._holders[block] == 1:
            self._exclusive[holder] -= 1
            self._exclusive[0] += 1
        self._holder_sums[block] -= holder

    def forget_holder(self, holder: int) -> None:
        """Delete the counter of a holder's exclusive blocks, which must be zero."""
        assert not self._exclusive[holder]
        del self._exclusive[holder]

    def release_block(self, block: int, holder: int = 0, *, keep_content: bool) -> None:
        """Remove one holder of the block.

        A block without holders becomes idle if `keep_content`, otherwise free.
        """
        assert self._holders[block] > 0
        count = self._holders[block] = self._holders[block] - 1
        remaining_sum = self._holder_sums[block] = self._holder_sums[block] - holder
        if count == 1:
            self._exclusive[remaining_sum] += 1
        elif count == 0:
            self._exclusive[holder] -= 1
            if keep_content:
                self._idle[block] = None
                self._residency.record_idle(block)
            else:
                self._free.append(block)
                self._residency.record_free(block)

    def check_invariants(self) -> None:
        unheld = set(self._free) | set(self._idle)
        assert len(unheld) == len(self._free) + len(self._idle), "a block is both free and idle, or free twice"
        assert {block for block, count in enumerate(self._holders) if not count} == unheld
        sums = zip(self._holders, self._holder_sums, strict=True)
        held = [(count, holder) for count, holder in sums if count or holder]
        assert all(count for count, _ in held)
        assert +self._exclusive == Counter(holder for count, holder in held if count == 1)
