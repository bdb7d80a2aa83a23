"""Unix sockets: processes of one host meet under a name and know whose they are. On Linux the name has no file; where
there are no such names (macOS), it is a socket file in the temporary folder, which only its owner may use."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import struct
import sys
import tempfile
from pathlib import Path

from emberline.kv.transfer.channel import Channel
from emberline.kv.transfer.errors import BadTransfer, Elsewhere
from emberline.kv.transfer.link import Dial

CREDENTIALS = struct.Struct("3i")  # process, user, group: Linux's SO_PEERCRED
LOCAL_PEERCRED = (0, 1)  # macOS: level and option
XUCRED = struct.Struct("2I")  # version, user, and groups that do not matter here
HAS_ABSTRACT_NAMES = sys.platform == "linux"


def listening() -> tuple[socket.socket, str]:
    """With a new name, of this host's network."""
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


def dialling(address: str) -> Dial:
    def dial(seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect(address if address.startswith("/") else "\0" + address)
        except OSError as error:
            sock.close()
            raise Elsewhere(f"nobody on this host is called {address}: {error}") from error
        return sock

    return dial


def check_user(channel: Channel) -> None:
    """Who is let at the memory of a cache."""
    if _peer_user(channel.socket) != os.getuid():
        raise BadTransfer("only processes of the same user may map the cache")


def _peer_user(connection: socket.socket) -> int:
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(found)[1])
    return int(XUCRED.unpack_from(connection.getsockopt(*LOCAL_PEERCRED, 128))[1])
