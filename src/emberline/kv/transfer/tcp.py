"""The TCP transport. Pieces go from the sender's cache to the receiver's without a further copy in user space.

Several connections share the work of one pull. With TLS the transport has a different kind, so that an engine with TLS
and one without find no transport in common.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from emberline.kv.codec import KVCodec
from emberline.kv.transfer.channel import IO_TIMEOUT_S
from emberline.kv.transfer.errors import PeerUnreachable
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import Connector, LinkOptions, StreamLink
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import TransferServer
from emberline.kv.transfer.ticket import Peer


def serve_tcp(
    sender: Sender,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    codecs: Sequence[KVCodec] = (),
    io_timeout_s: float = IO_TIMEOUT_S,
    advertised_host: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> TransferServer:
    """Listen at a TCP port and add the address to the sender's endpoints.

    `advertised_host` is the host name that peers connect to, if it differs from `host`.
    """
    listener = create_tcp_listener(host, port)
    sender.endpoints[_kind(tls)] = f"{advertised_host or host}:{listener.getsockname()[1]}"
    return TransferServer(sender, listener, codecs=codecs, io_timeout_s=io_timeout_s, tls=tls)


class TcpTransport:
    def __init__(self, layout: KVLayout, options: LinkOptions | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Create a transport for a receiver whose cache has this layout."""
        self.kind = _kind(tls)
        self._tls = tls
        self._layout = layout
        self._options = options or LinkOptions()

    def connect(self, peer: Peer, deadline: float) -> StreamLink:
        connector = make_tcp_connector(peer.endpoints[self.kind], self._tls)
        return StreamLink(peer, self._layout, connector, self._options, deadline)


def _kind(tls: ssl.SSLContext | None) -> str:
    return "tcp" if tls is None else "tls"


def create_tcp_listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def make_tcp_connector(address: str, tls: ssl.SSLContext | None = None) -> Connector:
    """Return a function that connects to the address HOST:PORT. Raises PeerUnreachable if the address is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PeerUnreachable(f"the peer's KV transfer endpoint is {address!r}, but must be HOST:PORT")

    def connect(timeout_s: float) -> socket.socket:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
        if tls is None:
            return sock
        try:
            return tls.wrap_socket(sock, server_hostname=host.strip("[]"))  # each step of the handshake has the timeout
        except BaseException:
            sock.close()
            raise

    return connect
