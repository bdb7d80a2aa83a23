"""Leases: what a sender keeps pinned for others, until when, and how each lease ended. Any thread may call.

A lease ends once: acknowledged, released, closed or expired. Its blocks are then handed to whoever calls `collect`, the
owner of the cache, also once. Nobody waits for readers: one that is late finds the lease over and drops what it read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from emberline.core.clock import Clock
from emberline.kv.transfer.errors import TicketOver
from emberline.kv.transfer.region import Ids, Marks

REMEMBERED = 4096  # ended leases of which we still know how
GLANCE = 0.25  # seconds: how often a waiting thread looks whether its lease has expired


class How(StrEnum):
    ACKNOWLEDGED = "acknowledged"  # the receiver has it all
    RELEASED = "released"  # the receiver does not want it
    CLOSED = "closed"  # by the sender
    EXPIRED = "expired"


@dataclass(slots=True)
class Lease:
    id: str
    blocks: Ids
    generations: Marks
    checksums: tuple[int, ...]
    complete: bool
    seconds: float
    began: float
    until: float
    limit: float  # no renewal goes beyond
    subject: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    id: str
    blocks: tuple[int, ...]
    how: How


class Leases:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._over: OrderedDict[str, How] = OrderedDict()
        self._uncollected: list[Ended] = []

    def begin(self, lease: Lease) -> None:
        with self._changed:
            assert lease.id not in self._live and lease.id not in self._over
            self._live[lease.id] = lease

    def extend(
        self, id: str, blocks: Ids, generations: Marks, checksums: tuple[int, ...], complete: bool, note: str = ""
    ) -> Lease:
        with self._changed:
            lease = self._find(id)
            assert not lease.complete, "a ticket that was said to be complete grows"
            lease.blocks = np.concatenate((lease.blocks, blocks))
            lease.generations = np.concatenate((lease.generations, generations))
            lease.checksums += checksums
            lease.complete, lease.note = complete, note
            self._renew(lease)
            self._changed.notify_all()
            return replace(lease)

    def find(self, id: str) -> Lease:
        """A copy, as of all that return one: those here change."""
        with self._changed:
            return replace(self._find(id))

    def renew(self, id: str) -> None:
        with self._changed:
            self._renew(self._find(id))

    def wait(self, id: str, known: int, seconds: float) -> Lease:
        """Until it has more blocks than `known`, or is complete, or the time is up."""
        until = self._clock.now() + seconds
        with self._changed:
            while True:
                lease, left = self._find(id), until - self._clock.now()
                if lease.complete or len(lease.blocks) > known or left <= 0:
                    self._renew(lease)
                    return replace(lease)
                self._changed.wait(min(left, GLANCE))

    def end(self, id: str, how: How) -> None:
        """Ending it twice the same way is once: the first answer may have been lost."""
        with self._changed:
            if self._over.get(id) is not how:
                self._end(self._find(id), how)

    def end_all(self, how: How) -> None:
        with self._changed:
            for lease in list(self._live.values()):
                self._end(lease, how)

    def collect(self) -> list[Ended]:
        """Leases that ended since the last call, the expired ones too: their blocks are the caller's again."""
        with self._changed:
            for lease in list(self._live.values()):
                self._expire(lease)
            ended, self._uncollected = self._uncollected, []
            return ended

    def ages(self) -> list[tuple[float, int]]:
        """Of each live lease: seconds since it began, and how many blocks it pins."""
        now = self._clock.now()
        with self._changed:
            return [(now - lease.began, len(lease.blocks)) for lease in self._live.values()]

    def _renew(self, lease: Lease) -> None:
        lease.until = min(max(lease.until, self._clock.now() + lease.seconds), lease.limit)

    def _find(self, id: str) -> Lease:
        lease = self._live.get(id)
        if lease is None or self._expire(lease):
            how = self._over.get(id)
            raise TicketOver(f"the lease of this ticket is {how}" if how else "no such ticket is known here")
        return lease

    def _expire(self, lease: Lease) -> bool:
        """One that is still growing does not before its limit: whoever fills its blocks will complete or close it."""
        if self._clock.now() < (lease.until if lease.complete else lease.limit):
            return False
        self._end(lease, How.EXPIRED)
        return True

    def _end(self, lease: Lease, how: How) -> None:
        del self._live[lease.id]
        self._over[lease.id] = how
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._uncollected.append(Ended(lease.id, tuple(lease.blocks.tolist()), how))
        self._changed.notify_all()
