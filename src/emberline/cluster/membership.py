"""Membership: which workers are registered, and their health. The caller passes the current time.

If two processes use the same worker name, the process that registered last owns the name. The incarnation (the id of
one run of a process) of the older process is remembered, so that the older process can register again only when the
newer one is lost. A process that announced its shutdown cannot register again. All times are the router's own: clocks
of different machines are never compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from emberline.cluster.registration import Heartbeat, WorkerRegistration

MAX_REPLACED_INCARNATIONS = 4096


class WorkerHealth(Enum):
    READY = "ready"
    DRAINING = "draining"  # finishes its open requests
    STARTING = "starting"  # its engine starts or restarts
    STUCK = "stuck"  # sends heartbeats and has work, but its engine makes no step
    LOST = "lost"  # sends no heartbeats


@dataclass(slots=True)
class ClusterMember:
    registration: WorkerRegistration
    heartbeat: Heartbeat
    joined_at: float
    last_heartbeat_at: float
    last_progress_at: float  # when it last made a step or had no work
    is_draining: bool = False
    is_leaving: bool = False  # it announced its shutdown


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    lost_after: float = 4.0  # seconds without a heartbeat
    stuck_after: float = 30.0  # seconds with work but without a step
    forgotten_after: float = 600.0  # seconds without a heartbeat


class Membership:
    def __init__(self, timeouts: HealthTimeouts) -> None:
        self._timeouts = timeouts
        self._members: dict[str, ClusterMember] = {}
        self._replaced_incarnations: dict[str, bool] = {}  # incarnations, oldest first, and whether they may return

    def __iter__(self) -> Iterator[ClusterMember]:
        return iter(self._members.values())

    def get(self, name: str) -> ClusterMember | None:
        return self._members.get(name)

    def register(self, registration: WorkerRegistration, now: float) -> bool:
        """Add or update a worker, and return whether the registration is accepted.

        A process is rejected if a newer live process has its name, or if it announced its shutdown. A process that is
        registered already only updates its registration."""
        previous = self._members.get(registration.name)
        if (may_return := self._replaced_incarnations.get(registration.incarnation)) is not None:
            if not may_return or (previous is not None and self.health(previous, now) is not WorkerHealth.LOST):
                return False
            del self._replaced_incarnations[registration.incarnation]
        if previous is not None and previous.registration.incarnation == registration.incarnation:
            previous.registration, previous.last_heartbeat_at = registration, now
            return True
        if previous is not None:
            self._remember_replaced_incarnation(previous)
        self._members[registration.name] = ClusterMember(
            registration,
            Heartbeat(registration.name, registration.incarnation),
            now,
            last_heartbeat_at=now,
            last_progress_at=now,
        )
        return True

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Update a worker from its heartbeat, and return whether a worker with this name and incarnation is registered.

        False tells the worker to register again, for example after a restart of the router."""
        member = self._members.get(heartbeat.name)
        if member is None or member.registration.incarnation != heartbeat.incarnation:
            return False
        # No step is expected while all running requests wait for blocks: waiting requests wait for their slots.
        needs_no_step = heartbeat.running <= heartbeat.loading and (heartbeat.loading > 0 or not heartbeat.waiting)
        if heartbeat.step != member.heartbeat.step or needs_no_step:
            member.last_progress_at = now
        member.heartbeat, member.last_heartbeat_at = heartbeat, now
        return True

    def is_replaced(self, incarnation: str) -> bool:
        return incarnation in self._replaced_incarnations

    def mark_leaving(self, name: str, incarnation: str) -> bool:
        """Record that a worker is shutting down and gets no new requests. Return whether it is registered."""
        member = self._members.get(name)
        if member is None or member.registration.incarnation != incarnation:
            return False
        member.is_draining = member.is_leaving = True
        return True

    def set_draining(self, name: str, is_draining: bool = True) -> bool:
        member = self._members.get(name)
        if member is not None:
            member.is_draining = is_draining
        return member is not None

    def health(self, member: ClusterMember, now: float) -> WorkerHealth:
        if now - member.last_heartbeat_at > self._timeouts.lost_after:
            return WorkerHealth.LOST
        if not member.heartbeat.ready:
            return WorkerHealth.STARTING
        if now - member.last_progress_at > self._timeouts.stuck_after:
            return WorkerHealth.STUCK
        return WorkerHealth.DRAINING if member.is_draining else WorkerHealth.READY

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Move the heartbeat deadlines of all workers later by `seconds`.

        During that time the router was paused and could not receive heartbeats."""
        for member in self._members.values():
            member.last_heartbeat_at, member.last_progress_at = (
                min(member.last_heartbeat_at + seconds, now),
                min(member.last_progress_at + seconds, now),
            )

    def remove_expired_workers(self, now: float) -> list[str]:
        """Remove the workers whose last heartbeat is too long ago, and return their names.

        A worker that announced its shutdown is removed sooner. Any other removed worker may register again."""
        expired = [
            name
            for name, member in self._members.items()
            if now - member.last_heartbeat_at > self._removal_timeout_s(member)
        ]
        for name in expired:
            member = self._members.pop(name)
            if member.is_leaving:
                self._remember_replaced_incarnation(member)
        return expired

    def _removal_timeout_s(self, member: ClusterMember) -> float:
        return self._timeouts.lost_after if member.is_leaving else self._timeouts.forgotten_after

    def _remember_replaced_incarnation(self, member: ClusterMember) -> None:
        self._replaced_incarnations[member.registration.incarnation] = not member.is_leaving
        while len(self._replaced_incarnations) > MAX_REPLACED_INCARNATIONS:
            del self._replaced_incarnations[next(iter(self._replaced_incarnations))]
