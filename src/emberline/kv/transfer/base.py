"""What a transport is: a Transport connects to a peer, the Link it gives moves pieces and speaks about leases.

Every call has a deadline on the receiver's clock, and raises one of `transfer.errors`. When `fetch` has returned or
raised, nothing of it writes to the receiver's memory any more.
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
    """Pieces that the receiver wants, and where they belong."""

    ticket: Ticket
    blocks: Ids  # the ticket's, and
    generations: Marks  # theirs
    pieces: Sequence[Piece]
    region: Region
    into: Ids
    progress: Progress
    deadline: float

    def target(self, piece: Piece) -> list[memoryview] | None:
        """Where its bytes may go straight away. None: they are to be scattered."""
        same = self.region.layout.tokens == self.ticket.peer.layout.tokens
        return self.region.in_place(piece, self.into) if same else None

    def scatter(self, piece: Piece, data: memoryview) -> None:
        self.region.scatter(piece, self.into, self.ticket.peer.layout, data)

    def landed(self, piece: Piece) -> None:
        self.progress.land(piece, piece.size(self.ticket.peer.layout))


class Link(Protocol):
    def state(self, ticket: Ticket, known: int, wait: float, deadline: float) -> Ticket:
        """As it is now, or within `wait` seconds as soon as it has more blocks than `known`. Renews the lease."""

    def fetch(self, fetch: Fetch) -> None:
        """Lands each piece in the progress, whole and checked. Renews the lease as long as it works."""

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def end(self, ticket: Ticket, how: How, deadline: float) -> None: ...

    def close(self) -> None: ...


class Transport(Protocol):
    kind: str  # the key of a peer's endpoints

    def connect(self, peer: Peer, deadline: float) -> Link:
        """Warm: what the first fetch needs is there."""
