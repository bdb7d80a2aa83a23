"""Pulls: beginnings of prompts on their way from other engines' caches into blocks of requests here, a thread for each.

A Pull looks like a tier's Fetch: what has come counts, from the first missing token on, and the rest is computed. Its
thread writes straight to the request's blocks, so nobody else may have these before it has ended: also one that was
cancelled. It writes beside the steps, and not in their order, but after those that were under way when it started: they
may know the blocks from before (`Region.fence`). Nothing here makes the engine's loop wait, and nothing that fails
reaches it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from emberline.core.clock import Clock, SystemClock
from emberline.core.events import TransferStats
from emberline.core.handoff import Note, Pulled
from emberline.core.request import Request
from emberline.kv.transfer.errors import BadTransfer, TicketOver, TransferCancelled, TransferError, TransferTimeout
from emberline.kv.transfer.progress import Progress
from emberline.kv.transfer.region import Region
from emberline.kv.transfer.ticket import Ticket, subject_of

log = logging.getLogger("emberline.transfer")

PATIENCE = 30.0  # seconds; a peer that is dead or stuck is found out sooner, by its silence
LAST_WORD = 2.0  # seconds to tell a peer that its blocks are needed no more; if it does not hear, its lease expires
GLANCE = 1.0  # seconds between looks at the leases of requests that wait


class Source(Protocol):
    """A Receiver."""

    region: Region

    def pull(
        self, ticket: Ticket, into: Sequence[int], deadline: float, *, progress: Progress, first: int
    ) -> Progress: ...

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def acknowledge(self, ticket: Ticket, deadline: float) -> None: ...

    def release(self, ticket: Ticket, deadline: float) -> None: ...


@dataclass(slots=True, eq=False)
class Pull:
    ticket: Ticket
    into: Sequence[int]  # the request's blocks
    covered: int  # tokens that the ticket is of, from the first of the prompt on
    first: int  # of the ticket's blocks, that is missing here
    deadline: float
    moved: float  # when bytes were last seen to land
    bytes: int = 0  # that had landed then
    progress: Progress = field(default_factory=Progress)
    failure: TransferError | None = None
    cancelled: bool = False
    told: Pulled | None = None  # what became of it, when it has ended
    ended: bool = False  # nothing of it writes any more; set last, by its thread

    @property
    def tokens(self) -> int:
        """From the first of the prompt on, that are here: those before `first` were before."""
        return max(self.progress.proven, self.first) * self.ticket.peer.layout.tokens

    @property
    def note(self) -> Note | None:
        """What the peer said when it was done, if all that belongs to it is here."""
        ticket = self.progress.ticket
        return Note.parsed(ticket.note) if self.progress.complete and ticket is not None else None


@dataclass(slots=True)
class Expected:
    """A ticket whose request waits: its lease is to last until then."""

    ticket: Ticket
    covered: int  # tokens that it is of
    renewed: float


def _covered(ticket: Ticket, request: Request) -> int:
    """How many of the request's tokens the ticket is of: its prompt, or all it came with. BadTransfer: neither."""
    for count in {request.prompt_len, request.arrived_len}:
        if ticket.subject == subject_of(ticket.peer.layout, request.salt, request.tokens[:count]):
            return count
    raise BadTransfer("the ticket is of another prompt")


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="kv-pulls", daemon=True).start()


