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
from emberline.core.handoff import BlockPull, PrefillResult
from emberline.core.request import Request
from emberline.kv.transfer.errors import BadTransfer, TicketEnded, TransferCancelled, TransferError, TransferTimeout
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.region import Region
from emberline.kv.transfer.ticket import Ticket, ticket_subject

log = logging.getLogger("emberline.transfer")

PULL_STALL_TIMEOUT_S = 30.0  # a dead or stuck peer is detected sooner, by the transport's I/O timeout
LEASE_END_TIMEOUT_S = (
    2.0  # time to notify a peer that its blocks are no longer needed; without the message the lease expires
)
LEASE_CHECK_INTERVAL_S = 1.0  # between checks of the leases of waiting requests


class PullSource(Protocol):
    """The methods of Receiver that pulls use."""

    region: Region

    def pull(
        self, ticket: Ticket, target_blocks: Sequence[int], deadline: float, *, progress: PullProgress, first_block: int
    ) -> PullProgress: ...

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def acknowledge(self, ticket: Ticket, deadline: float) -> None: ...

    def release(self, ticket: Ticket, deadline: float) -> None: ...


@dataclass(slots=True, eq=False)
class Pull:
    ticket: Ticket
    target_blocks: Sequence[int]  # blocks of the request
    covered_tokens: int  # leading tokens of the prompt that the ticket covers
    first_missing_block: int  # index of the first of the ticket's blocks that is missing here
    deadline: float
    last_progress_at: float  # time at which new bytes were last seen
    last_arrived_bytes: int = 0  # bytes that had arrived then
    progress: PullProgress = field(default_factory=PullProgress)
    failure: TransferError | None = None
    cancelled: bool = False
    summary: BlockPull | None = None  # outcome, once the pull has ended
    ended: bool = False  # whether the thread has stopped writing; the thread sets it last

    @property
    def available_tokens(self) -> int:
        """Number of leading prompt tokens that are in the cache, including those cached before the pull."""
        return max(self.progress.confirmed_blocks, self.first_missing_block) * self.ticket.peer.layout.tokens

    @property
    def prefill_result(self) -> PrefillResult | None:
        """The peer's note about the finished prefill, if the pull is complete."""
        ticket = self.progress.ticket
        return PrefillResult.parse(ticket.note) if self.progress.complete and ticket is not None else None


@dataclass(slots=True)
class WaitingLease:
    """A ticket whose request waits for admission; its lease is renewed until then."""

    ticket: Ticket
    covered_tokens: int  # tokens that the ticket covers
    renewed_at: float  # time of the last renewal


def _count_covered_tokens(ticket: Ticket, request: Request) -> int:
    """Return how many of the request's tokens the ticket covers: its prompt, or all that it arrived with.

    Raises BadTransfer if the ticket is for other tokens.
    """
    for count in {request.prompt_len, request.submitted_len}:
        if ticket.subject == ticket_subject(ticket.peer.layout, request.salt, request.tokens[:count]):
            return count
    raise BadTransfer("the KV ticket is for another prompt than the request's")


def start_daemon_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="kv-pulls", daemon=True).start()


