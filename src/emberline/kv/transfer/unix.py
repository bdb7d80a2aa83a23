"""Unix sockets: processes of one host meet under a name without a file, and know whose they are."""

from __future__ import annotations

import os
import secrets
import socket
import struct

from emberline.kv.transfer.channel import Channel
from emberline.kv.transfer.errors import BadTransfer, Elsewhere
from emberline.kv.transfer.link import Dial

CREDENTIALS = struct.Struct("3i")  # process, user, group


def listening() -> tuple[socket.socket, str]:
    """With a new name, of this host's network."""
    address = f"emberline-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + address)
    listener.listen(128)
    return listener, address


def dialling(address: str) -> Dial:
    def dial(seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect("\0" + address)
        except OSError as error:
            sock.close()
            raise Elsewhere(f"nobody on this host is called {address}: {error}") from error
        return sock

    return dial


def check_user(channel: Channel) -> None:
    """Who is let at the memory of a cache."""
    told = channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if CREDENTIALS.unpack(told)[1] != os.getuid():
        raise BadTransfer("only processes of the same user may map the cache")
