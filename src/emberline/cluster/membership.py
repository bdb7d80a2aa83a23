"""Membership: which workers are registered, and their health. The caller passes the time.

If two processes use one name, the one seen first later owns it: replaced incarnations are remembered, so that the older
process can return only when the newer one is lost. A worker that announced its shutdown never returns. Clocks of
different machines are not compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from emberline.cluster.card import Beat, Card

REPLACED_KEPT = 4096


class Health(Enum):
    READY = "ready"
    DRAINING = "draining"  # finishes its open requests
    STARTING = "starting"  # its engine starts or restarts
    STUCK = "stuck"  # sends heartbeats and has work, but its engine makes no step
    LOST = "lost"  # sends no heartbeats


@dataclass(slots=True)
class Member:
    card: Card
    beat: Beat
    joined: float
    heard: float
    moved: float  # when it last made a step or had no work
    draining: bool = False
    left: bool = False  # it announced its shutdown


@dataclass(frozen=True, slots=True)
class Patience:
    lost_after: float = 4.0  # seconds without a heartbeat
    stuck_after: float = 30.0  # seconds with work but without a step
    forgotten_after: float = 600.0  # seconds without a heartbeat


class Membership:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._members: dict[str, Member] = {}
        self._replaced: dict[str, bool] = {}  # incarnations, oldest first, and whether they may return

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def register(self, card: Card, now: float) -> bool:
        """Add or update a worker, and return whether it is accepted.

        A process that a newer live one replaced, or that announced its shutdown, is not. Registering twice only updates
        the registration."""
        previous = self._members.get(card.name)
        if (may_return := self._replaced.get(card.incarnation)) is not None:
            if not may_return or (previous is not None and self.health(previous, now) is not Health.LOST):
                return False
            del self._replaced[card.incarnation]
        if previous is not None and previous.card.incarnation == card.incarnation:
            previous.card, previous.heard = card, now
            return True
        if previous is not None:
            self._retire(previous)
        self._members[card.name] = Member(card, Beat(card.name, card.incarnation), now, heard=now, moved=now)
        return True

    def beat(self, beat: Beat, now: float) -> bool:
        """Update a worker and return whether this name and incarnation is registered.

        It may not be, if the router was started after the worker."""
        member = self._members.get(beat.name)
        if member is None or member.card.incarnation != beat.incarnation:
            return False
        # No step is expected while all running requests wait for blocks: waiting requests wait for their slots.
        needs_no_step = beat.running <= beat.loading and (beat.loading > 0 or not beat.waiting)
        if beat.step != member.beat.step or needs_no_step:
            member.moved = now
        member.beat, member.heard = beat, now
        return True

    def replaced(self, incarnation: str) -> bool:
        return incarnation in self._replaced

    def leave(self, name: str, incarnation: str) -> bool:
        """Record that a worker shuts down: it gets no new requests and does not return."""
        member = self._members.get(name)
        if member is None or member.card.incarnation != incarnation:
            return False
        member.draining = member.left = True
        return True

    def drain(self, name: str, on: bool = True) -> bool:
        member = self._members.get(name)
        if member is not None:
            member.draining = on
        return member is not None

    def health(self, member: Member, now: float) -> Health:
        if now - member.heard > self._patience.lost_after:
            return Health.LOST
        if not member.beat.ready:
            return Health.STARTING
        if now - member.moved > self._patience.stuck_after:
            return Health.STUCK
        return Health.DRAINING if member.draining else Health.READY

    def excuse(self, seconds: float, now: float) -> None:
        """Move all deadlines by `seconds` during which no heartbeat could be received."""
        for member in self._members.values():
            member.heard, member.moved = min(member.heard + seconds, now), min(member.moved + seconds, now)

    def forget(self, now: float) -> list[str]:
        """Remove expired workers and return their names.

        A worker expires after a long silence, from which it may return, or soon after announcing its shutdown."""
        expired = [name for name, member in self._members.items() if now - member.heard > self._limit(member)]
        for name in expired:
            member = self._members.pop(name)
            if member.left:
                self._retire(member)
        return expired

    def _limit(self, member: Member) -> float:
        return self._patience.lost_after if member.left else self._patience.forgotten_after

    def _retire(self, member: Member) -> None:
        self._replaced[member.card.incarnation] = not member.left
        while len(self._replaced) > REPLACED_KEPT:
            del self._replaced[next(iter(self._replaced))]
