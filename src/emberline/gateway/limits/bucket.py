"""LimitBucket: the usage counted against one limit, and its open reservations. It does no I/O and reads no clock.

A claim is granted if used + amount <= limit. A claim for more than is left is granted only if something is left and no
reservation is open. It then takes all that is left, so that no other claim is granted at the same time. Without this
rule the last part of a budget could never be spent, because the amounts are upper estimates. A limit can therefore be
exceeded by less than one reservation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from emberline.gateway.limits.window import LimitWindow


class BucketHold(msgspec.Struct, frozen=True):
    """The amount that one open reservation holds in a bucket."""

    slot: int
    amount: int
    expires: int


@dataclass(slots=True)
class Bucket:
    """The usage in each slot of the window, and the open reservations. Times are in milliseconds since 1970."""

    window: LimitWindow
    slot: int = 0  # the current slot
    next_slot_ms: int = 0  # when the next slot begins
    usage_ends_ms: int = 0  # when usage in the current slot stops counting
    total: int = 0  # used in all slots that count
    used: dict[int, int] = field(default_factory=dict)  # slot -> amount, oldest first
    held: dict[str, BucketHold] = field(default_factory=dict)  # reservation -> its unsettled part of `used`
    expiry_heap: list[tuple[int, str]] = field(default_factory=list)  # heap of (expiry, reservation)
    on_change: Callable[[int, int], None] | None = None  # called with a slot and the amount added to it

    def restore(self, used: Mapping[int, int]) -> None:
        """Start from the usage that an earlier process counted."""
        self.used = dict(sorted(used.items()))
        self.total = sum(used.values())

    def advance(self, now: int) -> None:
        """Expire all reservations and slots that end up to `now_ms`.

        If the clock is set back, old slots are not restored.
        """
        while self.expiry_heap and self.expiry_heap[0][0] <= now:
            self.settle(heapq.heappop(self.expiry_heap)[1], None, 0)
        if now < self.next_slot_ms:
            return
        self.slot, live = self.window.slot(now), self.window.live_slots
        self.next_slot_ms = self.window.slot_end(self.slot + 1 - live)
        self.usage_ends_ms = self.window.slot_end(self.slot)
        while self.used and (oldest := next(iter(self.used))) <= self.slot - live:
            self.total -= self.used.pop(oldest)

    def grantable_amount(self, limit: int, amount: int) -> int | None:
        """Return the amount that a claim gets: all of it, all that is left, or None if it gets nothing."""
        left = limit - self.total
        if amount <= left:
            return amount
        return left if left > 0 and not self.held else None

    def take(self, name: str, amount: int, expires: int) -> BucketHold:
        held = self.held[name] = BucketHold(self.slot, amount, expires)
        heapq.heappush(self.expiry_heap, (expires, name))
        if len(self.expiry_heap) > 64 + 2 * len(self.held):  # most entries were settled long ago
            self.expiry_heap = sorted((held.expires, name) for name, held in self.held.items())
        self._add(held.slot, amount)
        return held

    def settle(self, name: str, slot: int | None, actual: int) -> None:
        """Replace the reserved amount by the amount that was used.

        If the reservation has already expired, the amount is counted in `slot`, or not at all if `slot` is None.
        """
        held = self.held.pop(name, None)
        if held is not None:
            self._add(held.slot, actual - held.amount)
        elif slot is not None:
            self._add(slot, actual)

    def wait_ms(self, limit: int, amount: int, now: int) -> int:
        """Return the milliseconds until the claim fits, provided that no other claim is granted before."""
        left = limit - self.total
        for slot, used in self.used.items():
            left += used
            if left >= min(amount, limit):
                return self.window.slot_end(slot) - now
        return self.usage_ends_ms - now

    def resets_in_ms(self, now: int) -> int:
        """Return the milliseconds until none of the present usage counts any more."""
        return self.usage_ends_ms - now

    @property
    def is_empty(self) -> bool:
        return not self.used and not self.held

    def _add(self, slot: int, amount: int) -> None:
        if amount and slot > self.slot - self.window.live_slots:
            if slot not in self.used:
                self.used[slot] = 0
                if slot < self.slot:
                    self.used = dict(sorted(self.used.items()))
            self.used[slot] += amount
            self.total += amount
            if self.on_change is not None:
                self.on_change(slot, amount)
