"""BlockPool: tracks which blocks are free, used or idle (cached, without a holder), and evicts idle ones.

free + used + idle == total always holds. A used block has at least one holder; free and idle blocks have none. Each
request is a holder with a number of its own; all other holders have number 0. The pool keeps the sum of each block's
holder numbers: when one holder is left, the sum is its number. So the blocks that one holder has exclusively are
counted as holders are added and removed, without scanning block tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from emberline.kv.residency import Residency


class BlockPool:
    def __init__(
        self,
        total: int,
        on_evict: Callable[[int], None],
        residency: Residency,
        on_take: Callable[[int], None] = lambda block: None,
    ) -> None:
        """`on_allocate` is called with each block that will get new content, before anything is written to it."""
        self.total = total
        self._on_evict = on_evict
        self._on_take = on_take
        self._residency = residency
        self._holders = [0] * total
        self._holder_sums = [0] * total  # of the holders' numbers
        self._alone: Counter[int] = Counter()  # number of blocks without another holder, by holder
        self._free = list(range(total - 1, -1, -1))  # a stack: the most recently freed block may still be in CPU cache
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def num_alone(self, holder: int) -> int:
        """Return how many blocks have this holder and no other."""
        return self._alone[holder]

    def take(self, holder: int = 0) -> int:
        """Return a block for new content; evict the longest idle block if none is free."""
        assert self.available, "the caller checks `available`"
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._on_evict(block)
            self._residency.evicted(block)
        self._residency.taken(block)
        self._on_take(block)
        assert self._holders[block] == 0
        self._holders[block] = 1
        self._holder_sums[block] = holder
        self._alone[holder] += 1
        return block

    def hold(self, block: int, holder: int = 0) -> None:
        """Add a holder to a block whose content is reused."""
        count = self._holders[block]
        if count == 0:
            del self._idle[block]
            self._residency.reused(block)
            self._alone[holder] += 1
        elif count == 1:
            self._alone[self._holder_sums[block]] -= 1
        self._holders[block] = count + 1
        self._holder_sums[block] += holder

    def disown(self, block: int, holder: int) -> None:
        """Keep the hold on the block, but count it under number 0 from now on."""
        if self._holders[block] == 1:
            self._alone[holder] -= 1
            self._alone[0] += 1
        self._holder_sums[block] -= holder

    def forget(self, holder: int) -> None:
        """Forget the number of a holder that holds no block."""
        assert not self._alone[holder]
        del self._alone[holder]

    def release(self, block: int, holder: int = 0, *, keep: bool) -> None:
        """Remove one holder. Without holders the block becomes idle if `keep`, otherwise free."""
        assert self._holders[block] > 0
        count = self._holders[block] = self._holders[block] - 1
        remaining_sum = self._holder_sums[block] = self._holder_sums[block] - holder
        if count == 1:
            self._alone[remaining_sum] += 1
        elif count == 0:
            self._alone[holder] -= 1
            if keep:
                self._idle[block] = None
                self._residency.idled(block)
            else:
                self._free.append(block)
                self._residency.freed(block)

    def check(self) -> None:
        unheld = set(self._free) | set(self._idle)
        assert len(unheld) == len(self._free) + len(self._idle), "a block is both free and idle, or free twice"
        assert all((count == 0) == (block in unheld) for block, count in enumerate(self._holders))
        held = zip(self._holders, self._holder_sums, strict=True)
        assert +self._alone == Counter(holder for count, holder in held if count == 1)
        assert all(count or not holder for count, holder in zip(self._holders, self._holder_sums, strict=True))
