"""BlockPool: which blocks are free, used or idle. Idle blocks hold cached content nobody uses now, oldest first to go.

free + used + idle == total, always; used blocks have holders, the others have none. A holder has a number, or 0 if it
needs none. The sum of a block's holders names the last one that is left, so that the blocks which one holder has alone
are counted as holders come and go, and no table is scanned for them.
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
        """`on_take`: hears of each block that is to hold something new, before anybody writes to it."""
        self.total = total
        self._on_evict = on_evict
        self._on_take = on_take
        self._residency = residency
        self._holders = [0] * total
        self._holder_sums = [0] * total  # of the holders' numbers
        self._alone: Counter[int] = Counter()  # by holder, the blocks that nothing else holds
        self._free = list(range(total - 1, -1, -1))  # a stack: the most recently freed is reused first and is warm
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
        """Return how many blocks only this holder has."""
        return self._alone[holder]

    def take(self, holder: int = 0) -> int:
        """A block for new content; evicts the longest idle one if none is free."""
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
        """One more holder of a block whose content is wanted as it is."""
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
        """The holder keeps the block, and is 0 from now on."""
        if self._holders[block] == 1:
            self._alone[holder] -= 1
            self._alone[0] += 1
        self._holder_sums[block] -= holder

    def forget(self, holder: int) -> None:
        """A holder that holds nothing any more."""
        assert not self._alone[holder]
        del self._alone[holder]

    def release(self, block: int, holder: int = 0, *, keep: bool) -> None:
        """One holder less; the last one leaves it idle if its content is worth keeping."""
        assert self._holders[block] > 0
        count = self._holders[block] = self._holders[block] - 1
        left = self._holder_sums[block] = self._holder_sums[block] - holder
        if count == 1:
            self._alone[left] += 1
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
