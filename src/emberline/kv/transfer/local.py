"""The transport within one process, which copies pieces from memory to memory.

Tests use it as a fake network.
"""

from __future__ import annotations

from collections.abc import Iterable

from emberline.core.clock import Clock, SystemClock
from emberline.kv.transfer.base import Fetch
from emberline.kv.transfer.errors import PeerChanged, PeerUnreachable, TransferTimeout
from emberline.kv.transfer.lease import How
from emberline.kv.transfer.region import Staging, move
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Peer, Ticket


class LocalLink:
    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._sender = sender
        self._clock = clock

    def state(self, ticket: Ticket, known: int, wait: float, deadline: float) -> Ticket:
        return self._sender.state(ticket.id, known, min(wait, max(0.0, deadline - self._clock.now())))

    def fetch(self, fetch: Fetch) -> None:
        staging = Staging()
        for piece in fetch.pieces:
            fetch.progress.check()
            if self._clock.now() >= fetch.deadline:
                raise TransferTimeout("the deadline passed before all pieces of the KV transfer were copied")
            with self._sender.reading(fetch.ticket.id, piece) as lease:
                move(piece, self._sender.region, lease.blocks, fetch.region, fetch.into, staging)
            fetch.landed(piece)

    def renew(self, ticket: Ticket, deadline: float) -> None:
        self._sender.renew(ticket.id)

    def end(self, ticket: Ticket, how: How, deadline: float) -> None:
        self._sender.end(ticket.id, how)

    def close(self) -> None:
        pass


class LocalTransport:
    kind = "local"

    def __init__(self, senders: Iterable[Sender], clock: Clock | None = None) -> None:
        """`senders`: senders of this process for which `advertise_local` was called."""
        self._senders = {sender.endpoints["local"]: sender for sender in senders}
        self._clock = clock or SystemClock()

    def connect(self, peer: Peer, deadline: float) -> LocalLink:
        sender = self._senders.get(peer.endpoints["local"])
        if sender is None:
            raise PeerUnreachable(f"this process has no KV sender {peer.endpoints['local']!r}")
        if sender.peer.incarnation != peer.incarnation:
            raise PeerChanged(f"KV peer {peer.name} was restarted")
        return LocalLink(sender, self._clock)


def offer(sender: Sender, address: str) -> None:
    """Add a name to the sender's endpoints by which a LocalTransport of this process finds it."""
    sender.endpoints["local"] = address
