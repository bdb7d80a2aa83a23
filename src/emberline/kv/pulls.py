"""PullManager: pulls prompt prefixes from other engines' caches into blocks of requests, a thread each.

As with a TierFetch, the tokens that have arrived count as computed and the rest is computed here. The thread writes
directly to the request's blocks, so the blocks must not be reused before the pull has ended, even if it is cancelled.
It writes while steps run, but only after the steps that were running when it started: they may still use earlier
content of these blocks (`Region.fence`). The engine's loop never waits for a pull, and gets no exception from it.
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

PATIENCE = 30.0  # a dead or stuck peer is detected sooner, by the transport's I/O timeout
LAST_WORD = 2.0  # time to notify a peer that its blocks are no longer needed; without the message the lease expires
GLANCE = 1.0  # between checks of the leases of waiting requests


class Source(Protocol):
    """The methods of Receiver that pulls use."""

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
    into: Sequence[int]  # blocks of the request
    covered: int  # leading tokens of the prompt that the ticket covers
    first: int  # index of the first of the ticket's blocks that is missing here
    deadline: float
    moved: float  # time at which new bytes were last seen
    bytes: int = 0  # bytes that had arrived then
    progress: Progress = field(default_factory=Progress)
    failure: TransferError | None = None
    cancelled: bool = False
    told: Pulled | None = None  # outcome, once the pull has ended
    ended: bool = False  # whether the thread has stopped writing; the thread sets it last

    @property
    def tokens(self) -> int:
        """Number of leading prompt tokens that are in the cache, including those cached before the pull."""
        return max(self.progress.proven, self.first) * self.ticket.peer.layout.tokens

    @property
    def note(self) -> Note | None:
        """The peer's note about the finished prefill, if the pull is complete."""
        ticket = self.progress.ticket
        return Note.parsed(ticket.note) if self.progress.complete and ticket is not None else None


@dataclass(slots=True)
class Expected:
    """A ticket whose request waits for admission; its lease is renewed until then."""

    ticket: Ticket
    covered: int  # tokens that the ticket covers
    renewed: float  # time of the last renewal


def _covered(ticket: Ticket, request: Request) -> int:
    """Return how many of the request's tokens the ticket covers: its prompt, or all that it arrived with.

    Raises BadTransfer if the ticket is for other tokens.
    """
    for count in {request.prompt_len, request.arrived_len}:
        if ticket.subject == subject_of(ticket.peer.layout, request.salt, request.tokens[:count]):
            return count
    raise BadTransfer("the KV ticket is for another prompt than the request's")


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
        """`stall_timeout_s`: time without a new byte after which a pull is cancelled and the rest is computed."""
        self._source = source
        self._patience = patience
        self._clock = clock or SystemClock()
        self._spawn = in_thread
        self._lock = threading.Lock()  # guards the next three attributes
        self._stats = TransferStats()
        self._expected: dict[str, Expected] = {}  # by request
        self._keeping = False
        self._news, self._closed = threading.Event(), threading.Event()

    # -- called by the engine's loop -----------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        """Renew the lease on the request's source until `start` or `drop_lease`; clear an unusable source."""
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
        """Return the tokens per block of the request's peer: a pull starts at a boundary of the peer's blocks."""
        return self._expected[request.id].ticket.peer.layout.tokens

    def start(self, request: Request, into: Sequence[int]) -> Pull | None:
        """Start pulling the full blocks that the ticket covers and the cache lacks; None if there are none."""
        with self._lock:
            lease = self._expected.pop(request.id)
        ticket = lease.ticket
        request.source = None
        size, now = ticket.peer.layout.tokens, self._clock.now()
        if request.cached // size >= lease.covered // size:
            self._beside(lambda: self._release(ticket))
            return None
        pull = Pull(ticket, list(into), lease.covered, request.cached // size, request.deadline, now)
        self._source.region.fence()
        if not self._beside(lambda: self._run(pull)):
            self._count(TransferError("no thread could be started for the KV transfer"))
            return None
        return pull

    def take(self, pull: Pull) -> tuple[int, bool]:
        """Return how many leading prompt tokens are available, and whether the pull has ended.

        Cancel a stalled pull.
        """
        ended = pull.ended  # read before the token count, so that no token is missed after the end was reported
        now, arrived = self._clock.now(), pull.progress.bytes
        if arrived != pull.bytes:
            pull.bytes, pull.moved = arrived, now
        elif not ended and pull.failure is None and now - pull.moved >= self._patience:
            pull.failure = TransferTimeout(f"the peer sent no data for {self._patience:g} s")
            pull.progress.cancel()
        return pull.tokens, ended

    def cancel(self, pull: Pull) -> None:
        """Cancel the pull of a request that has ended. Its blocks must not be reused until the pull has ended."""
        pull.cancelled = True
        pull.progress.cancel()

    def forget(self, request: Request) -> None:
        """Release the lease of a request that ended before its pull started."""
        with self._lock:
            lease = self._expected.pop(request.id, None)
        if lease is not None:
            self._beside(lambda: self._release(lease.ticket))

    def count(self, tokens: int) -> None:
        """Count tokens that a request got from a peer."""
        self._stats.hit_tokens += tokens

    def wait(self, seconds: float) -> None:
        """Wait until a pull has ended, or until the timeout."""
        self._news.wait(seconds)
        self._news.clear()

    def close(self) -> None:
        self._closed.set()

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats.copy()

    def _beside(self, work: Callable[[], None]) -> bool:
        """Run `work` in a thread. Return False if none can be started; leases then expire without a message."""
        try:
            self._spawn(work)
        except RuntimeError as error:
            log.warning("Cannot start a KV transfer thread: error=%s", error)
            return False
        return True

    # -- run by the threads --------------------------------------------------------------------------------------------

    def _run(self, pull: Pull) -> None:
        began = self._clock.now()
        failure: TransferError | None = None
        try:
            self._source.pull(pull.ticket, pull.into, pull.deadline, progress=pull.progress, first=pull.first)
        except TransferError as error:
            failure = error
        except Exception as error:  # after any failure, the blocks can be computed
            log.exception("KV transfer failed unexpectedly: peer=%s", pull.ticket.peer.name)
            failure = TransferError(f"the KV transfer failed: {error!r}")
        ended, moved = self._clock.now(), pull.progress
        pull.failure = pull.failure or failure  # a stall was recorded before the pull was cancelled for it
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
        log.warning("KV transfer failed, computing the prefix instead: code=%s reason=%s", failure.code, failure)
        with self._lock:
            failures = self._stats.pull_failures
            failures[failure.code] = failures.get(failure.code, 0) + 1
            self._stats.recomputed += 1

    def _release(self, ticket: Ticket) -> None:
        self._tell(self._source.release, ticket)

    def _tell(self, what: Callable[[Ticket, float], None], ticket: Ticket) -> None:
        with suppress(TransferError):  # without the message the lease expires
            what(ticket, self._clock.now() + LAST_WORD)

    def _keep(self) -> None:
        """Renew the leases while any request waits for its pull to start."""
        while not self._closed.wait(GLANCE):
            with self._lock:
                if not self._expected:
                    self._keeping = False
                    return
            self.renew()

    def renew(self) -> None:
        """Renew each waiting lease once a third of its duration has passed."""
        with self._lock:
            leases = list(self._expected.values())
        for lease in leases:
            now = self._clock.now()
            if now - lease.renewed >= lease.ticket.lease / 3:
                lease.renewed = now
                self._tell(self._source.renew, lease.ticket)
