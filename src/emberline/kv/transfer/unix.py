"""Unix sockets between processes of one host, with a check that both processes belong to the same user.

On Linux the socket has an abstract name without a file. macOS has no such names, so there the socket is a file in the
temporary folder that only its owner may open.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import struct
import sys
import tempfile
from pathlib import Path

from emberline.kv.transfer.channel import MessageChannel
from emberline.kv.transfer.errors import BadTransfer, PeerOnOtherHost
from emberline.kv.transfer.link import Connector

LINUX_CREDENTIALS = struct.Struct("3i")  # process, user, group: Linux's SO_PEERCRED
MACOS_PEER_OPTION = (0, 1)  # macOS: level and option
MACOS_CREDENTIALS = struct.Struct("2I")  # start of macOS's xucred: version, user
HAS_ABSTRACT_NAMES = sys.platform == "linux"


def create_unix_listener() -> tuple[socket.socket, str]:
    """Create a listening socket with a new random name. Return the socket and the name."""
    address = f"emberline-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if HAS_ABSTRACT_NAMES:
        listener.bind("\0" + address)
    else:
        address = str(Path(tempfile.gettempdir()) / f"{address}.sock")
        listener.bind(address)
        Path(address).chmod(0o600)
        atexit.register(Path(address).unlink, missing_ok=True)
    listener.listen(128)
    return listener, address


def make_unix_connector(address: str) -> Connector:
    def connect_to_socket(timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(address if address.startswith("/") else "\0" + address)
        except OSError as error:
            sock.close()
            raise PeerOnOtherHost(f"cannot connect to the Unix socket {address} on this host: {error}") from error
        return sock

    return connect_to_socket


def check_same_user(channel: MessageChannel) -> None:
    """Raise BadTransfer unless the peer process belongs to the same user, because it will map the cache."""
    if _peer_user_id(channel.socket) != os.getuid():
        raise BadTransfer("the KV cache can only be mapped by processes of the same user")


def _peer_user_id(connection: socket.socket) -> int:
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, LINUX_CREDENTIALS.size)
        return int(LINUX_CREDENTIALS.unpack(found)[1])
    return int(MACOS_CREDENTIALS.unpack_from(connection.getsockopt(*MACOS_PEER_OPTION, 128))[1])
