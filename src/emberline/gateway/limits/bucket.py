"""Bucket: what was used of one limit, by whom it is still held, and whether another claim fits. Pure.

A claim fits while used + amount <= limit. One that is larger than what is left passes only alone: when something is
left and nobody holds any of the bucket. It then takes all that is left, so that nothing passes beside it. Estimates are
large; without this a budget's last part could never be spent. Thus a limit is overshot by less than one reservation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from emberline.gateway.limits.window import Window


class Held(msgspec.Struct, frozen=True):
    slot: int
    amount: int
    expires: int


@dataclass(slots=True)
class Bucket:
    window: Window
    slot: int = 0  # the current one
    turns: int = 0  # when the next one begins
    ends: int = 0  # when what is used in the current one no longer counts
    total: int = 0  # of the slots that count
    used: dict[int, int] = field(default_factory=dict)  # slot -> amount, the oldest first
    held: dict[str, Held] = field(default_factory=dict)  # reservation -> what of `used` is not settled
    expiring: list[tuple[int, str]] = field(default_factory=list)  # a heap: when it comes back, reservation
    changed: Callable[[int, int], None] | None = None  # is called with a slot and what was added there

    def restore(self, used: Mapping[int, int]) -> None:
        """Begin with what a process before has counted."""
        self.used = dict(sorted(used.items()))
        self.total = sum(used.values())

    def roll(self, now: int) -> None:
        """Time passes. A clock that is put back does not bring old slots back."""
        while self.expiring and self.expiring[0][0] <= now:
            self.settle(heapq.heappop(self.expiring)[1], None, 0)
        if now < self.turns:
            return
        self.slot, live = self.window.slot(now), self.window.live
        self.turns, self.ends = self.window.ends(self.slot + 1 - live), self.window.ends(self.slot)
        while self.used and (oldest := next(iter(self.used))) <= self.slot - live:
            self.total -= self.used.pop(oldest)

    def grant(self, limit: int, amount: int) -> int | None:
        """How much of this claim may be taken: all of it, all that is left, or (None) nothing."""
        left = limit - self.total
        if amount <= left:
            return amount
        return left if left > 0 and not self.held else None

    def take(self, name: str, amount: int, expires: int) -> Held:
        held = self.held[name] = Held(self.slot, amount, expires)
        heapq.heappush(self.expiring, (expires, name))
        if len(self.expiring) > 64 + 2 * len(self.held):  # most were settled long ago
            self.expiring = sorted((held.expires, name) for name, held in self.held.items())
        self._add(held.slot, amount)
        return held

    def settle(self, name: str, slot: int | None, actual: int) -> None:
        """What was held becomes what was used. `slot` is for one that has already come back: it still counts there."""
        held = self.held.pop(name, None)
        if held is not None:
            self._add(held.slot, actual - held.amount)
        elif slot is not None:
            self._add(slot, actual)

    def waits(self, limit: int, amount: int, now: int) -> int:
        """Milliseconds until the claim fits, if nobody takes or returns anything before."""
        left = limit - self.total
        for slot, used in self.used.items():
            left += used
            if left >= min(amount, limit):
                return self.window.ends(slot) - now
        return self.ends - now

    def resets(self, now: int) -> int:
        """Milliseconds until all that is used now no longer counts."""
        return self.ends - now

    @property
    def empty(self) -> bool:
        return not self.used and not self.held

    def _add(self, slot: int, amount: int) -> None:
        if amount and slot > self.slot - self.window.live:
            if slot not in self.used:
                self.used[slot] = 0
                if slot < self.slot:
                    self.used = dict(sorted(self.used.items()))
            self.used[slot] += amount
            self.total += amount
            if self.changed is not None:
                self.changed(slot, amount)
