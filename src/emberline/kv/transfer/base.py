"""The interface of transports: a Transport connects to a peer and returns a TransferLink.

A link copies pieces and manages leases. Every call has a deadline on the receiver's clock and raises errors of
`transfer.errors`. After `fetch` has returned or raised, nothing writes to the receiver's memory any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from emberline.kv.transfer.lease import How
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.progress import Progress
from emberline.kv.transfer.region import Ids, Marks, Region
from emberline.kv.transfer.ticket import Peer, Ticket


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pieces to fetch, and the blocks of the receiver that they are written to."""

    ticket: Ticket
    blocks: Ids  # blocks of the ticket, at the sender
    generations: Marks  # generations of these blocks when they were published
    pieces: Sequence[Piece]
    region: Region  # of the receiver
    into: Ids  # blocks of the receiver
    progress: Progress
    deadline: float

    def target(self, piece: Piece) -> list[memoryview] | None:
        """Return the memory that the piece can be received into directly, or None if it must be scattered."""
        same = self.region.layout.tokens == self.ticket.peer.layout.tokens
        return self.region.in_place(piece, self.into) if same else None

    def scatter(self, piece: Piece, data: memoryview) -> None:
        self.region.scatter(piece, self.into, self.ticket.peer.layout, data)

    def landed(self, piece: Piece) -> None:
        self.progress.land(piece, piece.size(self.ticket.peer.layout))


class Link(Protocol):
    def state(self, ticket: Ticket, known: int, wait: float, deadline: float) -> Ticket:
        """Return the ticket as soon as it has more than `known_blocks` blocks, or after `wait_s`.

        Renews the lease.
        """

    def fetch(self, fetch: Fetch) -> None:
        """Copy the pieces, verify each and mark it in the progress. Renews the lease meanwhile."""

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def end(self, ticket: Ticket, how: How, deadline: float) -> None: ...

    def close(self) -> None: ...


class Transport(Protocol):
    kind: str  # the transport's key in a peer's endpoints

    def connect(self, peer: Peer, deadline: float) -> Link:
        """Connect to the peer and prepare everything that the first fetch needs."""
