"""Over TCP: bytes go from the sender's cache to the socket and from the socket into the receiver's cache, copied by
nobody but the system. Several connections share a pull."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from emberline.kv.transfer.base import Codec
from emberline.kv.transfer.channel import PATIENCE
from emberline.kv.transfer.errors import PeerUnreachable
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.link import Habits, StreamLink
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import Server
from emberline.kv.transfer.ticket import Peer


def serve_tcp(
    sender: Sender,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    codecs: Sequence[Codec] = (),
    patience: float = PATIENCE,
    advertise: str | None = None,
) -> Server:
    """Binds, and adds the address to the sender's endpoints; `advertise`: the host that others know us by."""
    listener = socket.create_server((host, port), family=_family(host), backlog=128)
    sender.endpoints["tcp"] = f"{advertise or host}:{listener.getsockname()[1]}"
    return Server(sender, listener, codecs=codecs, patience=patience)


class TcpTransport:
    kind = "tcp"

    def __init__(self, layout: Layout, habits: Habits | None = None) -> None:
        """`layout`: of the receiver's region."""
        self._layout = layout
        self._habits = habits or Habits()

    def connect(self, peer: Peer, deadline: float) -> StreamLink:
        host, _, port = peer.endpoints["tcp"].rpartition(":")
        if not host or not port.isdigit():
            raise PeerUnreachable(f"{peer.endpoints['tcp']!r} is not HOST:PORT")

        def dial(seconds: float) -> socket.socket:
            return socket.create_connection((host, int(port)), timeout=seconds)

        return StreamLink(peer, self._layout, dial, self._habits, deadline)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
