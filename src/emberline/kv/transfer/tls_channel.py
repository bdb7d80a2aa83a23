"""TLSMessageChannel: a MessageChannel over an encrypted connection.

A TLS socket can neither peek at bytes nor send several buffers in one call, and its timeouts are Python's own.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel
from emberline.kv.transfer.errors import PeerLost


class TLSMessageChannel(MessageChannel):
    socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, io_timeout_s: float = IO_TIMEOUT_S) -> None:
        super().__init__(sock, io_timeout_s)
        self._first_byte = b""  # of a message, received by `wait_for_message`
        self._timeout_s: float | None = None

    def complete_tls_handshake(self) -> None:
        """Do the handshake of the side that accepted the connection. Raises PeerLost if it fails."""
        self._set_timeout(socket.SO_RCVTIMEO, self._io_timeout_s)
        try:
            self.socket.do_handshake()
        except OSError as error:
            self.is_broken = True
            raise PeerLost(f"the TLS handshake with the peer failed: {error}") from error

    def wait_for_message(self, timeout_s: float) -> None:
        with contextlib.suppress(OSError):
            self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
            self._first_byte = self.socket.recv(1)
        if not self._first_byte:
            self.is_broken = True
            raise PeerLost("the peer closed the connection or left it idle for too long")

    def is_idle(self) -> bool:
        self._set_timeout(socket.SO_RCVTIMEO, 0.0)
        try:
            self.socket.recv(1)  # reads records without data, such as session tickets
        except ssl.SSLWantReadError:
            return not self.is_broken
        except OSError:
            pass
        return False

    def stop(self) -> None:
        self.is_broken = True
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would turn encryption off first, while another thread may be sending.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def _send_views(self, views: list[memoryview]) -> int:
        return self.socket.send(views[0])

    def _receive_views(self, views: list[memoryview]) -> int:
        if self._first_byte and len(views[0]):
            views[0][:1], self._first_byte = self._first_byte, b""
            return 1
        return self.socket.recv_into(views[0])

    def _set_timeout(self, timeout_option: int, seconds: float) -> None:
        if self._timeout_s != seconds:
            self.socket.settimeout(seconds)
            self._timeout_s = seconds


def make_channel(sock: socket.socket, io_timeout_s: float) -> MessageChannel:
    """Return a channel over a connected socket, which may use TLS."""
    if isinstance(sock, ssl.SSLSocket):
        return TLSMessageChannel(sock, io_timeout_s)
    return MessageChannel(sock, io_timeout_s)
