"""PullProgress: the state of one pull (a copy of a peer's KV blocks). Any thread may read it or cancel the pull.

If a pull has failed, calling `pull` again with the same progress continues where it stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from emberline.kv.transfer.errors import BadTransfer, TransferCancelled
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.ticket import Ticket


class PullProgress:
    def __init__(self) -> None:
        self.ticket: Ticket | None = None  # newest state of the ticket
        self.planned_blocks = 0  # blocks of the ticket that were divided into pieces
        self.arrived_bytes = 0
        self.transfer_seconds = 0.0  # seconds spent copying
        self.overlapped_seconds = 0.0  # of these, seconds while the peer still computed: they delayed no request
        self.confirmed_blocks = 0  # leading blocks that arrived while the lease was valid
        self.verified_blocks = 0  # blocks whose checksum was compared after they arrived
        self.complete = False  # whether all blocks arrived while the lease was valid
        self._purpose: tuple[object, ...] = ()
        self._missing: dict[TransferPiece, None] = {}
        self._lock = threading.Lock()
        self._running = False
        self._cancelled = False
        self._stop_callbacks: list[Callable[[], None]] = []

    @property
    def missing_pieces(self) -> list[TransferPiece]:
        """The pieces that have not arrived yet, in order."""
        with self._lock:
            return list(self._missing)

    def cancel(self) -> None:
        """Make the running pull raise TransferCancelled soon. Its blocks must not be reused before it has raised."""
        with self._lock:
            self._cancelled = True
            for (
                stop
            ) in self._stop_callbacks:  # under the lock: a fetch that ended may reuse its connection for another call
                stop()

    def raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise TransferCancelled("the KV transfer was cancelled")

    # -- for the receiver and its transports -----------------------------------------------------------------------

    @contextmanager
    def track_pull(
        self, ticket: Ticket, target_blocks: Sequence[int], layers: range, first_block: int
    ) -> Iterator[Ticket]:
        """Mark a pull as running while the context is open, and yield the newest known state of the ticket.

        Raises BadTransfer if a pull with this progress is already running, or if an earlier one had different
        arguments.
        """
        with self._lock:
            purpose = (ticket.id, tuple(target_blocks), layers, first_block)
            if self._running or self._purpose not in ((), purpose):
                raise BadTransfer(
                    "this PullProgress is used by a running pull, or was used by a pull with different arguments",
                    hint="use one PullProgress for each pull",
                )
            self._running, self._purpose = True, purpose
            self.ticket = self.ticket or ticket
        try:
            self.raise_if_cancelled()
            yield self.ticket
        finally:
            with self._lock:
                self._running = False

    def add_pieces(self, ticket: Ticket, pieces: Iterable[TransferPiece]) -> None:
        with self._lock:
            self._missing.update(dict.fromkeys(pieces))
            self.ticket, self.planned_blocks = ticket, len(ticket.blocks)

    def mark_arrived(self, piece: TransferPiece, num_bytes: int) -> None:
        with self._lock:
            del self._missing[piece]
            self.arrived_bytes += num_bytes

    @contextmanager
    def stop_on_cancel(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` when the pull is cancelled while this context is open.

        `stop` must not block, and must make the calling thread stop waiting.
        """
        with self._lock:
            self._stop_callbacks.append(stop)
        try:
            self.raise_if_cancelled()
            yield
        finally:
            with self._lock:
                self._stop_callbacks.remove(stop)
