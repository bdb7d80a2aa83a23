"""The interface of transports, which move KV blocks between engines.

A Transport connects to a peer and returns a TransferLink. A link copies pieces of blocks and renews and ends leases.
Every call has a deadline on the receiver's clock and raises the errors of `transfer.errors`. After `fetch` has returned
or raised, nothing writes to the receiver's memory any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.region import BlockIds, Generations, Region
from emberline.kv.transfer.ticket import Peer, Ticket


@dataclass(frozen=True, slots=True)
class PieceFetch:
    """The pieces of KV blocks to fetch, and the receiver's blocks that they are written to."""

    ticket: Ticket
    blocks: BlockIds  # blocks of the ticket, at the sender
    generations: Generations  # generations of these blocks when they were published
    pieces: Sequence[TransferPiece]
    region: Region  # of the receiver
    target_blocks: BlockIds  # blocks of the receiver
    progress: PullProgress
    deadline: float

    def in_place_target(self, piece: TransferPiece) -> list[memoryview] | None:
        """Return the receiver's memory for the piece, if it can be received directly into this memory.

        Return None if the piece must be received into a buffer and copied to its blocks.
        """
        same = self.region.layout.tokens == self.ticket.peer.layout.tokens
        return self.region.in_place_views(piece, self.target_blocks) if same else None

    def scatter(self, piece: TransferPiece, data: memoryview) -> None:
        self.region.scatter(piece, self.target_blocks, self.ticket.peer.layout, data)

    def mark_arrived(self, piece: TransferPiece) -> None:
        self.progress.mark_arrived(piece, piece.num_bytes(self.ticket.peer.layout))


class TransferLink(Protocol):
    def poll_ticket(self, ticket: Ticket, known_blocks: int, wait_s: float, deadline: float) -> Ticket:
        """Return the ticket as soon as it lists more than `known_blocks` blocks, at the latest after `wait_s`.

        The lease is renewed.
        """

    def fetch(self, fetch: PieceFetch) -> None:
        """Copy the pieces, check each piece, and mark it as arrived. The lease is renewed during the copies."""

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def end(self, ticket: Ticket, reason: LeaseEndReason, deadline: float) -> None: ...

    def close(self) -> None: ...


class Transport(Protocol):
    kind: str  # the transport's key in a peer's endpoints

    def connect(self, peer: Peer, deadline: float) -> TransferLink:
        """Connect to the peer and prepare everything that the first fetch needs."""