class PullManager:
    def __init__(
        self,
        source: PullSource,
        *,
        stall_timeout_s: float = PULL_STALL_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """`stall_timeout_s`: time without a new byte after which a pull is cancelled and the rest is computed."""
        self._source = source
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock or SystemClock()
        self._start_thread = start_daemon_thread
        self._lock = threading.Lock()  # guards the next three attributes
        self._stats = TransferStats()
        self._waiting_leases: dict[str, WaitingLease] = {}  # by request
        self._is_renewing = False
        self._progress_event, self._close_event = threading.Event(), threading.Event()

    # -- called by the engine's loop -----------------------------------------------------------------------------------

    def keep_lease_alive(self, request: Request) -> None:
        """Renew the lease on the request's source until `start` or `drop_lease`; clear an unusable source."""
        assert request.source is not None
        try:
            ticket = Ticket.parse(request.source)
            covered = _count_covered_tokens(ticket, request)
            self._source.region.layout.check_compatible(ticket.peer.layout)
        except TransferError as error:
            self._record_failure(error)
            request.source = None
            return
        with self._lock:
            self._waiting_leases[request.id] = WaitingLease(ticket, covered, self._clock.now())
            self._is_renewing = self._is_renewing or self._run_in_background(self._renew_while_waiting)

    def peer_block_tokens(self, request: Request) -> int:
        """Return the tokens per block of the request's peer: a pull starts at a boundary of the peer's blocks."""
        return self._waiting_leases[request.id].ticket.peer.layout.tokens

    def start(self, request: Request, target_blocks: Sequence[int]) -> Pull | None:
        """Start pulling the full blocks that the ticket covers and the cache lacks; None if there are none."""
        with self._lock:
            lease = self._waiting_leases.pop(request.id)
        ticket = lease.ticket
        request.source = None
        size, now = ticket.peer.layout.tokens, self._clock.now()
        if request.num_cached // size >= lease.covered_tokens // size:
            self._run_in_background(lambda: self._release_lease(ticket))
            return None
        pull = Pull(
            ticket, list(target_blocks), lease.covered_tokens, request.num_cached // size, request.deadline, now
        )
        self._source.region.wait_for_started_work()
        if not self._run_in_background(lambda: self._run_pull(pull)):
            self._record_failure(TransferError("no thread could be started for the KV transfer"))
            return None
        return pull

    def poll(self, pull: Pull) -> tuple[int, bool]:
        """Return how many leading prompt tokens are available, and whether the pull has ended.

        Cancel a stalled pull.
        """
        ended = pull.ended  # read before the token count, so that no token is missed after the end was reported
        now, arrived = self._clock.now(), pull.progress.arrived_bytes
        if arrived != pull.last_arrived_bytes:
            pull.last_arrived_bytes, pull.last_progress_at = arrived, now
        elif not ended and pull.failure is None and now - pull.last_progress_at >= self._stall_timeout_s:
            pull.failure = TransferTimeout(f"the peer sent no data for {self._stall_timeout_s:g} s")
            pull.progress.cancel()
        return pull.available_tokens, ended

    def cancel(self, pull: Pull) -> None:
        """Cancel the pull of a request that has ended. Its blocks must not be reused until the pull has ended."""
        pull.cancelled = True
        pull.progress.cancel()

    def drop_lease(self, request: Request) -> None:
        """Release the lease of a request that ended before its pull started."""
        with self._lock:
            lease = self._waiting_leases.pop(request.id, None)
        if lease is not None:
            self._run_in_background(lambda: self._release_lease(lease.ticket))

    def count_hit_tokens(self, tokens: int) -> None:
        """Count tokens that a request got from a peer."""
        self._stats.hit_tokens += tokens

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a pull has ended, or until the timeout."""
        self._progress_event.wait(timeout_s)
        self._progress_event.clear()

    def close(self) -> None:
        self._close_event.set()

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats.copy()

    def _run_in_background(self, work: Callable[[], None]) -> bool:
        """Run `work` in a thread. Return False if none can be started; leases then expire without a message."""
        try:
            self._start_thread(work)
        except RuntimeError as error:
            log.warning("Cannot start a KV transfer thread: error=%s", error)
            return False
        return True

    # -- run by the threads --------------------------------------------------------------------------------------------

    def _run_pull(self, pull: Pull) -> None:
        began = self._clock.now()
        failure: TransferError | None = None
        try:
            self._source.pull(
                pull.ticket,
                pull.target_blocks,
                pull.deadline,
                progress=pull.progress,
                first_block=pull.first_missing_block,
            )
        except TransferError as error:
            failure = error
        except Exception as error:  # after any failure, the blocks can be computed
            log.exception("KV transfer failed unexpectedly: peer=%s", pull.ticket.peer.name)
            failure = TransferError(f"the KV transfer failed: {error!r}")
        ended, moved = self._clock.now(), pull.progress
        pull.failure = pull.failure or failure  # a stall was recorded before the pull was cancelled for it
        why, note = pull.failure.code if pull.failure is not None else "", pull.prefill_result
        took = note.seconds if note is not None else None
        pull.summary = BlockPull(
            pull.ticket.peer.name, began, ended, moved.transfer_seconds, moved.arrived_bytes, why, took
        )
        with self._lock:
            self._stats.pulls += 1
            self._stats.pulled_bytes += pull.progress.arrived_bytes
            self._stats.pull_seconds += ended - began
            self._stats.copy_seconds += pull.progress.transfer_seconds
            self._stats.hidden_seconds += pull.progress.overlapped_seconds
            self._stats.verified_blocks += pull.progress.verified_blocks
        if pull.failure is not None and not (pull.cancelled and isinstance(pull.failure, TransferCancelled)):
            self._record_failure(pull.failure)
        pull.ended = True
        self._progress_event.set()
        if pull.failure is None:
            self._send_to_peer(self._source.acknowledge, pull.ticket)
        elif not isinstance(pull.failure, TicketEnded):
            self._release_lease(pull.ticket)

    def _record_failure(self, failure: TransferError) -> None:
        log.warning("KV transfer failed, computing the prefix instead: code=%s reason=%s", failure.code, failure)
        with self._lock:
            failures = self._stats.pull_failures
            failures[failure.code] = failures.get(failure.code, 0) + 1
            self._stats.recomputed += 1

    def _release_lease(self, ticket: Ticket) -> None:
        self._send_to_peer(self._source.release, ticket)

    def _send_to_peer(self, send: Callable[[Ticket, float], None], ticket: Ticket) -> None:
        with suppress(TransferError):  # without the message the lease expires
            send(ticket, self._clock.now() + LEASE_END_TIMEOUT_S)

    def _renew_while_waiting(self) -> None:
        """Renew the leases while any request waits for its pull to start."""
        while not self._close_event.wait(LEASE_CHECK_INTERVAL_S):
            with self._lock:
                if not self._waiting_leases:
                    self._is_renewing = False
                    return
            self.renew_leases()

    def renew_leases(self) -> None:
        """Renew each waiting lease once a third of its duration has passed."""
        with self._lock:
            leases = list(self._waiting_leases.values())
        for lease in leases:
            now = self._clock.now()
            if now - lease.renewed_at >= lease.ticket.lease / 3:
                lease.renewed_at = now
                self._send_to_peer(self._source.renew, lease.ticket)
