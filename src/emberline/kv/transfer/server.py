"""TransferServer: serves a sender's blocks to receivers over stream sockets, a thread per connection."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any
from zlib import crc32

from emberline.kv.checksum import chained
from emberline.kv.codec import Codec
from emberline.kv.transfer.channel import PATIENCE, Channel, Kind, Message
from emberline.kv.transfer.errors import BadTransfer, PeerChanged, PeerLost, TransferError
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.lease import How, Lease
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.region import Marks, Staging
from emberline.kv.transfer.sender import Sender

log = logging.getLogger("emberline.transfer")

DATA = struct.Struct("<IIIIIQ")  # the piece's bounds, the CRC-32 of its generations, the number of bytes that follow
IDLE = 600.0
MOST_PULL = 3600.0
MOST_WAIT = 10.0  # longest wait of one request for more blocks of a ticket
MOST_CONNECTIONS = 256


def generation_mark(generations: Marks) -> int:
    return crc32(generations.tobytes())


class Server:
    def __init__(
        self, sender: Sender, listener: socket.socket, *, codecs: Sequence[Codec] = (), patience: float = PATIENCE
    ) -> None:
        self._sender = sender
        self._listener = listener
        self._codecs = {codec.name: codec for codec in codecs}
        self._patience = patience
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self._stopping = False
        self._door = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._door.start()

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def stop(self) -> None:
        """Close the listener and all connections, and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._door.join()
        self._listener.close()
        with self._lock:
            connections = list(self._open.items())
        for channel, _ in connections:
            channel.stop()
        for _, thread in connections:
            thread.join()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
                self._admit(sock)
            except (OSError, RuntimeError) as error:
                if not self._stopping:
                    log.error("Cannot accept a KV transfer connection: error=%s", error)
                    time.sleep(0.1)  # probably out of descriptors or threads; closing connections free some

    def _admit(self, sock: socket.socket) -> None:
        if self.num_open >= MOST_CONNECTIONS:
            sock.close()
            return
        channel = Channel(sock, self._patience)
        thread = threading.Thread(target=self._serve, args=(channel,), name="kv-serve", daemon=True)
        with self._lock:
            self._open[channel] = thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._open[channel]
            channel.close()
            raise

    def _serve(self, channel: Channel) -> None:
        try:
            codec = self._greet(channel)
            while not self._stopping:
                self._answer(channel, self._next(channel), codec)
        except TransferError as error:
            if not isinstance(error, PeerLost):  # a receiver may disconnect at any time
                self._sender.failed(error.code)
                log.warning("KV transfer connection closed after an error: code=%s reason=%s", error.code, error)
        except Exception:
            log.exception("KV transfer connection failed unexpectedly")
        finally:
            with self._lock:
                del self._open[channel]
            channel.close()

    def _next(self, channel: Channel) -> Message:
        channel.rest(IDLE)
        return channel.receive(time.monotonic() + self._patience)

    def _greet(self, channel: Channel) -> Codec | None:
        deadline = time.monotonic() + self._patience
        hello = channel.receive(deadline)
        try:
            body, own = hello.read(), self._sender.peer
            if hello.kind != Kind.HELLO:
                raise BadTransfer(f"the first message of a connection has kind {hello.kind}; it must be HELLO")
            if not compare_digest(str(body.get("incarnation")).encode(), own.incarnation.encode()):
                raise PeerChanged(f"KV peer {own.name} was restarted", hint="get its new incarnation from the router")
            own.layout.check_pair(Layout.parsed(body.get("layout")))
            codec = next((self._codecs[name] for name in body.get("codecs", ()) if name in self._codecs), None)
        except TransferError as error:
            self._refuse(channel, hello.transfer, error)
            raise
        welcome = {"layout": dataclasses.asdict(own.layout), "codec": codec.name if codec else None}
        channel.tell(Kind.WELCOME, hello.transfer, welcome, deadline)
        return codec

    def _answer(self, channel: Channel, asked: Message, codec: Codec | None) -> None:
        """Answer one request. An error that leaves the connection usable is sent to the peer."""
        try:
            body = asked.read()
            if asked.kind == Kind.PULL:
                self._pull(channel, asked.transfer, body, codec)
            elif asked.kind == Kind.ATTACH:
                self._attach(channel, asked.transfer)
            else:
                reply = self._said(asked.kind, body, channel.staging)
                channel.tell(Kind.OKAY, asked.transfer, reply, time.monotonic() + self._patience)
        except (TransferError, KeyError, TypeError, ValueError) as error:
            if channel.broken:
                raise
            reported = error if isinstance(error, TransferError) else BadTransfer(f"malformed request: {error!r}")
            self._sender.failed(reported.code)
            self._refuse(channel, asked.transfer, reported)

    def _said(self, kind: int, told: dict[str, Any], staging: Staging) -> dict[str, Any]:
        if kind == Kind.STATE:
            wait = min(float(told["wait"]), MOST_WAIT)
            return self._sender.state(told["id"], int(told["known"]), wait).as_dict()
        if kind == Kind.RENEW:
            self._sender.renew(told["id"])
        elif kind == Kind.END:
            self._sender.end(told["id"], How(told["how"]))
        elif kind == Kind.VOUCH:
            return self._vouch(told["id"], Piece(*map(int, told["piece"])), staging if told["checked"] else None)
        else:
            raise BadTransfer(f"unknown kind of KV transfer request: {kind}")
        return {}

    def _vouch(self, id: str, piece: Piece, staging: Staging | None) -> dict[str, Any]:
        """Confirm that a piece that the receiver read from this memory by itself was unchanged until now.

        The reply has the CRC of its generations and, if `staging` is given, the CRC of its bytes.
        """
        with self._sender.reading(id, piece) as lease:
            views = self._payload(piece, lease, staging, None) if staging is not None else []
            return {
                "mark": generation_mark(lease.generations[piece.first : piece.last]),
                "crc": chained(self._sender.crc, views),
            }

    def _pull(self, channel: Channel, transfer: int, told: dict[str, Any], codec: Codec | None) -> None:
        """Send each piece: a DATA message, its bytes, and PIECE_END if the blocks did not change meanwhile."""
        deadline, codec = time.monotonic() + min(float(told["seconds"]), MOST_PULL), codec if told["coded"] else None
        for piece in (Piece(*map(int, part)) for part in told["pieces"]):
            with self._sender.reading(told["id"], piece) as lease:
                payload = self._payload(piece, lease, channel.staging, codec)
                generations_sum = generation_mark(lease.generations[piece.first : piece.last])
                header = DATA.pack(*dataclasses.astuple(piece), generations_sum, sum(map(len, payload)))
                channel.send(Kind.DATA, transfer, header, deadline, payload)
                crc = chained(self._sender.crc, payload) if told["checked"] and codec is None else 0
            channel.send(Kind.SEALED, transfer, struct.pack("<I", crc), deadline)

    def _payload(self, piece: Piece, lease: Lease, staging: Staging, codec: Codec | None) -> list[memoryview]:
        region = self._sender.region
        if codec is None and (views := region.in_place(piece, lease.blocks)):
            return views
        size = piece.size(region.layout)
        memory = staging.room(size + (codec.room(size) if codec else 0))
        plain, coded = memory[:size], memory[size:]
        region.gather(piece, lease.blocks, region.layout, plain)
        return [plain if codec is None else coded[: codec.encode(plain, coded)]]

    def _attach(self, channel: Channel, transfer: int) -> None:
        raise BadTransfer("this KV transport does not share memory")

    def _refuse(self, channel: Channel, transfer: int, error: TransferError) -> None:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        channel.tell(Kind.ERROR, transfer, body, time.monotonic() + self._patience)
