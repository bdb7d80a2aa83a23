"""The transport between caches of the same process, which copies pieces in memory. Tests use it as a fake network."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.core.clock import Clock, SystemClock
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.errors import PeerChanged, PeerUnreachable, TransferTimeout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.region import StagingBuffer, copy_piece
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Peer, Ticket


class LocalLink:
    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._sender = sender
        self._clock = clock

    def poll_ticket(self, ticket: Ticket, known_blocks: int, wait_s: float, deadline: float) -> Ticket:
        return self._sender.poll_ticket(ticket.id, known_blocks, min(wait_s, max(0.0, deadline - self._clock.now())))

    def fetch(self, fetch: PieceFetch) -> None:
        staging = StagingBuffer()
        for piece in fetch.pieces:
            fetch.progress.raise_if_cancelled()
            if self._clock.now() >= fetch.deadline:
                raise TransferTimeout("the deadline passed before all pieces of the KV transfer were copied")
            with self._sender.read_under_lease(fetch.ticket.id, piece) as lease:
                copy_piece(piece, self._sender.region, lease.blocks, fetch.region, fetch.target_blocks, staging)
            fetch.mark_arrived(piece)

    def renew(self, ticket: Ticket, deadline: float) -> None:
        self._sender.renew_lease(ticket.id)

    def end(self, ticket: Ticket, reason: LeaseEndReason, deadline: float) -> None:
        self._sender.end_lease(ticket.id, reason)

    def close(self) -> None:
        pass


class LocalTransport:
    kind = "local"

    def __init__(self, senders: Iterable[Sender], clock: Clock | None = None) -> None:
        """Create a transport to `senders`, for each of which `advertise_local` was called."""
        self._senders = {sender.endpoints["local"]: sender for sender in senders}
        self._clock = clock or SystemClock()

    def connect(self, peer: Peer, deadline: float) -> LocalLink:
        sender = self._senders.get(peer.endpoints["local"])
        if sender is None:
            raise PeerUnreachable(f"this process has no KV sender with the local address {peer.endpoints['local']!r}")
        if sender.peer.incarnation != peer.incarnation:
            raise PeerChanged(f"KV peer {peer.name} was restarted")
        return LocalLink(sender, self._clock)


def advertise_local(sender: Sender, address: str) -> None:
    """Add a local address to the sender's endpoints, by which a LocalTransport of this process finds the sender."""
    sender.endpoints["local"] = address
