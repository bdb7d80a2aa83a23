"""Channel: messages and bare memory over a stream socket. Every wait has a deadline, and ends sooner if
the peer stays silent.

A message is a head (magic, kind, transfer, length and CRC-32 of the body, CRC-32 of the head so far) and the body; what
a DATA message announces follows it as bare bytes. Numbers are little-endian.
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
MOST_VIEWS = 1024  # that Linux takes in one call
PATIENCE = 5.0  # seconds without a byte from, or taken by, a peer that owes us one


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
        """The body, of all kinds but DATA and SEALED."""
        try:
            told = json.loads(self.body)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise Corrupted("a message that is not a JSON object")
        return told

    def error(self) -> TransferError:
        told = self.read()
        return rebuilt(str(told.get("code")), str(told.get("message")), told.get("hint"))


class Channel:
    def __init__(self, sock: socket.socket, patience: float = PATIENCE) -> None:
        sock.settimeout(None)  # the system's own timeouts below: with them a call can wait for all it asked for
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = sock
        self.broken = False  # by any failure: what follows on it could be anything
        self.staging = Staging()
        self._patience = patience
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def tell(self, kind: Kind, transfer: int, body: dict[str, Any], deadline: float) -> None:
        self.send(kind, transfer, json.dumps(body).encode(), deadline)

    def send(self, kind: Kind, transfer: int, body: bytes, deadline: float, payload: Sequence[memoryview] = ()) -> None:
        head = HEAD.pack(MAGIC, kind, transfer, len(body), zlib.crc32(body))
        views = [memoryview(head + CRC.pack(zlib.crc32(head)) + body), *payload]
        at = 0
        while at < len(views):
            sent = self._try(socket.SO_SNDTIMEO, deadline, views[at : at + MOST_VIEWS])
            at = _past(views, at, sent)

    def receive(self, deadline: float) -> Message:
        head, crc = bytearray(HEAD.size), bytearray(CRC.size)
        self.receive_into([memoryview(head), memoryview(crc)], deadline)
        magic, kind, transfer, length, sum_of_body = HEAD.unpack(head)
        if magic != MAGIC or length > MOST_BODY or CRC.pack(zlib.crc32(head)) != crc:
            raise self._spoiled("what arrived is not a message of this protocol, or was damaged")
        body = bytearray(length)
        self.receive_into([memoryview(body)], deadline)
        if zlib.crc32(body) != sum_of_body:
            raise self._spoiled("a message arrived with a wrong checksum")
        return Message(kind, transfer, bytes(body))

    def receive_into(self, views: list[memoryview], deadline: float) -> None:
        at = 0
        while at < len(views):
            got = self._try(socket.SO_RCVTIMEO, deadline, views[at : at + MOST_VIEWS])
            at = _past(views, at, got)

    def rest(self, seconds: float) -> None:
        """Until a message begins to arrive."""
        try:
            self._arm(socket.SO_RCVTIMEO, seconds)
            if self.socket.recv(1, socket.MSG_PEEK):
                return
        except OSError:
            pass
        self.broken = True
        raise PeerLost("the peer left, or had nothing to say for too long")

    def is_quiet(self) -> bool:
        """Open, and nothing unasked for has arrived."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self.broken
        except OSError:
            pass
        return False

    def stop(self) -> None:
        """From any thread: whoever waits here finds the connection ended."""
        self.broken = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.broken = True
        self.socket.close()

    def _try(self, option: int, deadline: float, views: list[memoryview]) -> int:
        """One call, which moved something or raises."""
        left = deadline - time.monotonic()
        try:
            if left > 0:
                self._arm(option, min(left, self._patience))
                if option == socket.SO_SNDTIMEO:
                    return self.socket.sendmsg(views)
                if got := self.socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]:
                    return got
                self.broken = True
                raise PeerLost("the peer ended the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = True
            raise PeerLost(f"the connection to the peer failed: {error}") from error
        self.broken = True
        if deadline <= time.monotonic():
            raise TransferTimeout("the peer was not done in time")
        raise PeerLost(f"the peer was silent for {self._patience:g} s")

    def _arm(self, option: int, seconds: float) -> None:
        if self._timeouts[option] != seconds:
            whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, part))
            self._timeouts[option] = seconds

    def _spoiled(self, why: str) -> Corrupted:
        self.broken = True
        return Corrupted(why)


def _past(views: list[memoryview], at: int, count: int) -> int:
    """Where to go on after `count` bytes; the view that was cut is shortened."""
    while at < len(views) and count >= len(views[at]):
        count -= len(views[at])
        at += 1
    if count:
        views[at] = views[at][count:]
    return at
