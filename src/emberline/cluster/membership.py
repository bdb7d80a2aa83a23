"""Membership: who is there. Time is handed in. Of two processes with one name the one first seen later has it: ids that
were replaced are remembered, so the old one can come back only when the newer is lost. Who has left by its own word
never does. No clocks are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from emberline.cluster.card import Beat, Card

REPLACED_KEPT = 4096


class Health(Enum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has
    STARTING = "starting"  # or its engine again, by its own word
    STUCK = "stuck"  # beats, has work, and makes no step
    LOST = "lost"  # does not beat


@dataclass(slots=True)
class Member:
    card: Card
    beat: Beat
    joined: float
    heard: float  # when it last beat
    moved: float  # when it last made a step, or had nothing to do
    draining: bool = False
    left: bool = False  # by its own word


@dataclass(frozen=True, slots=True)
class Patience:
    lost_after: float = 4.0  # seconds without a beat
    stuck_after: float = 30.0  # seconds with work and without a step
    forgotten_after: float = 600.0  # seconds lost


class Membership:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._members: dict[str, Member] = {}
        self._replaced: dict[str, bool] = {}  # incarnations, oldest first, and whether they may come back

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def register(self, card: Card, now: float) -> bool:
        """False: this process was replaced by a newer one that is there, or has left. Doing it twice changes nothing
        but the card."""
        old = self._members.get(card.name)
        if (may_return := self._replaced.get(card.incarnation)) is not None:
            if not may_return or (old is not None and self.health(old, now) is not Health.LOST):
                return False
            del self._replaced[card.incarnation]
        if old is not None and old.card.incarnation == card.incarnation:
            old.card, old.heard = card, now
            return True
        if old is not None:
            self._retire(old)
        self._members[card.name] = Member(card, Beat(card.name, card.incarnation), now, heard=now, moved=now)
        return True

    def beat(self, beat: Beat, now: float) -> bool:
        """False: nobody of this name and incarnation is registered (we may have started after it)."""
        member = self._members.get(beat.name)
        if member is None or member.card.incarnation != beat.incarnation:
            return False
        needs_none = beat.running <= beat.loading and (beat.loading > 0 or not beat.waiting)
        if beat.step != member.beat.step or needs_none:  # who waits for room waits for those that load
            member.moved = now
        member.beat, member.heard = beat, now
        return True

    def replaced(self, incarnation: str) -> bool:
        return incarnation in self._replaced

    def leave(self, name: str, incarnation: str) -> bool:
        """It goes, by its own word: it takes nothing new and does not come back."""
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
        """Nobody could be heard for so long."""
        for member in self._members.values():
            member.heard, member.moved = min(member.heard + seconds, now), min(member.moved + seconds, now)

    def forget(self, now: float) -> list[str]:
        """Names of those that nobody waits for any more: silent for long (they may come back), or after a goodbye."""
        gone = [name for name, member in self._members.items() if now - member.heard > self._limit(member)]
        for name in gone:
            member = self._members.pop(name)
            if member.left:
                self._retire(member)
        return gone

    def _limit(self, member: Member) -> float:
        return self._patience.lost_after if member.left else self._patience.forgotten_after

    def _retire(self, member: Member) -> None:
        self._replaced[member.card.incarnation] = not member.left
        while len(self._replaced) > REPLACED_KEPT:
            del self._replaced[next(iter(self._replaced))]
