"""LeaseTable: the leases during which a sender keeps published KV blocks unchanged, so that receivers can read them.

A lease ends once: the receiver has acknowledged or released it, the sender has closed it, or it has expired.
`collect_ended` then returns its blocks to the owner of the cache, which may overwrite them immediately. A receiver that
is still reading finds that the lease has ended and discards what it read. All methods are thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from emberline.core.clock import Clock
from emberline.kv.transfer.errors import TicketEnded
from emberline.kv.transfer.region import BlockIds, Generations

MAX_REMEMBERED_ENDS = 4096  # ended leases whose reason is kept for error messages and repeated calls
EXPIRY_CHECK_INTERVAL_S = 0.25  # of a thread that waits for more blocks


class LeaseEndReason(StrEnum):
    ACKNOWLEDGED = "acknowledged"  # the receiver has all blocks
    RELEASED = "released"  # the receiver no longer needs the blocks
    CLOSED = "closed"  # the sender ended the lease
    EXPIRED = "expired"


@dataclass(slots=True)
class Lease:
    id: str
    blocks: BlockIds
    generations: Generations
    checksums: tuple[int, ...]
    complete: bool
    duration_s: float
    started_at: float
    expires_at: float
    max_expires_at: float  # latest time that a renewal can extend the lease to
    subject: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class EndedLease:
    id: str
    blocks: tuple[int, ...]
    reason: LeaseEndReason


class LeaseTable:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: OrderedDict[str, LeaseEndReason] = OrderedDict()
        self._ended_uncollected: list[EndedLease] = []

    def add(self, lease: Lease) -> None:
        with self._changed:
            assert lease.id not in self._live and lease.id not in self._ended
            self._live[lease.id] = lease

    def extend(
        self,
        lease_id: str,
        blocks: BlockIds,
        generations: Generations,
        checksums: tuple[int, ...],
        complete: bool,
        note: str = "",
    ) -> Lease:
        with self._changed:
            lease = self._find_active(lease_id)
            assert not lease.complete, "a complete lease cannot be extended"
            lease.blocks = np.concatenate((lease.blocks, blocks))
            lease.generations = np.concatenate((lease.generations, generations))
            lease.checksums += checksums
            lease.complete, lease.note = complete, note
            self._extend_expiry(lease)
            self._changed.notify_all()
            return replace(lease)

    def find(self, lease_id: str) -> Lease:
        """Return a copy of the lease. Raises TicketEnded if the lease has ended."""
        with self._changed:
            return replace(self._find_active(lease_id))

    def is_active(self, lease_id: str) -> bool:
        with self._changed:
            lease = self._live.get(lease_id)
            return lease is not None and not self._end_if_expired(lease)

    def renew(self, lease_id: str) -> None:
        with self._changed:
            self._extend_expiry(self._find_active(lease_id))

    def wait_for_blocks(self, lease_id: str, known_blocks: int, timeout_s: float) -> Lease:
        """Wait until the lease has more than `known_blocks` blocks or is complete, at most `timeout_s`.

        Return a copy of the lease.
        """
        deadline = self._clock.now() + timeout_s
        with self._changed:
            while True:
                lease, remaining = self._find_active(lease_id), deadline - self._clock.now()
                if lease.complete or len(lease.blocks) > known_blocks or remaining <= 0:
                    self._extend_expiry(lease)
                    return replace(lease)
                self._changed.wait(min(remaining, EXPIRY_CHECK_INTERVAL_S))

    def end(self, lease_id: str, reason: LeaseEndReason) -> None:
        """End the lease.

        A second call with the same reason does nothing, because the receiver repeats a call whose reply was lost.
        """
        with self._changed:
            if self._ended.get(lease_id) is not reason:
                self._end_lease(self._find_active(lease_id), reason)

    def end_all(self, reason: LeaseEndReason) -> None:
        with self._changed:
            for lease in list(self._live.values()):
                self._end_lease(lease, reason)

    def collect_ended(self) -> list[EndedLease]:
        """Return the leases that ended or expired since the last call. The caller may reuse their blocks."""
        with self._changed:
            for lease in list(self._live.values()):
                self._end_if_expired(lease)
            ended, self._ended_uncollected = self._ended_uncollected, []
            return ended

    def lease_ages(self) -> list[tuple[float, int]]:
        """Return the age in seconds and the number of blocks of each active lease."""
        now = self._clock.now()
        with self._changed:
            return [(now - lease.started_at, len(lease.blocks)) for lease in self._live.values()]

    def _extend_expiry(self, lease: Lease) -> None:
        lease.expires_at = min(max(lease.expires_at, self._clock.now() + lease.duration_s), lease.max_expires_at)

    def _find_active(self, lease_id: str) -> Lease:
        lease = self._live.get(lease_id)
        if lease is None or self._end_if_expired(lease):
            how = self._ended.get(lease_id)
            raise TicketEnded(f"the lease of the KV ticket was {how}" if how else "the sender has no such KV ticket")
        return lease

    def _end_if_expired(self, lease: Lease) -> bool:
        """End the lease if its time has passed. Return whether it was ended.

        A lease to which blocks are still being added lasts until the latest time that renewals allow, because the
        engine that computes these blocks will complete or close it.
        """
        if self._clock.now() < (lease.expires_at if lease.complete else lease.max_expires_at):
            return False
        self._end_lease(lease, LeaseEndReason.EXPIRED)
        return True

    def _end_lease(self, lease: Lease, reason: LeaseEndReason) -> None:
        del self._live[lease.id]
        self._ended[lease.id] = reason
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self._ended_uncollected.append(EndedLease(lease.id, tuple(lease.blocks.tolist()), reason))
        self._changed.notify_all()
