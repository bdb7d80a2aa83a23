"""MessageChannel: sends and receives messages and raw bytes over a stream socket.

Every call has a deadline. It fails earlier if the peer sends or accepts no byte for the duration of the I/O timeout.

A message is a header and a body. The header holds magic bytes, the message kind, the transfer id, the length and the
CRC-32 of the body, and the CRC-32 of the header itself. The raw bytes of a piece of KV blocks follow its DATA message.
Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from emberline.kv.transfer.errors import PeerLost, TransferCorrupted, TransferError, TransferTimeout, error_from_code
from emberline.kv.transfer.region import StagingBuffer

MAGIC = b"EKV1"
HEADER = struct.Struct("<4sB3xQII")
HEADER_CRC = struct.Struct("<I")
MAX_BODY_BYTES = 16 << 20  # bytes
MAX_VIEWS_PER_CALL = 1024  # IOV_MAX of Linux
IO_TIMEOUT_S = 5.0  # without a byte sent or received while the peer must act


class MessageKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    STATE = 3
    RENEW = 4
    END = 5
    PULL = 6
    ATTACH = 7
    OKAY = 8
    DATA = 9
    PIECE_END = 10
    ERROR = 11
    CONFIRM_READ = 12
    STAGE_PIECE = 13


class TransferMessage(NamedTuple):
    kind: int
    transfer: int
    body: bytes

    def read_json(self) -> dict[str, Any]:
        """Return the JSON body. All messages have one, except DATA and PIECE_END."""
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise TransferCorrupted("the body of a KV transfer message is not a JSON object")
        return body

    def to_error(self) -> TransferError:
        body = self.read_json()
        return error_from_code(str(body.get("code")), str(body.get("message")), body.get("hint"))


class MessageChannel:
    def __init__(self, sock: socket.socket, io_timeout_s: float = IO_TIMEOUT_S) -> None:
        sock.settimeout(None)  # blocking, with SO_RCVTIMEO and SO_SNDTIMEO: only then MSG_WAITALL waits for all bytes
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = sock
        self.is_broken = False  # set by any failure, after which the stream's position is unknown
        self.staging = StagingBuffer()
        self._io_timeout_s = io_timeout_s
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def complete_tls_handshake(self) -> None:
        """Do nothing, because this connection is not encrypted. TLSMessageChannel overrides this method."""

    def send_json(self, kind: MessageKind, transfer_id: int, body: dict[str, Any], deadline: float) -> None:
        self.send(kind, transfer_id, json.dumps(body).encode(), deadline)

    def send(
        self, kind: MessageKind, transfer_id: int, body: bytes, deadline: float, payload: Sequence[memoryview] = ()
    ) -> None:
        header = HEADER.pack(MAGIC, kind, transfer_id, len(body), zlib.crc32(body))
        views = [memoryview(header + HEADER_CRC.pack(zlib.crc32(header)) + body), *payload]
        index = 0
        while index < len(views):
            sent = self._send_or_receive(socket.SO_SNDTIMEO, deadline, views[index : index + MAX_VIEWS_PER_CALL])
            index = _advance_views(views, index, sent)

    def receive(self, deadline: float, max_body_bytes: int = MAX_BODY_BYTES) -> TransferMessage:
        header, crc = bytearray(HEADER.size), bytearray(HEADER_CRC.size)
        self.receive_into([memoryview(header), memoryview(crc)], deadline)
        magic, kind, transfer, length, body_crc = HEADER.unpack(header)
        if magic != MAGIC or length > max_body_bytes or HEADER_CRC.pack(zlib.crc32(header)) != crc:
            raise self._make_corruption_error(
                "the received bytes are not a message of the KV transfer protocol, or are damaged"
            )
        body = bytearray(length)
        self.receive_into([memoryview(body)], deadline)
        if zlib.crc32(body) != body_crc:
            raise self._make_corruption_error("a KV transfer message arrived with a wrong checksum")
        return TransferMessage(kind, transfer, bytes(body))

    def receive_into(self, views: list[memoryview], deadline: float) -> None:
        index = 0
        while index < len(views):
            received = self._send_or_receive(socket.SO_RCVTIMEO, deadline, views[index : index + MAX_VIEWS_PER_CALL])
            index = _advance_views(views, index, received)

    def wait_for_message(self, timeout_s: float) -> None:
        """Wait until a message begins to arrive.

        Raises PeerLost if the peer closes the connection or the timeout passes.
        """
        try:
            self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
            if self.socket.recv(1, socket.MSG_PEEK):
                return
        except OSError:
            pass
        self.is_broken = True
        raise PeerLost("the peer closed the connection or left it idle for too long")

    def is_idle(self) -> bool:
        """Return whether the connection is open and no unread bytes have arrived."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self.is_broken
        except OSError:
            pass
        return False

    def stop(self) -> None:
        """Shut the connection down, so that a call that waits in a different thread fails."""
        self.is_broken = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_broken = True
        self.socket.close()

    def _send_or_receive(self, timeout_option: int, deadline: float, views: list[memoryview]) -> int:
        """Send or receive once, and return the number of bytes, which is at least 1.

        `timeout_option` selects the direction: SO_SNDTIMEO sends, SO_RCVTIMEO receives. Raises PeerLost or
        TransferTimeout.
        """
        remaining = deadline - time.monotonic()
        try:
            if remaining > 0:
                self._set_timeout(timeout_option, min(remaining, self._io_timeout_s))
                if timeout_option == socket.SO_SNDTIMEO:
                    return self._send_views(views)
                if received := self._receive_views(views):
                    return received
                self.is_broken = True
                raise PeerLost("the peer closed the connection")
        except (BlockingIOError, TimeoutError):
            pass
        except OSError as error:
            self.is_broken = True
            raise PeerLost(f"the connection to the peer failed: {error}") from error
        self.is_broken = True
        if deadline <= time.monotonic():
            raise TransferTimeout("the deadline passed before the peer had answered")
        raise PeerLost(f"the peer sent or accepted no byte for {self._io_timeout_s:g} s")

    def _send_views(self, views: list[memoryview]) -> int:
        return self.socket.sendmsg(views)

    def _receive_views(self, views: list[memoryview]) -> int:
        return self.socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def _set_timeout(self, timeout_option: int, seconds: float) -> None:
        if self._timeouts[timeout_option] != seconds:
            whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)
            self.socket.setsockopt(socket.SOL_SOCKET, timeout_option, struct.pack("@ll", whole, part))
            self._timeouts[timeout_option] = seconds

    def _make_corruption_error(self, reason: str) -> TransferCorrupted:
        self.is_broken = True
        return TransferCorrupted(reason)


def _advance_views(views: list[memoryview], index: int, count: int) -> int:
    """Skip `count` transferred bytes from view `index` on; return the index of the first unfinished view.

    A view that was transferred in part is replaced in the list by its remaining bytes.
    """
    while index < len(views) and count >= len(views[index]):
        count -= len(views[index])
        index += 1
    if count:
        views[index] = views[index][count:]
    return index
