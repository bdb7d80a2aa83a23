"""The TCP transport. Pieces go from cache to socket to cache without another copy in user space.

Several connections share one pull.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from emberline.kv.codec import Codec
from emberline.kv.transfer.channel import PATIENCE
from emberline.kv.transfer.errors import PeerUnreachable
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.link import Dial, Habits, StreamLink
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
    """Listen, and add the address to the sender's endpoints; `advertise`: the host that peers connect to."""
    listener = listening(host, port)
    sender.endpoints["tcp"] = f"{advertise or host}:{listener.getsockname()[1]}"
    return Server(sender, listener, codecs=codecs, patience=patience)


class TcpTransport:
    kind = "tcp"

    def __init__(self, layout: Layout, habits: Habits | None = None) -> None:
        """`layout`: that of the receiver's region."""
        self._layout = layout
        self._habits = habits or Habits()

    def connect(self, peer: Peer, deadline: float) -> StreamLink:
        return StreamLink(peer, self._layout, dialling(peer.endpoints["tcp"]), self._habits, deadline)


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def dialling(address: str) -> Dial:
    """Return a function that connects to HOST:PORT. Raises PeerUnreachable if the address is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PeerUnreachable(f"the peer's KV transfer endpoint is {address!r}; it must be HOST:PORT")
    return lambda seconds: socket.create_connection((host, int(port)), timeout=seconds)
