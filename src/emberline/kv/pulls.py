"""PullManager: copies (pulls) prompt prefixes from other engines' KV caches into requests' blocks.

Each pull has a thread to itself. Tokens that have arrived count as computed, and this engine computes the remaining
tokens of the prompt. The thread writes directly to the request's blocks, so the blocks must not be reused before the
pull has ended, even if it is cancelled. The thread writes while engine steps run. It first waits for the steps that
were running when it started, because they may still read earlier content of these blocks
(`Region.wait_for_started_work`). The engine's loop never waits for a pull and gets no exception from it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from emberline.core.background_threads import BackgroundThreads
from emberline.core.clock import Clock, SystemClock
from emberline.core.events import TransferStats
from emberline.core.handoff import BlockPull, PrefillResult
from emberline.core.request import Request
from emberline.kv.transfer.errors import BadTransfer, TicketEnded, TransferCancelled, TransferError, TransferTimeout
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.region import Region
from emberline.kv.transfer.ticket import Ticket, compute_ticket_subject

log = logging.getLogger("emberline.transfer")

PULL_STALL_TIMEOUT_S = 30.0  # a dead or stuck peer is detected sooner, by the transport's I/O timeout
LEASE_END_TIMEOUT_S = (
    2.0  # time to notify a peer that its blocks are no longer needed; without the message the lease expires
)
MAX_IDLE_THREADS = 16  # kept for later pulls
LEASE_CHECK_INTERVAL_S = 1.0  # between checks of the leases of waiting requests
MAX_LEASES_TO_RELEASE = 1024  # that wait for a thread; older ones expire at the peer


class PullClient(Protocol):
    """The part of Receiver's interface that PullManager uses."""

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
    # Set if no block is usable before all target blocks have arrived: the number of prompt tokens in the cache then.
    indivisible_tokens: int | None = None
    last_arrived_bytes: int = 0  # bytes that had arrived then
    progress: PullProgress = field(default_factory=PullProgress)
    failure: TransferError | None = None
    cancelled: bool = False
    summary: BlockPull | None = None  # outcome, once the pull has ended
    ended: bool = False  # whether the thread has stopped writing; the thread sets it last

    @property
    def available_tokens(self) -> int:
        """The number of leading prompt tokens in the cache, including those that were cached before the pull."""
        if self.indivisible_tokens is not None:
            return self.indivisible_tokens if self.progress.confirmed_blocks >= len(self.target_blocks) else 0
        return max(self.progress.confirmed_blocks, self.first_missing_block) * self.ticket.peer.layout.tokens

    @property
    def prefill_result(self) -> PrefillResult | None:
        """What the peer reported about the finished prefill, or None if the pull is not complete."""
        ticket = self.progress.ticket
        return PrefillResult.parse(ticket.note) if self.progress.complete and ticket is not None else None


@dataclass(slots=True)
class WaitingLease:
    """The ticket of a request that waits for admission. The ticket's lease is renewed until the request is admitted."""

    ticket: Ticket
    covered_tokens: int  # tokens that the ticket covers
    renewed_at: float  # time of the last renewal


def _count_covered_tokens(ticket: Ticket, request: Request) -> int:
    """Return how many tokens of the request the ticket covers: its prompt, or the prompt and the resumed output.

    Raises BadTransfer if the ticket was issued for different tokens.
    """
    for count in {request.prompt_len, request.submitted_len}:
        if ticket.subject == compute_ticket_subject(ticket.peer.layout, request.salt, request.tokens[:count]):
            return count
    raise BadTransfer("the KV ticket was issued for a different prompt than that of the request")


