"""BlockPool: which blocks are free, used or idle. Idle blocks hold cached content nobody uses now, oldest first to go.

free + used + idle == total, always; used blocks have holders, the others have none.
"""

from __future__ import annotations

from collections import OrderedDict
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

    def take(self) -> int:
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
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block whose content is wanted as it is."""
        if self._holders[block] == 0:
            del self._idle[block]
            self._residency.reused(block)
        self._holders[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One holder less; the last one leaves it idle if its content is worth keeping."""
        assert self._holders[block] > 0
        self._holders[block] -= 1
        if self._holders[block] == 0:
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
