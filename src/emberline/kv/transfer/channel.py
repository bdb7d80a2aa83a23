"""MessageChannel: sends and receives messages and raw bytes over a stream socket.

Every call has a deadline, and fails sooner if the peer sends or accepts no byte for the I/O timeout.

A message is a header and a body. The header holds magic, kind, transfer id, length and CRC-32 of the body, and the
CRC-32 of the header up to there. The raw bytes of a piece follow its DATA message. Numbers are little-endian.
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

from emberline.kv.transfer.errors import Corrupted, PeerLost, TransferError, TransferTimeout, rebuilt
from emberline.kv.transfer.region import Staging

MAGIC = b"EKV1"
HEAD = struct.Struct("<4sB3xQII")
CRC = struct.Struct("<I")
MOST_BODY = 16 << 20  # bytes
MOST_VIEWS = 1024  # IOV_MAX of Linux
PATIENCE = 5.0  # without a byte sent or received while the peer must act


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    STATE = 3
    RENEW = 4
    END = 5
    PULL = 6
    ATTACH = 7
    OKAY = 8
    DATA = 9
    SEALED = 10
    ERROR = 11
    VOUCH = 12


class Message(NamedTuple):
    kind: int
    transfer: int
    body: bytes

    def read(self) -> dict[str, Any]:
        """Return the JSON body of a message of any kind but DATA and PIECE_END."""
        try:
            body = json.loads(self.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Corrupted("the body of a KV transfer message is not a JSON object")
        return body

    def error(self) -> TransferError:
        body = self.read()
        return rebuilt(str(body.get("code")), str(body.get("message")), body.get("hint"))


class Channel:
    def __init__(self, sock: socket.socket, patience: float = PATIENCE) -> None:
        sock.settimeout(None)  # blocking, with SO_RCVTIMEO and SO_SNDTIMEO: only then MSG_WAITALL waits for all bytes
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = sock
        self.broken = False  # set by any failure, after which the stream's position is unknown
        self.staging = Staging()
        self._patience = patience
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def tell(self, kind: Kind, transfer: int, body: dict[str, Any], deadline: float) -> None:
        self.send(kind, transfer, json.dumps(body).encode(), deadline)

    def send(self, kind: Kind, transfer: int, body: bytes, deadline: float, payload: Sequence[memoryview] = ()) -> None:
        head = HEAD.pack(MAGIC, kind, transfer, len(body), zlib.crc32(body))
        views = [memoryview(head + CRC.pack(zlib.crc32(head)) + body), *payload]
        index = 0
        while index < len(views):
            sent = self._try(socket.SO_SNDTIMEO, deadline, views[index : index + MOST_VIEWS])
            index = _past(views, index, sent)

    def receive(self, deadline: float) -> Message:
        head, crc = bytearray(HEAD.size), bytearray(CRC.size)
        self.receive_into([memoryview(head), memoryview(crc)], deadline)
        magic, kind, transfer, length, body_crc = HEAD.unpack(head)
        if magic != MAGIC or length > MOST_BODY or CRC.pack(zlib.crc32(head)) != crc:
            raise self._spoiled("the received bytes are not a message of the KV transfer protocol, or are damaged")
        body = bytearray(length)
        self.receive_into([memoryview(body)], deadline)
        if zlib.crc32(body) != body_crc:
            raise self._spoiled("a KV transfer message arrived with a wrong checksum")
        return Message(kind, transfer, bytes(body))

    def receive_into(self, views: list[memoryview], deadline: float) -> None:
        index = 0
        while index < len(views):
            received = self._try(socket.SO_RCVTIMEO, deadline, views[index : index + MOST_VIEWS])
            index = _past(views, index, received)

    def rest(self, seconds: float) -> None:
        """Wait until a message begins to arrive. Raises PeerLost if the peer closes or the timeout passes."""
        try:
            self._arm(socket.SO_RCVTIMEO, seconds)
            if self.socket.recv(1, socket.MSG_PEEK):
                return
        except OSError:
            pass
        self.broken = True
        raise PeerLost("the peer closed the connection or left it idle for too long")

    def is_quiet(self) -> bool:
        """Return whether the connection is open and no unread bytes have arrived."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self.broken
        except OSError:
            pass
        return False

    def stop(self) -> None:
        """Shut the connection down from any thread, so that a waiting call fails."""
        self.broken = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.broken = True
        self.socket.close()

    def _try(self, option: int, deadline: float, views: list[memoryview]) -> int:
        """Send or receive once and return the number of bytes, at least 1. Raises PeerLost or TransferTimeout."""
        remaining = deadline - time.monotonic()
        try:
            if remaining > 0:
                self._arm(option, min(remaining, self._patience))
                if option == socket.SO_SNDTIMEO:
                    return self.socket.sendmsg(views)
                if received := self.socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]:
                    return received
                self.broken = True
                raise PeerLost("the peer closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = True
            raise PeerLost(f"the connection to the peer failed: {error}") from error
        self.broken = True
        if deadline <= time.monotonic():
            raise TransferTimeout("the deadline passed before the peer had answered")
        raise PeerLost(f"the peer sent or accepted no byte for {self._patience:g} s")

    def _arm(self, option: int, seconds: float) -> None:
        if self._timeouts[option] != seconds:
            whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, part))
            self._timeouts[option] = seconds

    def _spoiled(self, why: str) -> Corrupted:
        self.broken = True
        return Corrupted(why)


def _past(views: list[memoryview], at: int, count: int) -> int:
    """Return the index of the view to continue with after `count` bytes; a view used in part is shortened."""
    while at < len(views) and count >= len(views[at]):
        count -= len(views[at])
        at += 1
    if count:
        views[at] = views[at][count:]
    return at
