"""PullProgress: the state of one pull, which any thread may read and cancel.

A pull that failed continues where it stopped when `pull` is called again with the same progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from emberline.kv.transfer.errors import BadTransfer, TransferCancelled
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.ticket import Ticket


class Progress:
    def __init__(self) -> None:
        self.ticket: Ticket | None = None  # newest state of the ticket
        self.blocks = 0  # blocks of the ticket that were divided into pieces
        self.bytes = 0
        self.moving = 0.0  # seconds spent copying
        self.hidden = 0.0  # of these, seconds while the peer still computed: they delayed no request
        self.proven = 0  # leading blocks that arrived while the lease was valid
        self.verified = 0  # blocks whose checksum was compared after they arrived
        self.complete = False  # whether all blocks arrived while the lease was valid
        self._purpose: tuple[object, ...] = ()
        self._missing: dict[Piece, None] = {}
        self._lock = threading.Lock()
        self._running = False
        self._cancelled = False
        self._stops: list[Callable[[], None]] = []

    @property
    def missing(self) -> list[Piece]:
        """The pieces that have not arrived, in order."""
        with self._lock:
            return list(self._missing)

    def cancel(self) -> None:
        """Make the pull raise TransferCancelled soon. Its blocks must not be reused before it has raised."""
        with self._lock:
            self._cancelled = True
            for stop in self._stops:  # under the lock: a fetch that ended may reuse its connection for another call
                stop()

    def check(self) -> None:
        if self._cancelled:
            raise TransferCancelled("the KV transfer was cancelled")

    # -- for the receiver and its transports -----------------------------------------------------------------------

    @contextmanager
    def running(self, ticket: Ticket, into: Sequence[int], layers: range, first: int) -> Iterator[Ticket]:
        """Yield the newest state of the ticket for the duration of a pull.

        Raises BadTransfer if a pull with this progress is running, or an earlier one had other arguments.
        """
        with self._lock:
            purpose = (ticket.id, tuple(into), layers, first)
            if self._running or self._purpose not in ((), purpose):
                raise BadTransfer("this progress belongs to another pull", hint="use one PullProgress for each pull")
            self._running, self._purpose = True, purpose
            self.ticket = self.ticket or ticket
        try:
            self.check()
            yield self.ticket
        finally:
            with self._lock:
                self._running = False

    def plan(self, ticket: Ticket, pieces: Iterable[Piece]) -> None:
        with self._lock:
            self._missing.update(dict.fromkeys(pieces))
            self.ticket, self.blocks = ticket, len(ticket.blocks)

    def land(self, piece: Piece, size: int) -> None:
        with self._lock:
            del self._missing[piece]
            self.bytes += size

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call `stop`, which must end the calling thread's wait without blocking."""
        with self._lock:
            self._stops.append(stop)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)