class PullManager:
    def __init__(
        self,
        client: PullClient,
        *,
        stall_timeout_s: float = PULL_STALL_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """Create a manager that pulls through `client`.

        A pull that receives no byte for `stall_timeout_s` is cancelled, and the missing blocks are computed.
        """
        self._source = client
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock or SystemClock()
        self._threads = BackgroundThreads("kv-pulls", MAX_IDLE_THREADS)
        self._start_thread = self._threads.run
        self._lock = threading.Lock()  # guards the next four attributes
        self._stats = TransferStats()
        self._waiting_leases: dict[str, WaitingLease] = {}  # by request
        self._is_renewing = False
        self._leases_to_release: deque[Ticket] = deque(maxlen=MAX_LEASES_TO_RELEASE)
        self._progress_event, self._close_event = threading.Event(), threading.Event()

    # -- called by the engine's loop -----------------------------------------------------------------------------------

    def keep_lease_alive(self, request: Request) -> None:
        """Renew the lease on the peer's blocks until `start` or `drop_lease` is called for this request.

        If the request's ticket is invalid, remove it from the request.
        """
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
        """Return the number of tokens per KV block at the request's peer.

        A pull can only start at the beginning of one of the peer's blocks.
        """
        return self._waiting_leases[request.id].ticket.peer.layout.tokens

    def covered_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a waiting request its ticket covers."""
        return self._waiting_leases[request.id].covered_tokens

    def start(
        self, request: Request, target_blocks: Sequence[int], whole: tuple[int, int] | None = None
    ) -> Pull | None:
        """Start a pull of the full blocks that the ticket covers and the cache does not have.

        `whole` is set if no block is usable before all have arrived. It holds the index of the first block to copy, and
        the number of prompt tokens that are cached when all have arrived. Return None if there are no blocks to copy,
        or if no thread could be started.
        """
        with self._lock:
            lease = self._waiting_leases.pop(request.id)
        ticket = lease.ticket
        request.source = None
        size, now = ticket.peer.layout.tokens, self._clock.now()
        if request.num_cached // size >= lease.covered_tokens // size:
            self._release_in_background(ticket)
            return None
        first, num_tokens = whole or (request.num_cached // size, None)
        pull = Pull(ticket, list(target_blocks), lease.covered_tokens, first, request.deadline, now, num_tokens)
        self._source.region.wait_for_started_work()
        if not self._run_in_background(lambda: self._run_pull(pull)):
            self._record_failure(TransferError("no thread could be started for the KV transfer"))
            self._release_in_background(ticket)
            return None
        return pull

    def poll_available_tokens(self, pull: Pull) -> tuple[int, bool]:
        """Return how many leading prompt tokens are available, and whether the pull has ended.

        A pull that has received no data for too long is cancelled.
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
        """Cancel the pull of a request that has ended.

        The blocks of the request must not be reused before the pull has ended.
        """
        pull.cancelled = True
        pull.progress.cancel()

    def drop_lease(self, request: Request) -> None:
        """Release the lease of a request that ended before its pull started."""
        with self._lock:
            lease = self._waiting_leases.pop(request.id, None)
        if lease is not None:
            self._release_in_background(lease.ticket)

    def record_hit_tokens(self, tokens: int) -> None:
        """Count tokens that a request received from a peer, for the statistics."""
        self._stats.hit_tokens += tokens

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a pull has ended, at most `timeout_s`."""
        self._progress_event.wait(timeout_s)
        self._progress_event.clear()

    def close(self) -> None:
        self._close_event.set()
        self._threads.close()

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats.copy()

    def _release_in_background(self, ticket: Ticket) -> None:
        """Release a lease. If no thread can be started now, the next background work releases it."""
        with self._lock:
            self._leases_to_release.append(ticket)
        self._run_in_background(self._release_leases)

    def _run_in_background(self, work: Callable[[], None]) -> bool:
        """Run `work` in a thread. Return False if no thread can be started."""
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
            self._send_to_peer(self._source.release, pull.ticket)
        self._release_leases()

    def _record_failure(self, failure: TransferError) -> None:
        log.warning("KV transfer failed, computing the prefix instead: code=%s reason=%s", failure.code, failure)
        with self._lock:
            failures = self._stats.pull_failures
            failures[failure.code] = failures.get(failure.code, 0) + 1
            self._stats.recomputed += 1

    def _release_leases(self) -> None:
        while True:
            with self._lock:
                if not self._leases_to_release:
                    return
                ticket = self._leases_to_release.popleft()
            self._send_to_peer(self._source.release, ticket)

    def _send_to_peer(self, send: Callable[[Ticket, float], None], ticket: Ticket) -> None:
        with suppress(TransferError):  # without the message the lease expires
            send(ticket, self._clock.now() + LEASE_END_TIMEOUT_S)

    def _renew_while_waiting(self) -> None:
        """Renew the leases in a loop until no request waits for its pull to start."""
        while not self._close_event.wait(LEASE_CHECK_INTERVAL_S):
            with self._lock:
                if not self._waiting_leases:
                    self._is_renewing = False
                    return
            self.renew_leases()

    def renew_leases(self) -> None:
        """Renew each waiting lease whose last renewal is more than a third of its duration ago."""
        with self._lock:
            leases = list(self._waiting_leases.values())
        for lease in leases:
            now = self._clock.now()
            if now - lease.renewed_at >= lease.ticket.lease / 3:
                lease.renewed_at = now
                self._send_to_peer(self._source.renew, lease.ticket)
