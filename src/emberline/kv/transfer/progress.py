"""Progress: one pull, watched and cancelled from any thread. Given to `pull` again, it goes on where it stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from emberline.kv.transfer.errors import BadTransfer, TransferCancelled
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.ticket import Ticket


class Progress:
    def __init__(self) -> None:
        self.ticket: Ticket | None = None  # its newest state
        self.blocks = 0  # of the ticket, that were planned for so far
        self.bytes = 0  # landed
        self.moving = 0.0  # seconds in which they did
        self.hidden = 0.0  # of these, while the peer had more to compute: nobody waited for them
        self.proven = 0  # blocks of the ticket, from the first on, that have landed and are known to be right
        self.verified = 0  # blocks whose checksum was compared with what is here
        self.complete = False  # all of it landed, and the lease was still alive then
        self._purpose: tuple[object, ...] = ()
        self._missing: dict[Piece, None] = {}
        self._lock = threading.Lock()
        self._running = False
        self._cancelled = False
        self._stops: list[Callable[[], None]] = []

    @property
    def missing(self) -> list[Piece]:
        """Planned and not landed, in order."""
        with self._lock:
            return list(self._missing)

    def cancel(self) -> None:
        """The pull raises TransferCancelled soon; not before that are its blocks free to be used otherwise."""
        with self._lock:
            self._cancelled = True
            for stop in self._stops:  # under the lock: who has left may use the same connection for something else
                stop()

    def check(self) -> None:
        if self._cancelled:
            raise TransferCancelled("the transfer was cancelled")

    # -- for the receiver and its transports -----------------------------------------------------------------------

    @contextmanager
    def running(self, ticket: Ticket, into: Sequence[int], layers: range, first: int) -> Iterator[Ticket]:
        """The newest state of the ticket. A second pull of the same meanwhile, or of something else, is refused."""
        with self._lock:
            purpose = (ticket.id, tuple(into), layers, first)
            if self._running or self._purpose not in ((), purpose):
                raise BadTransfer("this progress belongs to another pull", hint="one Progress for each pull")
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
        """`stop` makes the calling thread's wait end, and is called by `cancel`; it does not block."""
        with self._lock:
            self._stops.append(stop)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)
