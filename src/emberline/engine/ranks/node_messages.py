"""Messages between node 0 and the other nodes of an engine, and the socket that carries them.

This module does not import torch."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios
import threading
import time
from typing import Any, TypeVar

import msgspec

from emberline.core.engine_config import EngineConfig
from emberline.engine.messages import Rejection
from emberline.engine.ranks.control import ControlSocket
from emberline.engine.ranks.layout import Layout

BEAT_INTERVAL_S = 0.25
HANDSHAKE_TIMEOUT_S = 10.0  # for each message until a node has joined
MAX_HANDSHAKE_BYTES = 1 << 16


class NodeHello(msgspec.Struct, tag=True):
    """Asks to join the group."""

    version: str
    node_rank: int
    settings: dict[str, Any]  # list_shared_settings of the node's config
    max_ranks: int  # that it can run: one for each core, unless threads are set
    free_bytes: int  # of its main memory


class NodeJoined(msgspec.Struct, tag=True):
    """Reports to a node that it has joined the group."""


class StartNode(msgspec.Struct, tag=True):
    """Asks a node to start its ranks. It is sent when all nodes have joined."""

    config: EngineConfig  # of node 0, with the defaults of its device
    layout: Layout
    store_port: int  # of the TCPStore at node 0


class ToRanks(msgspec.Struct, tag=True):
    """A message of the leader for all ranks of a node."""

    body: bytes  # from encode_rank_message


class NodePlan(msgspec.Struct, tag=True):
    """The plan of a step, for all ranks of a node."""

    plan: bytes


class FromRank(msgspec.Struct, tag=True):
    """A message of one of the node's ranks for the leader."""

    rank: int
    body: bytes  # from encode_rank_message


class RankEnded(msgspec.Struct, tag=True):
    """Reports that a rank's process has ended, or has closed its connection."""

    rank: int
    status: int | None  # exit status; None: it is still running


class MasterBeat(msgspec.Struct, tag=True):
    """Shows that node 0 is running. It is sent every BEAT_INTERVAL_S."""

    is_ready: bool  # whether all ranks wait for plans


class NodeBeat(msgspec.Struct, tag=True):
    """Shows that a node is running, and carries the counters of its ranks. It is sent every BEAT_INTERVAL_S."""

    counts: dict[int, tuple[int, int]]  # by rank: HEARTBEAT and PROGRESS of its GroupMemory


class NodeGoodbye(msgspec.Struct, tag=True):
    """Announces that the engine shuts down without an error, so that the node ends too."""


class GroupEnded(msgspec.Struct, tag=True):
    """Reports that the group has ended because of a failure, so that the node joins the next group."""

    reason: str


NodeMessage = (
    NodeHello
    | NodeJoined
    | StartNode
    | ToRanks
    | NodePlan
    | FromRank
    | RankEnded
    | MasterBeat
    | NodeBeat
    | NodeGoodbye
    | GroupEnded
    | Rejection
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(NodeMessage)
MessageT = TypeVar("MessageT", bound=NodeMessage)


class NodeSocket:
    """One end of the TCP connection between node 0 and another node. Several threads may send."""

    def __init__(self, connection: socket.socket, send_timeout_s: float) -> None:
        """`send_timeout_s`: time after which `send` fails if the other side reads nothing."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole, fraction = divmod(send_timeout_s, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(fraction * 1e6)))
        self.connection, self._framing = connection, ControlSocket(connection)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: NodeMessage) -> None:
        """Send a message. Raises OSError if the connection has ended, or the other side reads nothing for too long."""
        with self._lock:
            self._framing.send_encoded(_ENCODER.encode(message))

    def try_send(self, message: NodeMessage) -> None:
        """Send a short message, unless the connection has ended or a send would have to wait."""
        if self._lock.acquire(blocking=False):
            try:
                poller = select.poll()
                poller.register(self.connection, select.POLLOUT)
                if poller.poll(0):
                    self._framing.send_encoded(_ENCODER.encode(message))
            except OSError:
                pass  # the thread that reads from the connection detects this
            finally:
                self._lock.release()

    def read_available(self) -> bool:
        """Wait for bytes and keep them for `take_message`; return False if the connection has ended."""
        try:
            return self._framing.read_available()
        except OSError:  # such as a time-out of the network
            return False

    def take_message(self) -> NodeMessage | None:
        """Return the next message that was received completely; None: there is none yet. Raises DecodeError."""
        if (body := self._framing.take_encoded()) is None:
            return None
        message: NodeMessage = _DECODER.decode(body)
        return message

    def receive(self, kind: type[MessageT], timeout_s: float = HANDSHAKE_TIMEOUT_S) -> MessageT:
        """Return the next message, which must be of this `kind`. If it is a Rejection, raise the error in it.

        Raises ConnectionError if the message is of another kind, or none comes in time."""
        try:
            message = _DECODER.decode(self.receive_bytes(timeout_s))
        except msgspec.DecodeError as error:
            raise ConnectionError(f"received a message of another version of Emberline: {error}") from error
        if isinstance(message, Rejection):
            raise message.to_error()
        if not isinstance(message, kind):
            raise ConnectionError(f"expected {kind.__name__}, received {type(message).__name__}")
        return message

    def poll(self, timeout_s: float) -> NodeMessage | None:
        """Return the next message; None: none came in time. Raises ConnectionError if the connection has ended."""
        if (message := self.take_message()) is not None:
            return message
        if select.select([self.connection], [], [], timeout_s)[0] and not self.read_available():
            raise ConnectionError("the other side closed the connection")
        return self.take_message()

    def receive_bytes(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> bytes:
        """Return the next message of the handshake, not decoded. Raises ConnectionError if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while (body := self._framing.take_encoded()) is None:
            if not select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ConnectionError(f"received nothing for {timeout_s:g} s")
            if not self.read_available():
                raise ConnectionError("the other side closed the connection")
            if self._framing.num_received > MAX_HANDSHAKE_BYTES:
                raise ConnectionError("received too much data before the connection was authenticated")
        return body

    def send_bytes(self, body: bytes) -> None:
        """Send a message of the handshake."""
        with self._lock:
            self._framing.send_encoded(body)

    def shut_down(self) -> None:
        """End the connection, so that a thread that waits for a message fails."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        """Return whether the other side has closed the connection; False if it has sent bytes that are unread."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def is_closed_by_peer(self) -> bool:
        """Return whether the other side has closed the connection, even if it has sent bytes that are unread."""
        poller = select.poll()
        poller.register(self.connection, getattr(select, "POLLRDHUP", 0))  # errors are always reported
        return bool(poller.poll(0))

    def count_unread_bytes(self) -> int:
        """Return how many received bytes the system keeps for this side."""
        count = bytearray(4)
        fcntl.ioctl(self.connection.fileno(), termios.FIONREAD, count)
        return int.from_bytes(count, sys.byteorder)

    def finish(self, message: NodeMessage, timeout_s: float) -> None:
        """Send a last message and wait until the other side has closed the connection.

        If this side closed the connection first and had unread messages, the other side could lose the last message."""
        with contextlib.suppress(OSError):  # it has ended already
            self.send(message)
        self.end()
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.connection], [], [], left)[0] and not self.read_available():
                return

    def end(self) -> None:
        """Send nothing more; another thread that is sending gets an error. The socket stays open until `close`."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.connection.close()
