"""LimitBucket: the usage counted against one limit, and its open reservations.

It does no I/O and reads no clock. A claim is granted if used + amount <= limit. A claim for more than is left is
granted only if something is left and no reservation is open. It then takes all that is left, so that no other claim is
granted at the same time. Without this rule the last part of a budget could never be spent, because the amounts are
upper estimates. With this rule a limit can be exceeded, but by less than one reservation.
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
class LimitBucket:
    """The usage in each slot of the window, and the open reservations.

    Times are in milliseconds since 1970.
    """

    window: LimitWindow
    slot: int = 0  # the current slot
    earliest_ms: int = 0  # when the slot before it began; an earlier time shows that the clock was set back
    next_slot_ms: int = 0  # when the next slot begins
    usage_ends_ms: int = 0  # when usage in the current slot stops counting
    total: int = 0  # used in all slots that count
    used: dict[int, int] = field(default_factory=dict)  # slot -> amount, oldest first
    held: dict[str, BucketHold] = field(default_factory=dict)  # reservation -> its unsettled part of `used`
    expiry_heap: list[tuple[int, str]] = field(default_factory=list)  # heap of (expiry, reservation)
    on_change: Callable[[int, int], None] | None = None  # called with a slot and the amount added to it

    def restore_usage(self, used_by_slot: Mapping[int, int]) -> None:
        """Start from the usage that an earlier process counted."""
        self.used = dict(sorted(used_by_slot.items()))
        self.total = sum(used_by_slot.values())

    def expire_until(self, now_ms: int) -> None:
        """Remove all reservations and slots that ended at `now_ms` or before.

        If the clock is set back, old slots are not restored. If it is set back by more than a slot, all usage counts in
        the slot of the new time. Otherwise a limit that was reached would stay so until the clock is there again.
        """
        while self.expiry_heap and self.expiry_heap[0][0] <= now_ms:
            self.settle(heapq.heappop(self.expiry_heap)[1], None, 0)
        if self.earliest_ms <= now_ms < self.next_slot_ms:
            return
        if now_ms < self.earliest_ms:
            self._move_usage(self.window.slot_at(now_ms))
        self.slot, live = self.window.slot_at(now_ms), self.window.live_slots
        self.next_slot_ms = self.window.usage_end_ms(self.slot + 1 - live)
        self.earliest_ms = self.window.usage_end_ms(self.slot - 1 - live)
        self.usage_ends_ms = self.window.usage_end_ms(self.slot)
        while self.used and (oldest := next(iter(self.used))) <= self.slot - live:
            self.total -= self.used.pop(oldest)
        if self.used and next(reversed(self.used)) > self.slot:  # restored from a process whose clock was ahead
            self._move_usage(self.slot)

    def grantable_amount(self, limit: int, amount: int) -> int | None:
        """Return `amount` if it can be granted, else the amount that is left, or None if nothing can be granted."""
        left = limit - self.total
        if amount <= left:
            return amount
        return left if left > 0 and not self.held else None

    def hold_amount(self, reservation_name: str, amount: int, expires_ms: int) -> BucketHold:
        held = self.held[reservation_name] = BucketHold(self.slot, amount, expires_ms)
        heapq.heappush(self.expiry_heap, (expires_ms, reservation_name))
        if len(self.expiry_heap) > 64 + 2 * len(self.held):  # most entries were settled long ago
            self.expiry_heap = sorted((held.expires, reservation_name) for reservation_name, held in self.held.items())
        self._add_usage(held.slot, amount)
        return held

    def settle(self, reservation_name: str, slot: int | None, used_amount: int) -> None:
        """Replace the reserved amount by the amount that was used.

        If the reservation has already expired, the amount is counted in `slot`, or not at all if `slot` is None.
        """
        held = self.held.pop(reservation_name, None)
        if held is not None:
            self._add_usage(held.slot, used_amount - held.amount)
        elif slot is not None:
            self._add_usage(slot, used_amount)

    def ms_until_fits(self, limit: int, amount: int, now_ms: int) -> int:
        """Return the milliseconds until `amount` can be granted, if no other claim is granted before."""
        left = limit - self.total
        for slot, used in self.used.items():
            left += used
            if left >= min(amount, limit):
                return self.window.usage_end_ms(slot) - now_ms
        return self.usage_ends_ms - now_ms

    def ms_until_reset(self, now_ms: int) -> int:
        """Return the milliseconds until all of the present usage has stopped counting."""
        return self.usage_ends_ms - now_ms

    @property
    def is_empty(self) -> bool:
        return not self.used and not self.held

    def _move_usage(self, slot: int) -> None:
        """Count all usage in this slot instead of its own slots."""
        total, self.slot = self.total, slot
        for each, amount in self.used.items():
            if self.on_change is not None:
                self.on_change(each, -amount)
        self.used, self.total = {}, 0
        self.held = {name: BucketHold(slot, held.amount, held.expires) for name, held in self.held.items()}
        self._add_usage(slot, total)

    def _add_usage(self, slot: int, amount: int) -> None:
        if amount and slot > self.slot - self.window.live_slots:
            if slot not in self.used:
                self.used[slot] = 0
                if slot < self.slot:
                    self.used = dict(sorted(self.used.items()))
            self.used[slot] += amount
            self.total += amount
            if self.on_change is not None:
                self.on_change(slot, amount)