class Pulls:
    def __init__(
        self,
        source: Source,
        *,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        """`patience`: seconds without a byte until the rest is computed here."""
        self._source = source
        self._patience = patience
        self._clock = clock or SystemClock()
        self._spawn = in_thread
        self._lock = threading.Lock()  # of the three below
        self._stats = TransferStats()
        self._expected: dict[str, Expected] = {}  # by request
        self._keeping = False
        self._news, self._closed = threading.Event(), threading.Event()

    # -- the engine's side ---------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        """Keeps the lease of its source alive until it starts, or `forget`s."""
        assert request.source is not None
        try:
            ticket = Ticket.parsed(request.source)
            covered = _covered(ticket, request)
            self._source.region.layout.check_pair(ticket.peer.layout)
        except TransferError as error:
            self._count(error)
            request.source = None
            return
        with self._lock:
            self._expected[request.id] = Expected(ticket, covered, self._clock.now())
            self._keeping = self._keeping or self._beside(self._keep)

    def grain(self, request: Request) -> int:
        """Tokens of a block of its peer: what is here already counts in whole ones of those."""
        return self._expected[request.id].ticket.peer.layout.tokens

    def start(self, request: Request, into: Sequence[int]) -> Pull | None:
        """Of all full blocks that the ticket covers and that are missing; None if none is."""
        with self._lock:
            expected = self._expected.pop(request.id)
        ticket = expected.ticket
        request.source = None
        size, now = ticket.peer.layout.tokens, self._clock.now()
        if request.cached // size >= expected.covered // size:
            self._beside(lambda: self._release(ticket))
            return None
        pull = Pull(ticket, list(into), expected.covered, request.cached // size, request.deadline, now)
        self._source.region.fence()
        if not self._beside(lambda: self._run(pull)):
            self._count(TransferError("there is no thread to pull with"))
            return None
        return pull

    def take(self, pull: Pull) -> tuple[int, bool]:
        """How many tokens are here, from the first of the prompt on; and whether that is all."""
        ended = pull.ended  # before the count: what came in between is then told the next time
        now, landed = self._clock.now(), pull.progress.bytes
        if landed != pull.bytes:
            pull.bytes, pull.moved = landed, now
        elif not ended and pull.failure is None and now - pull.moved >= self._patience:
            pull.failure = TransferTimeout(f"the peer sent nothing for {self._patience:g} s")
            pull.progress.cancel()
        return pull.tokens, ended

    def cancel(self, pull: Pull) -> None:
        """Its request is gone. Its blocks are not, until it has ended."""
        pull.cancelled = True
        pull.progress.cancel()

    def forget(self, request: Request) -> None:
        """It ended before it started."""
        with self._lock:
            expected = self._expected.pop(request.id, None)
        if expected is not None:
            self._beside(lambda: self._release(expected.ticket))

    def count(self, tokens: int) -> None:
        """Tokens that a request has from a peer."""
        self._stats.hit_tokens += tokens

    def wait(self, seconds: float) -> None:
        """Until something has arrived."""
        self._news.wait(seconds)
        self._news.clear()

    def close(self) -> None:
        self._closed.set()

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats.copy()

    def _beside(self, work: Callable[[], None]) -> bool:
        """False: the system allows no more threads. What nobody renews or releases expires."""
        try:
            self._spawn(work)
        except RuntimeError as error:
            log.warning("nothing is done beside the engine: %s", error)
            return False
        return True

    # -- the threads' side ---------------------------------------------------------------------------------------------

    def _run(self, pull: Pull) -> None:
        began = self._clock.now()
        failure: TransferError | None = None
        try:
            self._source.pull(pull.ticket, pull.into, pull.deadline, progress=pull.progress, first=pull.first)
        except TransferError as error:
            failure = error
        except Exception as error:  # whatever it is, the blocks can be computed
            log.exception("a pull failed in a way that nobody foresaw")
            failure = TransferError(f"the pull failed: {error!r}")
        ended, moved = self._clock.now(), pull.progress
        pull.failure = pull.failure or failure  # a cancelled one may have had a better reason before
        why, note = pull.failure.code if pull.failure is not None else "", pull.note
        took = note.seconds if note is not None else None
        pull.told = Pulled(pull.ticket.peer.name, began, ended, moved.moving, moved.bytes, why, took)
        with self._lock:
            self._stats.pulls += 1
            self._stats.pulled_bytes += pull.progress.bytes
            self._stats.pull_seconds += ended - began
            self._stats.copy_seconds += pull.progress.moving
            self._stats.hidden_seconds += pull.progress.hidden
            self._stats.verified_blocks += pull.progress.verified
        if pull.failure is not None and not (pull.cancelled and isinstance(pull.failure, TransferCancelled)):
            self._count(pull.failure)
        pull.ended = True
        self._news.set()
        if pull.failure is None:
            self._tell(self._source.acknowledge, pull.ticket)
        elif not isinstance(pull.failure, TicketOver):
            self._release(pull.ticket)

    def _count(self, failure: TransferError) -> None:
        log.warning("blocks that a peer has are computed here: %s", failure)
        with self._lock:
            failures = self._stats.pull_failures
            failures[failure.code] = failures.get(failure.code, 0) + 1
            self._stats.recomputed += 1

    def _release(self, ticket: Ticket) -> None:
        self._tell(self._source.release, ticket)

    def _tell(self, what: Callable[[Ticket, float], None], ticket: Ticket) -> None:
        with suppress(TransferError):  # its lease expires
            what(ticket, self._clock.now() + LAST_WORD)

    def _keep(self) -> None:
        """As long as there is somebody who waits."""
        while not self._closed.wait(GLANCE):
            with self._lock:
                if not self._expected:
                    self._keeping = False
                    return
            self.renew()

    def renew(self) -> None:
        """The leases of those that wait, where a third of the time is over."""
        with self._lock:
            expected = list(self._expected.values())
        for one in expected:
            now = self._clock.now()
            if now - one.renewed >= one.ticket.lease / 3:
                one.renewed = now
                self._tell(self._source.renew, one.ticket)
